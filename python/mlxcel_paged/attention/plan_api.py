"""The public plan: planned once from a CSR view, run per layer, stepped without re-planning."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention import backend_choice, validation
from mlxcel_paged.attention.backend_choice import Backend
from mlxcel_paged.attention.backends import dim_contiguous, is_dim_contiguous, run_cpu, run_gather, run_reference
from mlxcel_paged.attention.cuda.planned_decode import PlannedDecode
from mlxcel_paged.attention.decode_call import DecodeCall
from mlxcel_paged.attention.page_write import write_decode
from mlxcel_paged.attention.validation import Csr, IndexArray, Tensor

_LAYOUT = "NHD"


def plan_from_csr(
    indptr: IndexArray,
    indices: IndexArray,
    last_page_len: IndexArray,
    first_page_offset: IndexArray | None = None,
    *,
    num_pages: int,
    page_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    backend: Backend = "auto",
) -> DecodePlan:
    """Plans decode attention for a batch of rows; see `paged_decode` for the CSR view.

    Args:
        indptr, indices, last_page_len, first_page_offset: The CSR view, int32 or int64, any stride, or sequences.
        num_pages: Pages of the pools that the plan will run on.
        page_size: Tokens in a page.
        num_qo_heads, num_kv_heads, head_dim: Geometry of every layer that the plan will run for.
        window: Visible tokens at most, the current one included; None for all.
        backend: As in `paged_decode`. A plan made with `auto` gathers a run's dtypes that the fused kernel does not
            serve.

    Raises:
        InvalidArgumentError, InvalidTypeError: An argument cannot be used; `.argument` names it.
        BackendUnavailableError: The backend does not run on this machine.
    """
    pages, tokens = validation.positive("num_pages", num_pages), validation.positive("page_size", page_size)
    qo, kv = validation.positive("num_qo_heads", num_qo_heads), validation.positive("num_kv_heads", num_kv_heads)
    dim = validation.positive("head_dim", head_dim)
    validation.heads("num_qo_heads", qo, kv)
    visible = validation.window(window)
    csr = validation.csr(indptr, indices, last_page_len, first_page_offset, num_pages=pages, page_size=tokens)
    chosen = backend_choice.choose_backend(
        backend,
        num_qo_heads=qo,
        num_kv_heads=kv,
        head_dim=dim,
        page_size=tokens,
        shape_arguments=("head_dim", "page_size", "num_qo_heads"),
    )
    plan = _core.DecodePlan.from_csr(
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        csr.first_page_offset,
        num_pages=pages,
        page_size=tokens,
        num_qo_heads=qo,
        num_kv_heads=kv,
        head_dim=dim,
        window=visible,
    )
    return DecodePlan(plan, (pages, tokens, kv, dim), qo, visible, chosen, is_forced=backend != "auto")


class DecodePlan:
    """A planned decode batch. Made by `plan_from_csr`.

    Lengths describe the state after a step's append: `advance` (and `append_page` before it where a row needs one),
    then `run` for every layer. On CUDA all runs of a plan are to be made on one MLX stream.
    """

    def __init__(
        self,
        plan: _core.DecodePlan,
        pool_shape: tuple[int, int, int, int],
        num_qo_heads: int,
        window: int | None,
        backend: str,
        *,
        is_forced: bool,
    ) -> None:
        self._plan = plan
        self._pool_shape = pool_shape
        self._num_qo_heads = num_qo_heads
        self._window = window
        self._backend = backend
        self._is_forced = is_forced
        kernels = backend_choice.default_cuda_kernels() if backend == "cuda" else None
        self._cuda = None if kernels is None else PlannedDecode(plan, kernels)

    @property
    def backend(self) -> str:
        """The backend that runs: `cpu`, `cuda` (see `plan_from_csr` for dtypes), `gather` or `reference`."""
        return self._backend

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return int(self._plan.num_rows)

    @property
    def epoch(self) -> int:
        """Grows with every change of the plan."""
        return int(self._plan.epoch)

    def run(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        sm_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> mx.array | tuple[mx.array, mx.array]:
        """Attends one query token per row, after writing the step's new tokens if they are given.

        Args:
            q: `[num_rows, num_qo_heads, head_dim]`.
            k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]` (NHD).
            k_new, v_new: `[num_rows, num_kv_heads, head_dim]` in the pools' dtype, written in place to each row's last
                token. Needs pools that are MLX arrays. Rows without tokens take none. The tokens are in the pools when
                the call returns. On CPU and CUDA the write is not an operation of MLX: whatever shares the pools'
                memory sees it, and so may what was built from them before the call and is evaluated after it.
            sm_scale, logits_soft_cap, sinks, return_lse: As in `paged_decode`.

        Raises:
            InvalidArgumentError, InvalidTypeError: An argument cannot be used; `.argument` names it. Nothing is written
                then.
        """
        keys, values = validation.pages(k_pages, v_pages)
        if keys.shape != self._pool_shape:
            raise validation.invalid("k_pages", f"expected the planned shape {self._pool_shape}, got {keys.shape}")
        queries = validation.tensor("q", q, 3)
        num_rows, head_dim = self.num_rows, self._pool_shape[3]
        if queries.shape != (num_rows, self._num_qo_heads, head_dim):
            expected = (num_rows, self._num_qo_heads, head_dim)
            raise validation.invalid("q", f"expected the planned shape {expected}, got {queries.shape}")
        call = DecodeCall(
            q=queries,
            k_pages=keys,
            v_pages=values,
            layout=_LAYOUT,
            sm_scale=validation.sm_scale(sm_scale, head_dim),
            window=self._window,
            logits_soft_cap=validation.logits_soft_cap(logits_soft_cap),
            sinks=validation.sinks(sinks, self._num_qo_heads, queries.dtype),
            return_lse=validation.flag("return_lse", return_lse),
        )
        backend = self._backend
        if backend == "cuda" and not backend_choice.cuda_serves(queries.dtype, keys.dtype):
            if self._is_forced:
                backend_choice.check_cuda_dtypes(queries.dtype, keys.dtype)
            backend = "gather"
        new = self._new_tokens(call, k_pages, v_pages, k_new, v_new)
        if num_rows == 0:
            out: mx.array = mx.zeros(queries.shape, queries.dtype)
            lse: mx.array | None = mx.zeros((0, self._num_qo_heads), mx.float32)
        elif backend == "cuda" and self._cuda is not None:
            out, lse = self._cuda.run(call, *new)
        elif backend == "cpu":
            out, lse = run_cpu(self._plan, call, *new)
        else:
            if new[0] is not None and new[1] is not None:
                on_cpu = mx.default_device() == mx.cpu
                write_decode(self._plan, new[0], new[1], keys, values, layout=_LAYOUT, on_cpu=on_cpu)
            out, lse = (run_gather if backend == "gather" else run_reference)(self._csr(), call)
        return (out, lse) if call.return_lse and lse is not None else out

    def advance(self) -> None:
        """Every row gets one more token.

        Raises:
            InvalidPlanError: A row's last page is full and `append_page` did not give it another; nothing is applied.
        """
        self._plan.advance()

    def append_page(self, row: int, page: int) -> None:
        """Gives `row` one more page, for the tokens after its last page is full.

        Raises:
            InvalidArgumentError: No such row or page.
            PlanFullError: The row has no room for another page.
        """
        self._plan.append_page(self._slot(row), validation.index("page", page, self._pool_shape[0]))

    def _slot(self, row: int) -> _core.Slot:
        return self._plan.slot_of(validation.index("row", row, self.num_rows))

    def _csr(self) -> Csr:
        csr = self._plan.export_csr()
        return Csr(*(np.asarray(part) for part in (csr.indptr, csr.indices, csr.last_page_len, csr.first_page_offset)))

    def _new_tokens(
        self, call: DecodeCall, k_pages: Tensor, v_pages: Tensor, k_new: Tensor | None, v_new: Tensor | None
    ) -> tuple[mx.array | None, mx.array | None]:
        if k_new is None and v_new is None:
            return None, None
        if k_new is None or v_new is None:
            raise validation.invalid("k_new" if k_new is None else "v_new", "k_new and v_new come together")
        if k_pages is v_pages:
            raise validation.invalid("v_pages", "is k_pages, and new tokens are written in place")
        expected = (self.num_rows, self._pool_shape[2], self._pool_shape[3])
        checked = []
        for argument, value in (("k_new", k_new), ("v_new", v_new)):
            array = validation.tensor(argument, value, 3)
            if array.shape != expected:
                raise validation.invalid(argument, f"expected shape {expected}, got {array.shape}")
            if array.dtype != call.k_pages.dtype:
                raise validation.invalid_type(argument, f"expected the pools' {call.k_pages.dtype}, got {array.dtype}")
            checked.append(array)
        for argument, pool in (("k_pages", k_pages), ("v_pages", v_pages)):
            if not isinstance(pool, mx.array):
                raise validation.invalid_type(argument, "new tokens are written in place, which needs an MLX array")
            if self._writes_by_pointer and not is_dim_contiguous(pool):
                raise validation.invalid(argument, "the head_dim axis must be contiguous to write new tokens in place")
        if self._writes_by_pointer:
            return dim_contiguous(checked[0]), dim_contiguous(checked[1])
        return checked[0], checked[1]

    @property
    def _writes_by_pointer(self) -> bool:
        """Whether the host writes new tokens. A look at a GPU's array from the host would move it there."""
        return self._cuda is None and mx.default_device() == mx.cpu
