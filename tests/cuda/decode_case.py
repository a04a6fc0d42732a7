"""One decode launch on the GPU against the oracle, with every byte that must not matter poisoned."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import decode_oracle as oracle
import numpy as np
import torch
from decode_shapes import Case

from mlxcel_paged.kernels_cuda import (
    WORKSPACE_FILL,
    DecodeArguments,
    DecodeKernel,
    KernelVariant,
    WorkList,
    balanced_work_list,
    compile_variant,
)

TOLERANCE = {"float16": 1.5e-3, "bfloat16": 1.5 * 2.0**-8}
# A sink can push a whole row below the normal range of f16, where the spacing is absolute.
HALF_SPACING = {"float16": 2.0**-25, "bfloat16": 0.0}
POISON_ID = 0x7FFFFFFF
TORCH_DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


@functools.cache
def kernel(head_dim: int, head_tiles: int, dtype: str) -> DecodeKernel:
    torch.cuda.current_stream().synchronize()
    variant = KernelVariant(head_dim, head_tiles, dtype, architecture())
    return DecodeKernel(variant, compile_variant(variant))


@dataclass
class Built:
    """Tensors of a case on the device, and what the oracle needs on the host."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    sinks: torch.Tensor
    page_ids: list[list[int]]
    slots: list[int]  # of each batch row; other slots are poisoned
    table: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    work: WorkList
    items: torch.Tensor
    out_guarded: torch.Tensor
    lse: torch.Tensor
    partial_out: torch.Tensor
    partial_state: torch.Tensor
    arrivals: torch.Tensor
    owned: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        return self.out_guarded[1:-1]

    def arguments(self) -> DecodeArguments:
        case = self.case
        hnd = case.layout == "HND"
        row = case.num_kv_heads * case.head_dim
        return DecodeArguments(
            q=self.q.data_ptr(),
            k_pages=self.k.data_ptr(),
            v_pages=self.v.data_ptr(),
            page_table=self.table.data_ptr(),
            lengths=self.lengths.data_ptr(),
            work_items=self.items.data_ptr(),
            partial_out=self.partial_out.data_ptr(),
            partial_state=self.partial_state.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            out=self.out.data_ptr(),
            num_items=self.items.shape[0],
            num_workers=self.work.num_workers,
            num_kv_heads=case.num_kv_heads,
            group_size=case.group_size,
            page_size=case.page_size,
            page_table_stride=self.table.shape[1],
            q_row_stride=self.q.stride(0),
            page_stride=case.page_size * row,
            head_stride=case.page_size * case.head_dim if hnd else case.head_dim,
            token_stride=case.head_dim if hnd else row,
            sm_scale=case.head_dim**-0.5,
            k_new=self.k_new.data_ptr() if case.append else 0,
            v_new=self.v_new.data_ptr() if case.append else 0,
            new_row_stride=self.k_new.stride(0),
            first_page_offsets=self.offsets.data_ptr() if case.offsets else 0,
            sinks=self.sinks.data_ptr() if case.with_sinks else 0,
            lse=self.lse.data_ptr(),
            window=case.window or 0,
            logits_soft_cap=case.logits_soft_cap,
        )

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths[self.slots] = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def launch(self) -> None:
        head_tiles = -(-self.case.group_size // 8)
        launched = kernel(self.case.head_dim, head_tiles, self.case.dtype)
        launched.launch(self.arguments(), torch.cuda.current_stream().cuda_stream)

    def nhd(self, pages: torch.Tensor) -> torch.Tensor:
        return pages.transpose(1, 2) if self.case.layout == "HND" else pages


def build(case: Case) -> Built:
    generator = torch.Generator(device="cuda").manual_seed(case.seed)
    shuffle = np.random.default_rng(case.seed)
    dtype, device = TORCH_DTYPE[case.dtype], torch.device("cuda")
    offsets = case.offsets or [0] * len(case.lengths)
    rows, heads = len(case.lengths), case.num_kv_heads * case.group_size
    page_counts = [
        -(-(length + offset) // case.page_size) if length else 0
        for length, offset in zip(case.lengths, offsets, strict=True)
    ]
    used = sum(page_counts)
    num_pages = used + 3 + case.first_page
    ids = iter(int(page) + case.first_page for page in shuffle.permutation(used + 3)[:used])
    page_ids = [[next(ids) for _ in range(count)] for count in page_counts]
    stride = max([1, *page_counts]) + 2
    slots = [int(slot) for slot in np.random.default_rng(case.seed + 1).permutation(rows + 3)[:rows]]
    table = torch.full((rows + 3, stride), POISON_ID, dtype=torch.int32)
    slot_lengths = torch.full((rows + 3,), POISON_ID, dtype=torch.int32)
    slot_offsets = torch.full((rows + 3,), POISON_ID, dtype=torch.int32)
    for row, (slot, pages) in enumerate(zip(slots, page_ids, strict=True)):
        table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        slot_lengths[slot], slot_offsets[slot] = case.lengths[row], offsets[row]

    owned = torch.zeros((num_pages, case.page_size), dtype=torch.bool)
    for row, pages in enumerate(page_ids):
        tokens = oracle.visible_tokens(case.lengths[row], case.window)
        for token in tokens:
            place = token + offsets[row]
            owned[pages[place // case.page_size], place % case.page_size] = True
    owned = owned.to(device)

    def pool() -> torch.Tensor:
        shape = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
        values = torch.empty(shape, dtype=dtype, device=device)
        values[case.first_page :] = torch.randn(values[case.first_page :].shape, generator=generator, device=device).to(
            dtype
        )
        values[~owned] = float("nan")
        return values.transpose(1, 2).contiguous() if case.layout == "HND" else values

    # q, k_new and v_new are slices of one projection, as after a fused QKV matmul.
    width = (heads + 2 * case.num_kv_heads) * case.head_dim
    fused = torch.randn((rows, width), generator=generator, device=device)
    fused[:, : heads * case.head_dim] *= case.logit_gain
    fused = fused.to(dtype)
    split = [heads * case.head_dim, (heads + case.num_kv_heads) * case.head_dim]
    q, k_new, v_new = fused[:, : split[0]], fused[:, split[0] : split[1]], fused[:, split[1] :]

    quantum = kernel(case.head_dim, -(-case.group_size // 8), case.dtype).variant.num_warps * 16
    work = balanced_work_list(
        case.lengths,
        num_workers=case.num_workers,
        quantum=quantum,
        offsets=offsets,
        window=case.window,
        num_splits=case.num_splits,
        slots=slots,
    )
    items = torch.from_numpy(work.items.copy())
    padded = items[:, 3] == 0
    items[padded] = POISON_ID
    items[padded, 3] = 0
    guarded = torch.full((rows + 2, heads, case.head_dim), float("nan"), dtype=dtype, device=device)
    partial_rows = max(1, work.num_partial_rows)
    return Built(
        case=case,
        q=q,
        k=pool(),
        v=pool(),
        k_new=k_new,
        v_new=v_new,
        sinks=torch.randn(heads, generator=generator, device=device) * 3.0,
        page_ids=page_ids,
        slots=slots,
        table=table.to(device),
        lengths=slot_lengths.to(device),
        offsets=slot_offsets.to(device),
        work=work,
        items=items.to(device),
        out_guarded=guarded,
        lse=torch.full((rows, heads), float("nan"), device=device),
        partial_out=fresh_workspace(partial_rows, heads, case.head_dim),
        partial_state=fresh_workspace(partial_rows, heads, 2),
        arrivals=torch.zeros((rows, case.num_kv_heads), dtype=torch.int32, device=device),
        owned=owned,
    )


def fresh_workspace(*shape: int) -> torch.Tensor:
    """f32 on the GPU with the bits that a launch expects."""
    return torch.full(shape, WORKSPACE_FILL, dtype=torch.int32, device="cuda").view(torch.float32)


def is_fresh(workspace: torch.Tensor) -> bool:
    return bool((workspace.view(torch.int32) == WORKSPACE_FILL).all())


def expected(built: Built) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's answer for the state after the append."""
    case = built.case
    lengths = built.lengths[built.slots].tolist()
    offsets = built.offsets[built.slots].tolist()

    def host(tensor: torch.Tensor) -> np.ndarray:
        return tensor[case.first_page :].double().cpu().numpy()

    k, v = host(built.nhd(built.k)).copy(), host(built.nhd(built.v)).copy()
    rows = len(lengths)
    shape = (rows, case.num_kv_heads, case.head_dim)
    local_ids = [[page - case.first_page for page in pages] for pages in built.page_ids]
    if case.append:
        k_new = built.k_new.double().cpu().numpy().reshape(shape)
        v_new = built.v_new.double().cpu().numpy().reshape(shape)
        for row, length in enumerate(lengths):
            if length:
                place = length - 1 + offsets[row]
                page, slot = local_ids[row][place // case.page_size], place % case.page_size
                k[page, slot], v[page, slot] = k_new[row], v_new[row]
    q = built.q.double().cpu().numpy().reshape(rows, -1, case.head_dim)
    return oracle.decode(
        q,
        k,
        v,
        local_ids,
        lengths,
        offsets,
        sm_scale=case.head_dim**-0.5,
        window=case.window,
        logits_soft_cap=case.logits_soft_cap,
        sinks=built.sinks.double().cpu().numpy() if case.with_sinks else None,
    )


def compare(built: Built) -> tuple[float, float]:
    """Worst output error over its tolerance and worst LSE error over its tolerance; 1 is the limit of both."""
    out, lse = expected(built)
    got_out, got_lse = built.out.double().cpu().numpy(), built.lse.double().cpu().numpy()
    row_max = np.abs(out).max(-1, keepdims=True)
    error = np.abs(got_out - out)
    limit = TOLERANCE[built.case.dtype] * row_max + HALF_SPACING[built.case.dtype]
    out_ratio = np.divide(error, limit, out=np.where(error == 0, 0.0, np.inf), where=limit > 0)
    both_empty = np.isneginf(lse) & np.isneginf(got_lse)
    safe_lse, safe_got = np.where(both_empty, 0.0, lse), np.where(both_empty, 0.0, got_lse)
    lse_ratio = np.abs(safe_got - safe_lse) / (1e-5 + 4e-7 * np.abs(safe_lse))
    worst_out = float(np.nan_to_num(out_ratio, nan=np.inf).max())
    return worst_out, float(np.nan_to_num(lse_ratio, nan=np.inf).max())


def check(case: Case) -> None:
    """Builds, launches and compares; then checks the append, the guard rows and the workspace."""
    built = build(case)
    before_k, before_v = built.k.clone(), built.v.clone()
    built.launch()
    torch.cuda.synchronize()
    worst_out, worst_lse = compare(built)
    assert worst_out <= 1.0, f"output error is {worst_out:.2f} of its tolerance: {case}"
    assert worst_lse <= 1.0, f"LSE error is {worst_lse:.2f} of its tolerance: {case}"
    assert built.out_guarded[[0, -1]].isnan().all(), f"wrote beside the output: {case}"
    assert (built.arrivals == 0).all(), f"counters were not left at zero: {case}"
    assert is_fresh(built.partial_out), f"partials were left: {case}"
    assert is_fresh(built.partial_state), f"states were left: {case}"
    if case.append:
        offsets = case.offsets or [0] * len(case.lengths)
        shape = (case.num_kv_heads, case.head_dim)
        for row, length in enumerate(case.lengths):
            if length:
                place = length - 1 + offsets[row]
                page, slot = built.page_ids[row][place // case.page_size], place % case.page_size
                built.nhd(before_k)[page, slot] = built.k_new[row].reshape(shape)
                built.nhd(before_v)[page, slot] = built.v_new[row].reshape(shape)
    for before, after in ((before_k, built.k), (before_v, built.v)):
        assert torch.equal(before.view(torch.int16), after.view(torch.int16)), f"pool bytes changed: {case}"
