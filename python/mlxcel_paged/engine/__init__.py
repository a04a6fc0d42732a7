"""The engine: a scheduler and a runner behind one thread that owns MLX.

Importing this package imports no MLX; `Engine.start` does, after it has seen to the BLAS.

| module | holds |
|---|---|
| `engine` | the thread, its door, and what happens when something raises |
| `mlx_thread` | the threads that engines run on |
| `build` | from a configuration to a scheduler and a runner over a loaded model |
| `storage` | paged or dense, and why |
| `memory`, `available` | from a byte budget to workspace and pages |
| `runner`, `paged_runner`, `dense_runner` | execution of a step |
| `decode_tokens`, `sampler` | the batch's tokens: sampled, and fed to the next step |
| `offline` | synchronous generation over an engine |
"""

from mlxcel_paged.engine.engine import Engine
from mlxcel_paged.engine.stats import EngineState, EngineStats

__all__ = ["Engine", "EngineState", "EngineStats"]
