"""The compiled core of mlxcel-paged: page pool, budget, page tables, decode plan and CPU attention.

Counts are non-negative ints, arrays of ids and lengths are int32. Arrays come back as read-only memoryviews, which
NumPy takes without a copy (`numpy.asarray(view)`).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeAlias, final

__all__ = [
    "MAX_PROJECTION_ROWS",
    "AllocationError",
    "Append",
    "BlockBudget",
    "BudgetExceededError",
    "BudgetTooSmallError",
    "CorruptionError",
    "Csr",
    "DecodePlan",
    "DecodeRows",
    "DeviceMirror",
    "InvalidArgumentError",
    "InvalidPlanError",
    "InvalidTypeError",
    "OutOfPagesError",
    "PagePool",
    "PageTable",
    "PagedError",
    "PlanFullError",
    "PlanSnapshot",
    "Reservation",
    "Slot",
    "StaleSlotError",
    "StreamList",
    "__version__",
    "bench_plan",
    "bench_projection",
    "blas_num_calls",
    "cpu_copy_page",
    "cpu_memory_roof",
    "cpu_paged_decode",
    "cpu_paged_prefill",
    "cpu_read_seconds",
    "cpu_write_decode",
    "cpu_write_pages",
    "global_blas_path",
    "install_blas",
    "num_threads",
    "simd_level",
]

__version__: str

MAX_PROJECTION_ROWS: int
"""Rows of activations up to which a product with weights gives each row the same bits whatever the others are."""

class _Buffer(Protocol):
    def __buffer__(self, flags: int, /) -> memoryview: ...

_Indices: TypeAlias = Sequence[int] | _Buffer
"""A sequence of ints, or a one-dimensional int32 or int64 buffer, contiguous or not."""

_Array: TypeAlias = object
"""A float32, float16 or bfloat16 array with a buffer: NumPy or MLX (evaluated), last dimension contiguous.

MLX's stubs do not declare its buffers. bfloat16 is what MLX exports, or carried by uint16. An array that is written to
must be writable, without overlap in itself or with another argument.
"""

class PagedError(Exception):
    """Base of every error that this package raises on purpose."""

    slug: ClassVar[str]
    """Stable name of the kind of error."""
    hint: str | None
    """What to do about it, where there is something."""

class OutOfPagesError(PagedError, RuntimeError):
    """The pool has fewer free pages than asked for."""

    needed: int
    free: int

class BudgetTooSmallError(PagedError, ValueError):
    """The KV budget does not hold the workspace and one page."""

    total_bytes: int
    workspace_bytes: int
    page_bytes: int
    smallest_usable_bytes: int

class BudgetExceededError(PagedError, RuntimeError):
    """A reservation does not fit what is left of the budget (in pages)."""

    needed: int
    available: int
    total: int

class InvalidArgumentError(PagedError, ValueError):
    """An argument's value is out of its domain."""

    argument: str

class InvalidTypeError(PagedError, TypeError):
    """An argument's type, dtype or layout cannot be used."""

    argument: str

class PlanFullError(PagedError, RuntimeError):
    """A fixed capacity of a plan is used up."""

    what: str
    needed: int
    capacity: int

class StaleSlotError(PagedError, RuntimeError):
    """A slot was retired since the caller got it."""

    index: int
    expected: int
    found: int

class InvalidPlanError(PagedError, ValueError):
    """A plan or CSR description breaks an invariant."""

class CorruptionError(PagedError, RuntimeError):
    """Page accounting is broken: a double release, a retain of a free page, or a failed integrity check."""

class AllocationError(PagedError, RuntimeError):
    """The operating system refused the memory."""

    bytes: int

@final
class PagePool:
    """A fixed number of pages with lock-free acquire, retain and release; for any thread."""

    def __new__(cls, num_pages: int) -> Self:
        """Creates `num_pages` free pages, ids 0 to `num_pages - 1`.

        Raises:
            InvalidArgumentError: unless 1 <= num_pages < 2**31.
        """
    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
    @property
    def num_free(self) -> int:
        """Pages without a holder."""
    @property
    def num_used(self) -> int:
        """Pages with one holder or more."""
    def acquire(self, num_pages: int) -> list[int]:
        """Takes pages, each with one holder: the caller.

        Raises:
            OutOfPagesError: if fewer are free; none is taken then.
        """
    def retain(self, pages: _Indices) -> None:
        """Adds a holder to each page; a page named twice gets two.

        Raises:
            InvalidArgumentError: for an id outside the pool; no page is changed then.
            CorruptionError: for a free page; no page is changed then.
        """
    def release(self, pages: _Indices) -> None:
        """Drops a holder of each page; pages without holders become free.

        Raises:
            InvalidArgumentError: for an id outside the pool; no page is changed then.
            CorruptionError: for a double release; no page is changed then.
        """
    def refcount(self, page: int) -> int:
        """Number of holders; 0 for a free page."""
    def is_shared(self, page: int) -> bool:
        """True if the page has two holders or more and must be copied before it is written."""
    def check_integrity(self) -> None:
        """Checks free list against counts. Takes time in the pool's size; no other thread may use the pool meanwhile.

        Raises:
            CorruptionError: with the first violation.
        """

@final
class BlockBudget:
    """Byte and page accounting of one KV budget; lock-free, for any thread."""

    def __new__(cls, total_bytes: int, *, workspace_bytes: int, page_bytes: int) -> Self:
        """Takes the workspace out of the budget and divides the rest into pages.

        Args:
            total_bytes: the whole budget.
            workspace_bytes: what the kernels need beside the pages.
            page_bytes: bytes of one page over all layers, K and V.

        Raises:
            BudgetTooSmallError: without room for the workspace and one page; names the smallest usable budget.
            InvalidArgumentError: for a `page_bytes` of 0.
        """
    @property
    def num_pages(self) -> int:
        """Pages that the budget holds."""
    @property
    def num_reserved(self) -> int:
        """Pages promised to live reservations."""
    @property
    def num_available(self) -> int:
        """Pages not promised."""
    @property
    def total_bytes(self) -> int:
        """The whole budget."""
    @property
    def workspace_bytes(self) -> int:
        """Bytes set aside for the kernels."""
    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
    def reserve(self, num_pages: int) -> Reservation:
        """Promises pages until the reservation ends.

        Raises:
            BudgetExceededError: if fewer are available; nothing is reserved then.
        """

@final
class Reservation:
    """Pages reserved in a budget until `release`, the end of a `with` block, or garbage collection."""

    @property
    def num_pages(self) -> int:
        """Pages still reserved."""
    def release(self) -> None:
        """Gives the pages back. A second call does nothing."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...

@final
class Append:
    """What `PageTable.append` took from the pool."""

    @property
    def new_pages(self) -> list[int]:
        """Pages added at the tail, in order; the target of a copy is not among them."""
    @property
    def copies(self) -> list[tuple[int, int]]:
        """Pages to copy, (source, target), before the step writes any page."""

@final
class PageTable:
    """The pages of one sequence in one KV group. Holds a reference to each page and releases it when collected."""

    def __new__(cls, pool: PagePool, page_size: int, window: int | None = None) -> Self:
        """Creates an empty table.

        Args:
            pool: where pages come from.
            page_size: tokens per page.
            window: visible tokens, the newest included; None for all.

        Raises:
            InvalidArgumentError: for a page size or a window of 0.
        """
    @property
    def num_tokens(self) -> int:
        """Tokens appended since the start: the position of the next token."""
    @property
    def kv_len(self) -> int:
        """Visible tokens: `num_tokens`, or at most the window."""
    @property
    def num_pages(self) -> int:
        """Pages held."""
    @property
    def pages(self) -> list[int]:
        """Pages held, in order."""
    @property
    def head_page(self) -> int:
        """Pages given back at the head."""
    @property
    def num_held_tokens(self) -> int:
        """Tokens in the held pages, those out of view included: what a prefill chunk passes, with an offset of 0."""
    @property
    def first_page_offset(self) -> int:
        """Held tokens before the first visible one; less than `page_size` after `retire_head`."""
    @property
    def last_page_len(self) -> int:
        """Tokens in the last page: 1 to `page_size`, 0 for an empty table."""
    @property
    def page_size(self) -> int:
        """Tokens per page."""
    @property
    def window(self) -> int | None:
        """Visible tokens at most."""
    def pages_needed(self, num_tokens: int) -> int:
        """Fresh pages that `append(num_tokens)` would take, a copy-on-write target included. Changes nothing."""
    def append(self, num_tokens: int) -> Append:
        """Makes room for tokens after the last one. A shared partial last page is replaced by a fresh one to copy into.

        Raises:
            OutOfPagesError: the table is unchanged then.
            InvalidArgumentError: for more than 2**31 - 1 tokens in all.
        """
    @staticmethod
    def pages_needed_by(tables: Sequence[PageTable], num_tokens: int) -> int:
        """Fresh pages that `append(num_tokens)` to each of the tables, in turn, would take. Changes nothing.

        Less than each would take now if they share a last page: its last holder writes it in place.

        Args:
            tables: distinct tables of one pool.
            num_tokens: tokens that each of them gets.

        Raises:
            InvalidArgumentError: for tables of different pools, the same table twice, or more than 2**31 - 1 tokens.
        """
    def fork(self) -> PageTable:
        """Creates a second table on the same pages."""
    def adopt(self, pages: _Indices) -> None:
        """Starts an empty table without a window on full pages that somebody else holds too; each gets one more holder.

        Raises:
            InvalidArgumentError: for a table that is not empty or has a window, or a page outside the pool; nothing is
                changed then.
            CorruptionError: for a free page; nothing is changed then.
        """
    def retire_head(self) -> list[int]:
        """Gives back, and returns, the head pages that neither the last appended token nor a later one sees.

        Without a window it returns []. The call is safe before the last token's attention has run.
        """
    def release(self) -> None:
        """Releases every page and starts over as an empty table. A second call does nothing."""
    def check_integrity(self) -> None:
        """Checks the table against its pool.

        Raises:
            CorruptionError: if a page is free or the page count does not fit the tokens.
        """

@final
class Slot:
    """A row of a plan's table, given to one sequence from `admit` to `retire`. Hashable."""

    def __new__(cls, index: int, generation: int) -> Self: ...
    @property
    def index(self) -> int:
        """Row of the resident table."""
    @property
    def generation(self) -> int:
        """Changes with every `retire` of the row."""
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...
    def __lt__(self, value: object, /) -> bool: ...
    def __le__(self, value: object, /) -> bool: ...
    def __gt__(self, value: object, /) -> bool: ...
    def __ge__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Csr:
    """Compact CSR arrays of a batch in row order: read-only int32, copies.

    `lengths = (pages - 1) * page_size + last_page_len - first_page_offset`; 0 pages and length 0 go together.
    """

    @property
    def indptr(self) -> memoryview[int]:
        """[batch + 1]"""
    @property
    def indices(self) -> memoryview[int]:
        """[indptr[batch]] page ids, spare pages left out"""
    @property
    def last_page_len(self) -> memoryview[int]:
        """[batch]"""
    @property
    def first_page_offset(self) -> memoryview[int]:
        """[batch]"""
    @property
    def lengths(self) -> memoryview[int]:
        """[batch] tokens from the first page offset on"""
    @property
    def positions(self) -> memoryview[int]:
        """[batch] absolute position of the next token"""

@final
class StreamList:
    """The work list in the CUDA kernel's form, see `kernels/cuda/README.md`. A copy."""

    @property
    def items(self) -> memoryview[int]:
        """[num_items, 8] `kernels_cuda.ITEM_FIELDS`: slot, kv_begin, kv_end, flags (1 valid, 2 open end), out_row,
        split, num_splits, partial_row; unused items 0. Worker w runs items w, w + num_workers, ... up to an unused one
        """
    @property
    def num_workers(self) -> int:
        """Workers per KV head."""
    @property
    def num_partial_rows(self) -> int:
        """Workspace rows in use, below `2 * num_workers`; in a batch-invariant plan its `num_work_items` at most."""
    @property
    def num_steps(self) -> int:
        """Calls of `advance` for which the list stays balanced, or in a batch-invariant plan equal to a new one.

        2^64 - 1 stands for any number.
        """

@final
class DeviceMirror:
    """What has to be written to a device so that it has the plan's state without an upload.

    The device holds two int32 arrays, zero at first. `state` `[2, num_slots]`: tokens of each slot, counted from the
    start of its part of the table, then positions of its next token. `table` `[num_table_words]`: page ids
    `[num_slots, row_stride]`, from `row_slots_begin` on the slots of the batch rows, from `work_items_begin` on the
    work items `[num_items, 8]` in the form of `StreamList.items`. Addresses count the words of `state` first, then
    those of `table`.
    """

    def __new__(cls, plan: DecodePlan, num_workers: int) -> Self:
        """Mirrors `plan` for `num_workers` workers per KV head.

        Raises:
            InvalidArgumentError: The arrays would exceed 2^31 - 1 words.
        """
    def try_sync(self) -> bool:
        """`sync` for as many rows as last time, where nothing has happened since but one `advance` of the plan: no word
        has to be written then, and this counts as the step's call.

        Returns:
            False, and nothing changes, where `sync` is to be called.
        """
    def sync(self, num_rows: int) -> tuple[int, ...]:
        """Returns address, value, address, value, ...: the words that bring the device to the plan as it is now, less
        the one token per row that the device adds by itself afterwards. To be called once per step of the device.

        Args:
            num_rows: Rows of the batch on the device; those beyond the plan's are padding.

        Raises:
            InvalidArgumentError: Fewer rows than the plan has, or more than its slots; nothing changes then.
        """
    @property
    def num_lists(self) -> int:
        """Work lists made so far."""
    @property
    def num_workers(self) -> int: ...
    @property
    def max_partial_rows(self) -> int:
        """Workspace rows that a launch can need."""
    @property
    def num_slots(self) -> int:
        """Slots of the plan and the null slot."""
    @property
    def null_slot(self) -> int:
        """The slot of padding rows; never holds a token."""
    @property
    def row_stride(self) -> int: ...
    @property
    def row_slots_begin(self) -> int: ...
    @property
    def work_items_begin(self) -> int: ...
    @property
    def num_items(self) -> int: ...
    @property
    def num_state_words(self) -> int: ...
    @property
    def num_table_words(self) -> int: ...

@final
class DecodeRows:
    """The rows of a decode batch in every KV group: page tables and plans that grow by a token together.

    Rows come and go here, in each group by itself. Other edits are made on the plans. What a table says of itself
    counts every step at once; a table that is changed by another way, or whose last page gets another holder, is looked
    at anew in the next step.
    """

    def __new__(cls, plans: Sequence[DecodePlan], pools: Sequence[PagePool]) -> Self:
        """A batch without rows.

        Args:
            plans: the plan of every KV group, without rows.
            pools: where the tables of each group take their pages.

        Raises:
            InvalidArgumentError: for a plan that has rows or comes twice, or not one pool per plan.
        """
    def admit(self, group: int, table: PageTable) -> Slot:
        """Gives a table a row of its group's plan, behind the others; each held token is a token of the row.

        Raises:
            PlanFullError: without a free slot, or for more pages than a row holds.
            InvalidArgumentError: for a group that is not there, or a table that has a row already or is of another pool
                or page size.
            InvalidPlanError: the plan's rows were changed by another way.
        """
    def retire(self, group: int, slot: Slot) -> None:
        """Ends a row; those behind it move up. Its table stays as it is.

        Also after a step that was not brought to an end.

        Raises:
            StaleSlotError: the slot was retired since.
            InvalidPlanError: other rows of the plan came or went by another way.
        """
    def try_advance(self) -> bool:
        """Gives every row one token, in its table and its plan, if no table takes a page for it.

        Returns:
            False, and nothing is changed, where `advance` is to be called instead.

        Raises:
            InvalidPlanError: the plan's rows were changed by another way, or a row lacks a page that its table has;
                nothing is changed then.
        """
    def advance(self) -> list[tuple[int, int, Append]]:
        """Gives every row one token in its table, in all groups or in none.

        Returns:
            KV group, row and what its table took, ascending. If that is nothing, the plans are advanced too; else the
            caller tells the plans of these pages and advances all of them.

        Raises:
            OutOfPagesError: nothing is changed then, as with the other errors.
            InvalidArgumentError: for more than 2**31 - 1 tokens in a row.
            InvalidPlanError: as for `try_advance`.
            CorruptionError: pages of a table were released behind its back.
        """

@final
class PlanSnapshot:
    """A consistent copy of a plan's state."""

    @property
    def epoch(self) -> int:
        """Number of edits before the copy."""
    @property
    def slots(self) -> list[Slot]:
        """[batch] slots in row order"""
    @property
    def csr(self) -> Csr:
        """Page tables, lengths and positions."""
    @property
    def work_items(self) -> memoryview[int]:
        """[items in use, 5]"""
    @property
    def is_work_current(self) -> bool:
        """False if the rows have changed since the items were made."""

@final
class DecodePlan:
    """The plan of one KV group's decode batch: a row table and a balanced work list.

    One thread edits it. `epoch`, `num_rows`, `snapshot` and the array properties are for any thread and never wait.

    `length` counts the tokens in a row's pages from `first_page_offset` on; a window trims on top of it. `position` is
    the absolute position of the row's next token: after `advance`, the newest token sits at `position - 1`.
    """

    def __new__(
        cls,
        *,
        max_slots: int,
        max_pages_per_slot: int,
        num_pages: int,
        page_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        num_work_items: int | None = None,
        num_workers: int | None = None,
        waves: int | None = None,
        num_splits: int | None = None,
        batch_invariant: bool = False,
    ) -> Self:
        """Creates a plan without rows. Memory is committed as rows are used.

        Args:
            max_slots: rows at most.
            max_pages_per_slot: pages that a row can hold.
            num_pages: pages of the pool; every page id is below.
            page_size: tokens per page.
            num_qo_heads: query heads, a multiple of `num_kv_heads`.
            num_kv_heads: KV heads.
            head_dim: elements per head.
            window: visible tokens, the newest included; None for all.
            num_work_items: entries of the work list; None for as many as the other values can need.
            num_workers: (item, KV head) pairs that run at once; None for the threads of this machine.
            waves: pairs per worker to aim at; None for 4, which suits threads that take items from a queue. 1 suits a
                GPU grid.
            num_splits: items per row at most; None for no bound.
            batch_invariant: fixed chunks at absolute positions, so that a row's items do not depend on other rows.

        Raises:
            InvalidArgumentError: names the first value out of range.
        """
    @staticmethod
    def from_csr(
        indptr: _Indices,
        indices: _Indices,
        last_page_len: _Indices,
        first_page_offset: _Indices | None = None,
        *,
        num_pages: int,
        page_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        max_pages_per_slot: int | None = None,
        num_work_items: int | None = None,
        num_workers: int | None = None,
        waves: int | None = None,
        num_splits: int | None = None,
        batch_invariant: bool = False,
    ) -> DecodePlan:
        """Creates a plan from foreign arrays, which are checked and copied.

        Args:
            indptr: [batch + 1]
            indices: [indptr[batch] or more] page ids; the tail is not read.
            last_page_len: [batch]
            first_page_offset: [batch], zeros if None.
            max_pages_per_slot: pages that a row can grow to; None for about twice the longest row.

        Raises:
            InvalidPlanError: names the array, the row and the value.
            InvalidArgumentError: for another argument out of range, or an index that is not an int32.
            InvalidTypeError: for arrays of another dtype or more than one dimension.
        """
    def admit(
        self,
        pages: _Indices,
        num_tokens: int,
        first_page_offset: int | None = None,
        position: int | None = None,
    ) -> Slot:
        """Adds a row at the end of the batch.

        Args:
            pages: the sequence's pages; those after the last token are spare.
            num_tokens: tokens held in `pages` from `first_page_offset` on.
            first_page_offset: entries of the first page before the first token; None for 0.
            position: absolute position of the next token; None for `num_tokens`.

        Raises:
            PlanFullError: without a free slot, or for more than `max_pages_per_slot` pages.
            InvalidArgumentError: for a page outside the pool or numbers that do not fit each other.
        """
    def retire(self, slot: Slot) -> None:
        """Ends a row. The rows behind it move up by one.

        Raises:
            StaleSlotError: if the slot was retired before.
        """
    def append_page(self, slot: Slot, page: int) -> None:
        """Adds a page at the end of a row.

        Raises:
            StaleSlotError: if the slot was retired.
            PlanFullError: if the row holds `max_pages_per_slot` pages.
            InvalidArgumentError: for a page outside the pool.
        """
    def replace_page(self, slot: Slot, page_index: int, page: int) -> None:
        """Puts another page at a place of a row, after a copy-on-write; `page_index` counts from the first held page.

        Raises:
            StaleSlotError: if the slot was retired.
            InvalidArgumentError: for a page outside the pool or a place that the row does not have.
        """
    def retire_head_pages(self, slot: Slot, num_pages: int, first_page_offset: int | None = None) -> None:
        """Drops the first pages of a row. Its first token is then at `first_page_offset` (None for 0) of the next page.

        Raises:
            StaleSlotError: if the slot was retired.
            InvalidArgumentError: if the row would get tokens back, or lose tokens that its next token still sees.
        """
    def advance(self) -> None:
        """Adds one token to every row.

        Raises:
            InvalidPlanError: if a row has no page for its next token; no row is changed then.
        """
    def rows_needing_page(self) -> list[Slot]:
        """Rows whose next token starts a new page, in row order."""
    def row_of(self, slot: Slot) -> int:
        """Batch row of a slot. Rows are 0 to `num_rows - 1` in the order of admission.

        Raises:
            StaleSlotError: if the slot was retired.
        """
    def slot_of(self, row: int) -> Slot:
        """Slot of a batch row.

        Raises:
            InvalidArgumentError: if there is no such row.
        """
    def ensure_work_list(self) -> bool:
        """Divides the batch anew if rows came, went or outgrew the bound; True if it did. Kernels do it themselves."""
    def validate(self) -> None:
        """Checks every invariant. Takes time in pages and items.

        Raises:
            InvalidPlanError: with the first broken invariant.
        """
    def export_csr(self) -> Csr:
        """Copies the batch into compact arrays."""
    def stream_items(self, num_workers: int, num_items: int | None = None) -> StreamList:
        """Divides the batch as it is now among the workers of the CUDA kernel. Leaves the plan and `work_items` alone.

        The list covers every visible token once, whatever rows grow to, until a row comes, goes or loses head pages. It
        has the cuts of `kernels_cuda.balanced_work_list`, or the plan's fixed chunks if that is batch invariant.

        Args:
            num_workers: workers per KV head: `multiprocessors // num_kv_heads`, 1 or more.
            num_items: items of the list, padding included; None for enough for every batch of the plan.

        Raises:
            InvalidArgumentError: for a number out of range, or fewer items than this batch takes.
        """
    def snapshot(self) -> PlanSnapshot:
        """Copies a consistent state; for any thread, without delaying the writer."""
    def identity(self) -> tuple[int, tuple[Slot, ...]]:
        """The epoch and the slots in row order: equal only for the same state of the same plan. Hashable."""
    @property
    def epoch(self) -> int:
        """Number of edits so far."""
    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
    @property
    def row_start(self) -> memoryview[int]:
        """[max_slots] index of a row's first page in `page_ids`; resident"""
    @property
    def row_num_pages(self) -> memoryview[int]:
        """[max_slots] pages held; resident"""
    @property
    def page_ids(self) -> memoryview[int]:
        """[max_slots * stride] page ids; resident"""
    @property
    def lengths(self) -> memoryview[int]:
        """[max_slots] tokens from the first page offset on; resident"""
    @property
    def first_page_offsets(self) -> memoryview[int]:
        """[max_slots] entries of the first page before the first token; resident"""
    @property
    def positions(self) -> memoryview[int]:
        """[max_slots] absolute position of the next token; resident"""
    @property
    def row_slots(self) -> memoryview[int]:
        """[max_slots], `num_rows` in use: slot index of a batch row; resident"""
    @property
    def work_items(self) -> memoryview[int]:
        """[num_work_items, 5] slot, kv_begin, kv_end, out_row, flags (1 valid, 2 split), unused items 0; resident"""
    @property
    def merge_rows(self) -> memoryview[int]:
        """[max_slots, 3] batch row, first partial row, number of partial rows; resident"""
    @property
    def max_slots(self) -> int:
        """Rows at most."""
    @property
    def max_pages_per_slot(self) -> int:
        """Pages that a row can hold."""
    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
    @property
    def page_size(self) -> int:
        """Tokens per page."""
    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
    @property
    def head_dim(self) -> int:
        """Elements per head."""
    @property
    def window(self) -> int | None:
        """Visible tokens at most."""
    @property
    def num_work_items(self) -> int:
        """Entries of the work list, and partial rows at most."""
    @property
    def num_splits(self) -> int | None:
        """Items per row at most."""
    @property
    def batch_invariant(self) -> bool:
        """True if chunks are fixed."""

def bench_plan(batch: int, context: int, page_size: int, *, repeats: int | None = None) -> dict[str, float]:
    """Times plan updates of `batch` rows of `context` tokens: medians in nanoseconds, without interpreter time.

    Returns:
        `advance_ns`: a step without page crossing. `crossing_one_ns`, `crossing_all_ns`: a step in which one row, or
        every row, gets a page. `rebuild_ns`: the same state built from CSR arrays.
    """

def cpu_paged_decode(
    plan: DecodePlan,
    q: _Array,
    out: _Array,
    k_pages: _Array,
    v_pages: _Array,
    *,
    lse: _Array | None = None,
    k_new: _Array | None = None,
    v_new: _Array | None = None,
    layout: str,
    sm_scale: float,
    logits_soft_cap: float | None = None,
    sinks: _Array | None = None,
    window: int | None = None,
) -> None:
    """Runs one decode step of the plan's rows in one call: `out = softmax(sm_scale * q K^T) V` over each row's tokens.

    The softmax and the partial results of split rows are float32. The same call gives the same bits every time. A row
    without tokens gives 0 and an LSE of -inf, or the sink's. Bytes that belong to no visible token do not matter.

    Args:
        plan: The batch; its work list is brought up to date first.
        q: `[num_rows, num_qo_heads, head_dim]`, 1 to 16 query heads per KV head, head_dim a multiple of 16 up to 512.
        out: Shape and dtype of `q`; written.
        k_pages: NHD `[num_pages, page_size, num_kv_heads, head_dim]` or HND `[num_pages, num_kv_heads, page_size,
            head_dim]`.
        v_pages: Shape and dtype of `k_pages`.
        lse: float32 `[num_rows, num_qo_heads]`; gets the base-2 log-sum-exp of the scaled logits, the sink included.
        k_new: `[num_rows, num_kv_heads, head_dim]`; written to each row's last token first. With `v_new` or not at all.
        v_new: As `k_new`.
        layout: Order of the dimensions of the pools.
        sm_scale: Factor of the logits.
        logits_soft_cap: `cap * tanh(logit / cap)`; 0 or None is off.
        sinks: `[num_qo_heads]` logits that take part in the softmax without a value.
        window: Visible tokens, the newest included; on top of the plan's own window.

    Raises:
        InvalidArgumentError, InvalidTypeError: Names the argument; nothing was written.
    """

def cpu_paged_prefill(
    q: _Array,
    out: _Array,
    k_pages: _Array,
    v_pages: _Array,
    *,
    page_ids: _Indices | _Array,
    first_page_offset: int,
    num_tokens: int,
    layout: str,
    sm_scale: float,
    logits_soft_cap: float | None = None,
    sinks: _Array | None = None,
    window: int | None = None,
    lse: _Array | None = None,
    k_new: _Array | None = None,
    v_new: _Array | None = None,
) -> None:
    """Runs causal attention of the last tokens of one sequence over its pages; each sees the tokens up to itself.

    Args:
        q: `[num_queries, num_qo_heads, head_dim]`: the last `num_queries` of the `num_tokens` tokens.
        page_ids: Pages of the sequence in token order; more than needed may be given.
        first_page_offset: Entry of the first page that holds the first token.
        num_tokens: Tokens held, the queries' own included.
        lse: float32 `[num_queries, num_qo_heads]`.
        k_new: `[num_queries, num_kv_heads, head_dim]`; written to the queries' own tokens first, with `v_new`.

    The other arguments, the result and the errors are those of `cpu_paged_decode`.
    """

def cpu_write_pages(
    k_new: _Array,
    v_new: _Array,
    k_pages: _Array,
    v_pages: _Array,
    *,
    page_ids: _Indices | _Array,
    first_page_offset: int,
    num_tokens: int,
    layout: str,
) -> None:
    """Writes `k_new` and `v_new`, `[n, num_kv_heads, head_dim]`, to the last `n` of a sequence's tokens."""

def cpu_write_decode(
    plan: DecodePlan, k_new: _Array, v_new: _Array, k_pages: _Array, v_pages: _Array, *, layout: str
) -> None:
    """Writes `k_new` and `v_new`, `[num_rows, num_kv_heads, head_dim]`, to the last token of every row of the plan."""

def cpu_copy_page(pages: _Array, src: int, dst: int) -> None:
    """Copies page `src` of a pool, four dimensions in either layout, to page `dst`."""

def cpu_memory_roof(num_bytes: int, repeats: int) -> float:
    """Returns the best rate, in GB/s (10^9 bytes), of `repeats` plain reads of `num_bytes` bytes by all threads."""

def cpu_read_seconds(memory: _Buffer) -> float:
    """Returns the seconds of one plain read of a contiguous buffer of bytes (format `B`) by all threads.

    Raises:
        InvalidArgumentError: `memory` is no such buffer, or empty.
    """

def simd_level() -> str:
    """Returns the instruction set of the CPU kernels: `portable`, `avx2`, `avx512` or `neon`."""

def num_threads() -> int:
    """Returns the number of threads that the CPU kernels run on."""

def install_blas(path: str) -> str:
    """Loads `scipy-openblas32`'s library and makes this module's `cblas_sgemm`, `_dgemm` and `_cgemm` forward to it.

    Nobody sees those names before the module is promoted to the global scope; `mlxcel_paged.blas.prepare` does both.
    Returns OpenBLAS's description of itself.

    Raises:
        InvalidArgumentError: The library cannot be loaded or lacks a function; nothing has changed.
    """

def bench_projection(num_rows: int, num_columns: int, depth: int, num_rounds: int) -> tuple[float, float]:
    """Times the f32 product of `[num_rows, depth]` with the transpose of `[num_columns, depth]`, both ways in turns.

    Weights rotate through 256 MiB, so that they come from memory. The BLAS uses threads of its own here, one per core.

    Returns:
        Median microseconds of our projection of a few rows, and of the installed BLAS.

    Raises:
        InvalidArgumentError: A size is 0, `num_rows` is above 16, or no BLAS is installed.
    """

def blas_num_calls() -> int:
    """Returns the number of calls to this module's `cblas_` functions so far."""

def global_blas_path() -> str | None:
    """Returns the file of the library that `cblas_sgemm` means in the process's global scope; None if there is none."""
