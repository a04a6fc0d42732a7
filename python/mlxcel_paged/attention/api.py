"""The public one-shot decode attention."""

from __future__ import annotations

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.attention import backend_choice, validation
from mlxcel_paged.attention.backend_choice import Backend
from mlxcel_paged.attention.backends import run_cpu, run_gather, run_reference
from mlxcel_paged.attention.cuda.planned_decode import PlannedDecode
from mlxcel_paged.attention.decode_call import DecodeCall
from mlxcel_paged.attention.validation import IndexArray, Tensor


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    indptr: IndexArray,
    indices: IndexArray,
    last_page_len: IndexArray,
    first_page_offset: IndexArray | None = None,
    sm_scale: float | None = None,
    window: int | None = None,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    layout: str = "NHD",
    backend: Backend = "auto",
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attends one query token per row over the row's KV pages.

    Row `b` holds the pages `indices[indptr[b]:indptr[b + 1]]`, of which the first is used from token
    `first_page_offset[b]` on and the last up to token `last_page_len[b]`; a row without pages has `last_page_len` 0,
    output 0 and LSE -inf (with a sink, the sink). Bytes of the pools outside the visible tokens may hold anything.

    Args:
        q: `[batch, num_qo_heads, head_dim]`, float32, float16 or bfloat16; an MLX or a NumPy array.
        k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]` (NHD) or `[num_pages, num_kv_heads,
            page_size, head_dim]` (HND), of one shape and dtype. Strides may differ.
        indptr: `[batch + 1]` int32 or int64; a NumPy or MLX array, strided or not, or a sequence of ints.
        indices: `[indptr[-1]]` or longer; the tail is never read. Each below `num_pages`.
        last_page_len: `[batch]`, 1 to `page_size`.
        first_page_offset: `[batch]`, below the tokens in the first page; None for 0.
        sm_scale: Factor on the logits; None for `head_dim ** -0.5`.
        window: Visible tokens at most, the current one included; None for all.
        logits_soft_cap: `cap * tanh(logit / cap)` with this cap; 0 for off.
        sinks: `[num_qo_heads]`, float32 or the queries' dtype: logits that take weight but carry no value.
        layout: `NHD` or `HND`.
        backend: `auto`, `cpu`, `gather`, `reference` (float64 NumPy), `cuda`, `metal`. `auto` takes the fused kernel of
            MLX's default device where it serves the shape, else gathers. `cuda` takes float16 and bfloat16, queries and
            pools alike, and page sizes that are powers of two; its launch is on its way when the call returns.
        num_splits: Parts that one row's KV is split into at most; None leaves it to the plan.
        batch_invariant: Give a row the same bits whatever its neighbours are.
        return_lse: Also return the base-2 log-sum-exp of the logits.

    Returns:
        The output in `q`'s shape and dtype, and with `return_lse` also the LSE `[batch, num_qo_heads]` float32.

    Raises:
        InvalidArgumentError: A value or shape is out of its domain; `.argument` names it.
        InvalidTypeError: A type or dtype cannot be used; `.argument` names it.
        BackendUnavailableError: The backend does not run on this machine.
    """
    name = validation.layout_name(layout)
    keys, values = validation.pages(k_pages, v_pages)
    queries = validation.tensor("q", q, 3)
    batch, num_qo_heads, head_dim = queries.shape
    num_pages, page_size, num_kv_heads, kv_head_dim = keys.shape
    if name == "HND":
        page_size, num_kv_heads = num_kv_heads, page_size
    if head_dim != kv_head_dim:
        raise validation.invalid("q", f"head_dim {head_dim} differs from the pages' {kv_head_dim}")
    validation.heads("q", num_qo_heads, num_kv_heads)
    csr = validation.csr(
        indptr, indices, last_page_len, first_page_offset, num_pages=num_pages, page_size=page_size, batch=batch
    )
    splits = validation.num_splits(num_splits)
    invariant = validation.flag("batch_invariant", batch_invariant)
    call = DecodeCall(
        q=queries,
        k_pages=keys,
        v_pages=values,
        layout=name,
        sm_scale=validation.sm_scale(sm_scale, head_dim),
        window=validation.window(window),
        logits_soft_cap=validation.logits_soft_cap(logits_soft_cap),
        sinks=validation.sinks(sinks, num_qo_heads, queries.dtype),
        return_lse=validation.flag("return_lse", return_lse),
        row_by_row=invariant,
    )
    chosen = backend_choice.choose_backend(
        backend, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
    )
    if chosen == "cuda" and not backend_choice.cuda_serves(queries.dtype, keys.dtype):
        if backend != "auto":
            backend_choice.check_cuda_dtypes(queries.dtype, keys.dtype)
        chosen = "gather"
    out: mx.array
    lse: mx.array | None
    if batch == 0:
        out, lse = mx.zeros(queries.shape, queries.dtype), mx.zeros((0, num_qo_heads), mx.float32)
    elif chosen in ("cpu", "cuda"):
        plan = _core.DecodePlan.from_csr(
            csr.indptr,
            csr.indices,
            csr.last_page_len,
            csr.first_page_offset,
            num_pages=num_pages,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=call.window,
            num_splits=splits,
            batch_invariant=invariant,
        )
        kernels = backend_choice.default_cuda_kernels() if chosen == "cuda" else None
        if kernels is None:
            out, lse = run_cpu(plan, call, None, None)
        else:
            out, lse = PlannedDecode(plan, kernels).run(call, None, None)
    else:
        out, lse = (run_gather if chosen == "gather" else run_reference)(csr, call)
    return (out, lse) if call.return_lse and lse is not None else out
