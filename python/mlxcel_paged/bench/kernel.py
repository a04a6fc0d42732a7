"""Times one layer's decode attention over pages, by backend, next to the memory roof of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.bench.environment import environment
from mlxcel_paged.bench.timing import interleaved_medians

# Pools rotate through more memory than any cache holds, so that every call reads its pages from memory.
_ROTATED_BYTES = 512 << 20
_ROOF = "roof"
_MAX_POOLS = 64
_ROUND_SECONDS = 0.2


def bench_kernel(
    *,
    backends: Iterable[str],
    batches: Iterable[int],
    contexts: Iterable[int],
    dtypes: Iterable[str],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures `plan.run` for every dtype, batch and context (tokens), the backends taking turns.

    Returns:
        `{"environment": ..., "cases": [{"backend", "dtype", "batch", "context", "us", "gb_per_s", "roof_gb_per_s"}]}`.
        `gb_per_s` counts K and V of the visible tokens once; `roof_gb_per_s` is a plain read of the same pools by all
        cores, which takes turns with the backends. Pools lie in memory as the engine's do.
    """
    backends = tuple(backends)
    cases: list[dict[str, Any]] = []
    for dtype in dtypes:
        for batch in batches:
            for context in contexts:
                progress(f"{dtype}, batch {batch}, context {context}")
                itemsize = 4 if dtype == "float32" else 2
                useful_bytes = 2 * batch * context * num_kv_heads * head_dim * itemsize
                seconds, roof = _time_backends(
                    backends, dtype, batch, context, num_qo_heads, num_kv_heads, head_dim, page_size, num_rounds
                )
                cases += [
                    {
                        "backend": backend,
                        "dtype": dtype,
                        "batch": batch,
                        "context": context,
                        "us": round(seconds[backend] * 1e6, 1),
                        "gb_per_s": round(useful_bytes / seconds[backend] / 1e9, 3),
                        "roof_gb_per_s": round(roof, 2),
                    }
                    for backend in backends
                ]
    return {"environment": environment(), "cases": cases}


def _time_backends(
    backends: tuple[str, ...],
    dtype: str,
    batch: int,
    context: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_rounds: int,
) -> tuple[dict[str, float], float]:
    """Median seconds a call by backend, and the roof in GB/s."""
    import mlx.core as mx

    from mlxcel_paged import plan_from_csr

    pages_per_row = -(-context // page_size)
    num_pages = batch * pages_per_row
    mx_dtype = getattr(mx, dtype)
    shape = (num_pages, num_kv_heads, page_size, head_dim)  # HND, see kvcache.pools; passed as views in NHD order
    pool_bytes = 2 * num_pages * page_size * num_kv_heads * head_dim * mx_dtype.size
    rng = np.random.default_rng(0)
    indptr = np.arange(0, num_pages + 1, pages_per_row, dtype=np.int32)
    indices = rng.permutation(num_pages).astype(np.int32)
    last_page_len = np.full(batch, context - (pages_per_row - 1) * page_size, np.int32)

    def plan(backend: Any) -> Any:
        return plan_from_csr(
            indptr,
            indices,
            last_page_len,
            num_pages=num_pages,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            backend=backend,
        )

    # Refuses shapes that no backend serves before any memory is taken.
    plans = {backend: plan(backend) for backend in backends}
    with mx.stream(mx.cpu):
        page = rng.standard_normal((1, *shape[1:]), np.float32)
        num_pools = min(_MAX_POOLS, max(1, -(-_ROTATED_BYTES // pool_bytes)))
        memory = [(_filled(shape, mx_dtype, page), _filled(shape, mx_dtype, -page)) for _ in range(num_pools)]
        pools = [(k_pages.swapaxes(1, 2), v_pages.swapaxes(1, 2)) for k_pages, v_pages in memory]
        q = mx.random.normal((batch, num_qo_heads, head_dim), mx_dtype, key=mx.random.key(0))
        mx.eval(q, pools)
        as_bytes = [[pool.view(mx.uint8) for pool in pair] for pair in memory]
        mx.eval(as_bytes)

    def launch(plan: Any, turn: list[int]) -> None:
        k_pages, v_pages = pools[turn[0] % len(pools)]
        turn[0] += 1
        mx.eval(plan.run(q, k_pages, v_pages))

    def read(turn: list[int]) -> None:
        for part in as_bytes[turn[0] % len(as_bytes)]:
            _core.cpu_read_seconds(part)
        turn[0] += 1

    arms = {backend: partial(launch, plans[backend], [0]) for backend in backends}
    seconds = interleaved_medians(
        {**arms, _ROOF: partial(read, [0])}, num_rounds=num_rounds, min_round_seconds=_ROUND_SECONDS
    )
    return seconds, pool_bytes / seconds[_ROOF] / 1e9


def _filled(shape: tuple[int, ...], dtype: Any, page: np.ndarray[Any, Any]) -> Any:
    """A pool of copies of `page`, allocated as the engine's are."""
    import mlx.core as mx

    from mlxcel_paged.kvcache.pool_memory import prepare_zeroed

    pool = mx.zeros(shape, dtype)
    mx.eval(pool)
    prepare_zeroed(pool)
    carried = mx.array(page).astype(dtype)
    if dtype == mx.bfloat16:
        np.asarray(pool.view(mx.uint16))[:] = np.asarray(carried.view(mx.uint16))
    else:
        np.array(pool, copy=False)[:] = np.array(carried)
    return pool
