"""The stock arm of `bench prefill`: mlx-lm as installed, in a process that changes neither its BLAS nor its attention.

Run as `python -m mlxcel_paged.bench.stock_prefill MODEL NUM_TOKENS`; prints one JSON document.
"""

from __future__ import annotations

import json
import sys
import time

from mlxcel_paged.bench.prompt import prompt_tokens


def measure(model: str, num_tokens: int) -> dict[str, float]:
    """Times mlx-lm from the prompt to the first token; `{"seconds"}`."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlxcel_paged.models.loader import load_model

    loaded = load_model(model, device="cpu")
    tokens = mx.array(prompt_tokens(loaded.tokenizer, num_tokens))
    mx.eval(loaded.model.parameters())
    start = time.perf_counter()
    token, _ = next(generate_step(tokens, loaded.model, max_tokens=1))
    del token
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
