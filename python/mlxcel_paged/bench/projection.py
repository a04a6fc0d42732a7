"""Times the weight products of a decode step: our projection of a few rows against the BLAS behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlxcel_paged import _core
from mlxcel_paged.bench.environment import environment

# [columns, depth]: attention output, KV, MLP up, MLP down and vocabulary of SmolLM2-135M, then an 8B model's square.
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (4096, 4096))
ROWS = (1, 2, 4, 8, 16)
_ROOF_BYTES = 512 << 20


def bench_projection(
    *,
    rows: Iterable[int] = ROWS,
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures f32 products of `rows` activations with weights that come from memory.

    Returns:
        `{"environment": ..., "cases": [{"rows", "columns", "depth", "projection_us", "blas_us", "speedup",
        "gb_per_s", "roof_gb_per_s"}]}`; `gb_per_s` counts the weights once.
    """
    roof = _core.cpu_memory_roof(_ROOF_BYTES, 3)
    cases = []
    for num_rows in rows:
        for columns, depth in SHAPES:
            progress(f"{num_rows} rows, {columns} x {depth}")
            ours, blas = _core.bench_projection(num_rows, columns, depth, num_rounds)
            cases.append(
                {
                    "rows": num_rows,
                    "columns": columns,
                    "depth": depth,
                    "projection_us": round(ours, 1),
                    "blas_us": round(blas, 1),
                    "speedup": round(blas / ours, 2),
                    "gb_per_s": round(columns * depth * 4 / ours / 1e3, 2),
                    "roof_gb_per_s": round(roof, 2),
                }
            )
    return {"environment": environment(), "cases": cases}
