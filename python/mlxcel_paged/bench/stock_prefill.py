"""The stock arm of `bench prefill`: mlx-lm as installed, in a process that changes neither its BLAS nor its attention.

Run as `python -m mlxcel_paged.bench.stock_prefill JSON NUM_TOKENS`, where JSON has `model`, `dtype` and
`keep_quantized`; prints one JSON document.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from mlxcel_paged.bench.prompt import prompt_tokens


def measure(model: str, num_tokens: int, **options: Any) -> dict[str, float]:
    """Times mlx-lm from the prompt to the first token; `{"seconds"}`."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from mlxcel_paged.models.loader import load_model

    loaded = load_model(model, device="cpu", **options)
    tokens = mx.array(prompt_tokens(loaded.tokenizer, num_tokens))
    mx.eval(loaded.model.parameters())
    start = time.perf_counter()
    token, _ = next(generate_step(tokens, loaded.model, max_tokens=1))
    del token
    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    print(json.dumps(measure(num_tokens=int(sys.argv[2]), **json.loads(sys.argv[1]))))
