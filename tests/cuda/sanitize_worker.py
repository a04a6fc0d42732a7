"""The process that compute-sanitizer watches: runs the launches of `sanitized_set.py` and checks their results."""

from __future__ import annotations

import sys
import time

import torch
from decode_case import architecture, check
from decode_shapes import Case
from sanitized_set import PageWrite, sanitized

from mlxcel_paged.kernels_cuda import CudaFunction
from mlxcel_paged.kernels_cuda.page_kernel import PageKernel, compile_page_kernel

NUM_THREADS = 256


def check_page_write(case: PageWrite) -> None:
    """Every token is where it belongs, and nothing else was written."""
    generator = torch.Generator(device="cuda").manual_seed(case.seed)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 1 << 14, shape, dtype=torch.int16, device="cuda", generator=generator)

    heads, dim, page_size = case.num_kv_heads, case.head_dim, case.page_size
    pools = [bits(case.num_pages, heads, page_size, dim) for _ in "kv"]
    new = [bits(case.num_tokens, heads, dim) for _ in "kv"]
    places = torch.randperm(case.num_pages * page_size, device="cuda", generator=generator)[: case.num_tokens].int()
    places[::3] = -1
    wanted = [pool.clone() for pool in pools]
    for token, place in enumerate(places.tolist()):
        if place >= 0:
            for pool, rows in zip(wanted, new, strict=True):
                pool[place // page_size, :, place % page_size] = rows[token]
    order_token = torch.full((1,), 7, dtype=torch.int32, device="cuda")

    kernel = PageKernel.for_row("page_write", dim * 2, architecture())
    function = CudaFunction(compile_page_kernel(kernel).cubin, kernel.entry_point)
    chunks = dim * 2 // kernel.chunk_bytes
    pool_shape = (page_size, heads * page_size * chunks, page_size * chunks, chunks)
    num_tokens = len(places)
    function.launch(
        (-(-num_tokens * heads * chunks // NUM_THREADS), 1),
        NUM_THREADS,
        [tensor.data_ptr() for tensor in (*new, *pools, places, order_token)],
        (num_tokens, heads, chunks, heads * chunks, chunks, *pool_shape),
        torch.cuda.current_stream().cuda_stream,
    )
    torch.cuda.synchronize()
    assert order_token.item() == 0, f"the order token was not written: {case}"
    for pool, expected in zip(pools, wanted, strict=True):
        assert torch.equal(pool, expected), f"pool bytes differ: {case}"


def main() -> int:
    cases = sanitized(int(sys.argv[1]))
    num_wrong = 0
    for number, case in enumerate(cases, 1):
        began = time.perf_counter()
        try:
            if isinstance(case, Case):
                check(case)
            else:
                check_page_write(case)
        except AssertionError as error:  # the other launches are still worth a look
            num_wrong += 1
            print(f"wrong: {error}", flush=True)
        seconds = time.perf_counter() - began
        print(f"case {number} of {len(cases)}, {seconds:.1f} s: {case.label or case}", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
