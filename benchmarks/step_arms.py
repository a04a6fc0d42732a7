"""The decode loops that the whole-step benchmark times: mlx-lm's BatchGenerator, and ours on pages.

Contexts are synthetic: random keys and values in the places where a prefill would have put them. Weights are random.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from step_cells import ModelShape

if TYPE_CHECKING:
    from mlxcel_paged.engine.token_reader import PendingTokens

_FIRST_TOKEN = 7
_ENDLESS = 1 << 30


class Arm(Protocol):
    """One way to decode a batch."""

    def step(self) -> float:
        """Delivers one more token of every sequence. Returns the seconds until the next step was enqueued."""

    def num_tokens(self) -> list[int]:
        """Tokens of context of every sequence, those generated included."""

    def outcomes(self) -> dict[str, int]:
        """Decode launches so far, one per layer and step, by what they did."""

    def is_finite(self) -> bool:
        """Runs one more step and tells whether all its logits are finite."""


def build_model(shape: ModelShape, *, bits: int, dtype: mx.Dtype) -> nn.Module:
    """An mlx-lm llama with random weights, evaluated; quantized in groups of 64 if `bits` is not 0."""
    from mlx_lm.models import llama

    mx.random.seed(0)
    model: nn.Module = llama.Model(llama.ModelArgs(**shape.arguments()))
    model.set_dtype(dtype)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        mx.eval(model.parameters())
    model.eval()
    mx.clear_cache()
    return model


class BatchGeneratorArm:
    """mlx-lm's continuous batching with its defaults, greedy; caches are handed over as its prompt cache does."""

    def __init__(self, model: Any, shape: ModelShape, lengths: Sequence[int], dtype: mx.Dtype) -> None:
        from mlx_lm.generate import BatchGenerator

        self._generator = BatchGenerator(model, max_tokens=_ENDLESS)
        self._num_layers = shape.num_hidden_layers
        self._num_steps = 0
        self._lengths = list(lengths)
        self._generator.insert(
            [[_FIRST_TOKEN]] * len(lengths),
            caches=[self._prompt_cache(model, shape, length, dtype) for length in lengths],
        )
        self._enqueued = 0.0
        self._watch_async_eval()
        while len(self._generator._generation_batch) < len(lengths):
            self._generator.next()

    def step(self) -> float:
        start = time.perf_counter()
        _, self._responses = self._generator.next()
        self._num_steps += 1
        return self._enqueued - start

    def num_tokens(self) -> list[int]:
        batch = self._generator._generation_batch
        sizes: list[int] = batch.prompt_cache[0].offset.tolist()
        return [sizes[batch.uids.index(uid)] for uid in range(len(self._lengths))]

    def outcomes(self) -> dict[str, int]:
        kinds = {type(cache).__name__ for cache in self._generator._generation_batch.prompt_cache}
        ours = "mlxcel_paged" in sys.modules
        return {"not mlx-lm alone" if ours else "+".join(sorted(kinds)): self._num_steps * self._num_layers}

    def is_finite(self) -> bool:
        self.step()
        return all(bool(mx.isfinite(response.logprobs).all()) for response in self._responses)

    @staticmethod
    def _prompt_cache(model: Any, shape: ModelShape, length: int, dtype: mx.Dtype) -> list[Any]:
        """One sequence's caches. The layers share the arrays until the generator merges them, which copies."""
        from mlx_lm.models.cache import make_prompt_cache

        head_dim = shape.hidden_size // shape.num_attention_heads
        size = (1, shape.num_key_value_heads, length, head_dim)
        keys, values = (mx.random.uniform(-1, 1, size).astype(dtype) for _ in range(2))
        mx.eval(keys, values)
        caches: list[Any] = make_prompt_cache(model)
        for cache in caches:
            cache.keys, cache.values, cache.offset = keys, values, length
        return caches

    def _watch_async_eval(self) -> None:
        original = mx.async_eval

        def async_eval(*arrays: Any) -> None:
            original(*arrays)
            self._enqueued = time.perf_counter()

        mx.async_eval = async_eval
        self._restore = lambda: setattr(mx, "async_eval", original)

    def close(self) -> None:
        self._restore()
        self._generator.close()


class PagedArm:
    """Ours, one step ahead as in the engine: enqueue a step, then read the tokens of the one before.

    Args:
        reads_array: Read tokens out of their array even where the engine has another way.
    """

    def __init__(
        self,
        model: Any,
        lengths: Sequence[int],
        *,
        arm: Any,
        device: Any,
        page_size: int,
        max_context: int,
        dtype: mx.Dtype,
        reads_array: bool,
    ) -> None:
        from mlxcel_paged.attention.cuda.library import cuda_kernels
        from mlxcel_paged.engine.token_reader import ArrayTokens, new_token_reader
        from mlxcel_paged.models.loader import LoadedModel
        from mlxcel_paged.models.paged_model import PagedModel
        from mlxcel_paged.models.paged_rows import PagedRows

        loaded = LoadedModel(model, None, "random", max_context, {}, dtype, device)  # type: ignore[arg-type]
        self._paged = PagedModel(
            loaded,
            num_pages=sum(-(-(length + max_context - max(lengths)) // page_size) for length in lengths),
            page_size=page_size,
            max_slots=len(lengths),
            max_context=max_context,
            arm=arm,
        )
        scatter_free_pages(self._paged.page_pools[0])
        _fill_pools(self._paged.pools, on_cpu=device == "cpu")
        self._rows = PagedRows(self._paged)
        for length in lengths:
            self._rows.add_synthetic(length)
        self._tokens = mx.array([_FIRST_TOKEN] * len(lengths), mx.int32)
        self._reader = None if device == "cpu" or reads_array else new_token_reader(cuda_kernels(), len(lengths))
        self._array_tokens = ArrayTokens
        self._previous: PendingTokens | None = None

    def step(self) -> float:
        start = time.perf_counter()
        logits = self._rows.decode(self._tokens)
        self._tokens = mx.argmax(logits, axis=-1).view(mx.int32)
        if self._reader is None:
            mx.async_eval(self._tokens)
            launched: PendingTokens = self._array_tokens(self._tokens, len(self._rows))
        else:
            launched = self._reader.publish(self._tokens, len(self._rows))
        enqueued = time.perf_counter() - start
        if self._previous is not None:
            self._previous.wait()
        self._previous = launched
        return enqueued

    def num_tokens(self) -> list[int]:
        return [int(length) for length in memoryview(self._paged.plans[0].export_csr().lengths)]

    def outcomes(self) -> dict[str, int]:
        return self._paged.outcomes.snapshot()

    def is_finite(self) -> bool:
        return bool(mx.isfinite(self._rows.decode(self._tokens)).all())

    def close(self) -> None:
        self._rows.close()


def scatter_free_pages(pool: Any) -> None:
    """Frees all pages in random order, so that tables are as scattered as after hours of serving."""
    pages = pool.acquire(pool.num_pages)
    random.Random(3).shuffle(pages)
    for page in pages:
        pool.release([page])


_FILL = """
    const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (i < static_cast<size_t>(size[0])) {
        unsigned bits = static_cast<unsigned>(i) * 747796405u + static_cast<unsigned>(size[1]);
        bits = ((bits >> ((bits >> 28) + 4)) ^ bits) * 277803737u;
        bits = (bits >> 22) ^ bits;
        const_cast<T*>(pool)[i] = static_cast<T>((bits & 0xffff) * (1.0f / 32768.0f) - 1.0f);
    }
    if (i == 0) done[0] = 1;
"""


def _fill_pools(pools: Any, *, on_cpu: bool) -> None:
    """Writes uniform numbers from [-1, 1) into all pages, in place: zeros would be read too cheaply."""
    kernel = None
    if not on_cpu:
        kernel = mx.fast.cuda_kernel(
            name=f"fill_{str(pools.dtype).rpartition('.')[2]}",
            input_names=["pool", "size"],
            output_names=["done"],
            source=_FILL,
        )
    for layer in range(pools.layout.num_layers):
        for salt, pool in enumerate((pools.k(layer), pools.v(layer))):
            if kernel is None:
                view = np.array(pool, copy=False)
                view[:] = np.random.default_rng(2 * layer + salt).uniform(-1, 1, view.shape)
                continue
            done = kernel(
                inputs=[pool, mx.array([pool.size, 2 * layer + salt], mx.int32)],
                template=[("T", pool.dtype)],
                output_shapes=[(1,)],
                output_dtypes=[mx.int32],
                grid=(-(-pool.size // 256) * 256, 1, 1),
                threadgroup=(256, 1, 1),
            )
            mx.eval(done)
    last = pools.v(pools.layout.num_layers - 1)[-1].astype(mx.float32)
    spread = float(mx.sqrt(mx.mean(last * last)))
    if not 0.5 < spread < 0.65:
        raise RuntimeError(f"the pools were not filled: the last page's root mean square is {spread}, not 0.577")
