"""What the CUDA decode benchmark times: our kernel, FlashInfer, XQA and a plain reader, all over the same pools."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from decode_cuda_cells import Cell

from mlxcel_paged.kernels_cuda import (
    WORKSPACE_FILL,
    CudaFunction,
    DecodeArguments,
    DecodeKernel,
    KernelVariant,
    balanced_work_list,
    compile_source,
    compile_variant,
)

POOL_BYTES = 400e6  # rotated pools hold more than this, several times the L2 cache

Launch = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """`launch(i)` runs over pool i; `output()` is what the last launch wrote, None for the reader."""

    name: str
    launch: Launch
    output: Callable[[], torch.Tensor] | None
    page_size: int
    layout: str


class Pools:
    """Rotated K and V pools of a cell as flat buffers, viewed in any page size and layout."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.num_pools = int(POOL_BYTES // cell.useful_bytes) + 1
        self.pages_of_64 = sum(-(-length // 64) + (1 if cell.context else 0) for length in cell.lengths)
        elements = self.pages_of_64 * 64 * cell.num_kv_heads * cell.head_dim
        generator = torch.Generator(device="cuda").manual_seed(7)
        shape = (self.num_pools, elements)
        self.k = torch.empty(shape, dtype=torch.float16, device="cuda")
        self.v = torch.empty(shape, dtype=torch.float16, device="cuda")
        for pool in range(self.num_pools):
            for tensor in (self.k, self.v):
                tensor[pool].normal_(generator=generator)
        self.q = torch.randn(
            (len(cell.lengths), cell.num_qo_heads, cell.head_dim), generator=generator, device="cuda"
        ).half()

    def view(self, tensor: torch.Tensor, pool: int, page_size: int, layout: str) -> torch.Tensor:
        heads, dim = self.cell.num_kv_heads, self.cell.head_dim
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        return tensor[pool].view(-1, *inner, dim)

    def page_table(self, page_size: int) -> torch.Tensor:
        """int32 [B, pages]: shuffled pages. Outside its window a row repeats id 0, which nothing reads."""
        cell = self.cell
        num_pages = self.pages_of_64 * 64 // page_size
        order = np.random.default_rng(3).permutation(num_pages)
        held = [cell.context or length for length in cell.lengths]
        table = np.zeros((len(held), max(-(-tokens // page_size) for tokens in held)), np.int32)
        taken = 0
        for row, (tokens, visible) in enumerate(zip(held, cell.lengths, strict=True)):
            last = -(-tokens // page_size)
            first = (tokens - visible) // page_size
            table[row, first:last] = order[taken : taken + last - first]
            taken += last - first
        return torch.from_numpy(table).cuda()

    def held(self) -> list[int]:
        return [self.cell.context or length for length in self.cell.lengths]


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def ours(
    pools: Pools,
    page_size: int,
    layout: str,
    *,
    kernel: DecodeKernel | None = None,
    workers: int | None = None,
    min_quanta: int = 1,
    name: str | None = None,
    overlaps: bool = False,
) -> Arm:
    """Our kernel with the balanced work list, one block a multiprocessor.

    Args:
        overlaps: Launched as XQA and FlashInfer are by default, with programmatic dependent launch. MLX cannot do so.
    """
    cell = pools.cell
    if kernel is None:
        variant = KernelVariant.for_shape(
            head_dim=cell.head_dim, group_size=cell.group_size, dtype="float16", architecture=architecture()
        )
        kernel = DecodeKernel(variant, compile_variant(variant))
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    work = balanced_work_list(
        pools.held(),
        num_workers=workers or max(1, multiprocessors // cell.num_kv_heads),
        quantum=kernel.variant.num_warps * 16,
        min_quanta=min_quanta,
        window=cell.lengths[0] if cell.context else None,
    )
    rows, heads, dim = pools.q.shape
    items = torch.from_numpy(work.items).cuda()
    table = pools.page_table(page_size)
    lengths = torch.tensor(pools.held(), dtype=torch.int32, device="cuda")
    partial_out, partial_state = (
        torch.full((max(1, work.num_partial_rows), heads, words), WORKSPACE_FILL, dtype=torch.int32, device="cuda")
        for words in (dim, 2)
    )
    arrivals = torch.zeros((rows, cell.num_kv_heads), dtype=torch.int32, device="cuda")
    out = torch.empty_like(pools.q)
    lse = torch.empty((rows, heads), device="cuda")
    row = cell.num_kv_heads * dim
    keep = (items, table, lengths, partial_out, partial_state, arrivals, out, lse)

    def launch(pool: int) -> None:
        arguments = DecodeArguments(
            q=pools.q.data_ptr(),
            k_pages=pools.k[pool].data_ptr(),
            v_pages=pools.v[pool].data_ptr(),
            page_table=table.data_ptr(),
            lengths=lengths.data_ptr(),
            work_items=items.data_ptr(),
            partial_out=partial_out.data_ptr(),
            partial_state=partial_state.data_ptr(),
            arrivals=arrivals.data_ptr(),
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            num_items=items.shape[0],
            num_workers=work.num_workers,
            num_kv_heads=cell.num_kv_heads,
            group_size=cell.group_size,
            page_size=page_size,
            page_table_stride=table.shape[1],
            q_row_stride=heads * dim,
            page_stride=page_size * row,
            head_stride=dim if layout == "NHD" else page_size * dim,
            token_stride=row if layout == "NHD" else dim,
            sm_scale=dim**-0.5,
            window=cell.lengths[0] if cell.context else 0,
        )
        kernel.launch(arguments, torch.cuda.current_stream().cuda_stream, overlaps_previous=overlaps)

    return Arm(name or f"ours p{page_size}", launch, lambda: keep[6], page_size, layout)


def flashinfer(pools: Pools) -> Arm:
    """FlashInfer's CUDA-core batch decode, page 16, planned outside the timed region."""
    import flashinfer as fi

    cell, page_size = pools.cell, 16
    table = pools.page_table(page_size).cpu()
    counts = [-(-length // page_size) for length in cell.lengths]
    indptr = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device="cuda")
    indices = torch.cat([table[row, :count] for row, count in enumerate(counts)]).cuda()
    last = torch.tensor([(length - 1) % page_size + 1 for length in cell.lengths], dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rows = len(cell.lengths)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=torch.empty_like(indptr),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty(rows, dtype=torch.int32, device="cuda"),
    )
    wrapper.plan(
        indptr,
        indices,
        last,
        cell.num_qo_heads,
        cell.num_kv_heads,
        cell.head_dim,
        page_size,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    out = torch.empty_like(pools.q)

    def launch(pool: int) -> None:
        cache = tuple(pools.view(tensor, pool, page_size, "NHD") for tensor in (pools.k, pools.v))
        wrapper.run(pools.q, cache, out=out)

    return Arm("flashinfer p16", launch, lambda: out, page_size, "NHD")


def xqa(pools: Pools, page_size: int) -> Arm:
    """XQA as FlashInfer ships it, its defaults (programmatic dependent launch included)."""
    from flashinfer.xqa import xqa as run

    cell = pools.cell
    rows = len(cell.lengths)
    table = pools.page_table(page_size)
    lengths = torch.tensor(cell.lengths, dtype=torch.int32, device="cuda").view(torch.uint32).reshape(rows, 1)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda").view(torch.uint32)
    q = pools.q.unsqueeze(1)
    out = torch.empty_like(q)

    def launch(pool: int) -> None:
        k, v = (pools.view(tensor, pool, page_size, "HND") for tensor in (pools.k, pools.v))
        run(
            q,
            k,
            v,
            table,
            lengths,
            out,
            workspace,
            semaphores,
            cell.num_kv_heads,
            page_size,
            kv_layout="HND",
        )

    return Arm(f"xqa p{page_size}", launch, lambda: out[:, 0], page_size, "HND")


def cudnn(pools: Pools) -> Arm:
    """cuDNN's attention through PyTorch over dense caches of the same bytes: rows of one length only, no page table."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    cell = pools.cell
    rows, length = len(cell.lengths), cell.lengths[0]
    if len(set(cell.lengths)) > 1:
        raise ValueError("rows differ in length")
    # Row b of the paged arms reads page table[b] when a page is a whole row; here row b reads block b.
    order = pools.page_table(length)[:, 0].long()
    q = torch.empty_like(pools.q)
    q[order] = pools.q
    q = q.unsqueeze(2)
    result: list[torch.Tensor] = []

    def launch(pool: int) -> None:
        k, v = (pools.view(tensor, pool, length, "HND") for tensor in (pools.k, pools.v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            result[:] = [scaled_dot_product_attention(q, k, v, enable_gqa=True)]

    return Arm("cudnn dense", launch, lambda: result[0].view(rows, -1, cell.head_dim)[order], length, "HND")


READER = b"""
struct alignas(16) Word4 { unsigned x, y, z, w; };
extern "C" __global__ void __launch_bounds__(512) read_all(const Word4* k, const Word4* v, unsigned* out, int count) {
  unsigned sum = 0;
  int step = gridDim.x * blockDim.x;
  int first = blockIdx.x * blockDim.x + threadIdx.x;
  for (int half = 0; half < 2; ++half) {
    const Word4* source = half ? v : k;
    int i = first;
    for (; i + 7 * step < count; i += 8 * step) {
      Word4 word[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) word[j] = source[i + j * step];
#pragma unroll
      for (int j = 0; j < 8; ++j) sum ^= word[j].x ^ word[j].y ^ word[j].z ^ word[j].w;
    }
    for (; i < count; i += step) sum ^= source[i].x ^ source[i].y ^ source[i].z ^ source[i].w;
  }
  if (sum == 0x9e3779b9u) out[0] = sum;
}
"""


class Reader:
    """Reads as many bytes as the cell's useful ones, 16 bytes a load and eight loads in flight a thread."""

    def __init__(self) -> None:
        self._out = torch.zeros(1, dtype=torch.int32, device="cuda")  # also creates the context to load into
        options = (f"--gpu-architecture={architecture()}", "--std=c++17")
        self._function = CudaFunction(compile_source("read_all", READER, options).cubin, "read_all")

    def arm(self, pools: Pools, blocks_per_multiprocessor: int) -> Arm:
        count = pools.cell.useful_bytes // 2 // 16
        blocks = torch.cuda.get_device_properties(0).multi_processor_count * blocks_per_multiprocessor

        def launch(pool: int) -> None:
            pointers = (pools.k[pool].data_ptr(), pools.v[pool].data_ptr(), self._out.data_ptr())
            self._function.launch((blocks, 1), 512, pointers, (count,), torch.cuda.current_stream().cuda_stream)

        return Arm(f"reader x{blocks_per_multiprocessor}", launch, None, 0, "")


def reference(pools: Pools, page_size: int, layout: str) -> torch.Tensor:
    """f64 attention over pool 0 in that view."""
    cell = pools.cell
    table, out = pools.page_table(page_size).long(), torch.empty(pools.q.shape, dtype=torch.float64, device="cuda")
    k, v = (pools.view(tensor, 0, page_size, layout) for tensor in (pools.k, pools.v))
    for row, (held, length) in enumerate(zip(pools.held(), cell.lengths, strict=True)):
        first = (held - length) // page_size
        pages = table[row, first : -(-held // page_size)]
        skip = held - length - first * page_size
        parts = []
        for tensor in (k, v):
            part = tensor[pages] if layout == "NHD" else tensor[pages].transpose(1, 2)
            parts.append(part.reshape(-1, cell.num_kv_heads, cell.head_dim)[skip : skip + length].double())
        q = pools.q[row].double().view(cell.num_kv_heads, cell.group_size, cell.head_dim)
        weights = (torch.einsum("hgd,lhd->hgl", q, parts[0]) / math.sqrt(cell.head_dim)).softmax(-1)
        out[row] = torch.einsum("hgl,lhd->hgd", weights, parts[1]).reshape(cell.num_qo_heads, cell.head_dim)
    return out


def median_us(arm: Arm, num_pools: int, samples: int) -> float:
    """Median of graph replays, microseconds a launch. A graph holds at least 16 launches over all pools in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arm.launch(0)
    torch.cuda.synchronize()
    launches = max(1, 16 // num_pools) * num_pools
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            arm.launch(index % num_pools)
    times = []
    for sample in range(samples + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if sample >= 3:
            times.append(start.elapsed_time(end) * 1e3 / launches)
    return float(np.median(times))
