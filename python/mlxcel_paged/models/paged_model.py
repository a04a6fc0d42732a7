"""A model whose KV lives in pages: what the engine's runner calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from mlxcel_paged import _core, env
from mlxcel_paged.attention.buckets import bucket_rows
from mlxcel_paged.attention.cuda.decode import CudaDecode
from mlxcel_paged.attention.cuda.library import CudaKernels, cuda_kernels
from mlxcel_paged.attention.decode_step import DecodeStep
from mlxcel_paged.attention.dispatch import Arm, shape_path
from mlxcel_paged.attention.outcomes import Outcomes
from mlxcel_paged.attention.prefill_step import prefill_step
from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache
from mlxcel_paged.kvcache.layout import KVGroup, KVLayout
from mlxcel_paged.kvcache.pools import KVPools
from mlxcel_paged.models import hook
from mlxcel_paged.models.deferred_rope import defer_rope
from mlxcel_paged.models.kv_groups import kv_layout
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.streamed_products import stream_products


class PagedModel:
    """Prefill and batched decode of one model over paged KV.

    The scheduler owns page tables and slots; this class owns the KV memory and the plans that the scheduler edits.

    Args:
        loaded: The model.
        num_pages: Pages of every group, or one count for all.
        page_size: Tokens in a page.
        max_slots: Sequences that decode together at most.
        max_context: Tokens of one sequence at most.
        arm: `fused` or `gather` pins the path; `auto` follows the policy.
        layout: The model's KV groups, if already known.
        kernels: The kernels of an NVIDIA GPU; those of this machine if not given.

    Attributes:
        layout: KV groups.
        pools: The pages' memory.
        page_pools: Page ids of every group.
        plans: The decode plan of every group.
        outcomes: What every attention launch did.

    Raises:
        UnsupportedModelError: Some layer cannot be paged.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int | Sequence[int],
        page_size: int,
        max_slots: int,
        max_context: int,
        arm: Arm = "auto",
        layout: KVLayout | None = None,
        kernels: CudaKernels | None = None,
    ) -> None:
        self.layout = layout or kv_layout(loaded.model)
        hook.install()
        counts = [num_pages] * len(self.layout.groups) if isinstance(num_pages, int) else list(num_pages)
        if len(counts) != len(self.layout.groups):
            raise ValueError(f"num_pages has {len(counts)} entries for {len(self.layout.groups)} KV groups")
        self.page_size = page_size
        self.max_context = max_context
        self._chosen_rows: int | None = None  # of the step whose paths `launch_rows` has chosen
        on_cpu = loaded.device == "cpu"
        kernels = None if on_cpu else kernels or cuda_kernels()
        if kernels is not None and env.step_fusion():
            stream_products(loaded.model, self.layout.dtype, self.layout.num_layers)
        page_kernels = None if kernels is None else kernels.pages()
        self.pools = KVPools(self.layout, counts, page_size, on_cpu=on_cpu, page_kernels=page_kernels)
        self.page_pools = [_core.PagePool(count) for count in counts]
        self.plans = [
            new_decode_plan(
                group,
                num_pages=count,
                page_size=page_size,
                max_slots=max_slots,
                max_context=max_context,
                on_cpu=on_cpu,
            )
            for group, count in zip(self.layout.groups, counts, strict=True)
        ]
        self.outcomes = Outcomes()
        self._model = loaded.model
        self._max_slots = max_slots
        cuda = None
        ropes: list[set[RopeShape]] = [set() for _ in self.layout.groups]
        if kernels is not None and arm != "gather":
            served = [self._is_fused_on_cuda(group) for group in self.layout.groups]
            if all(served) and env.step_fusion():
                ropes = defer_rope(loaded.model, self.layout)
            cuda = [
                self._cuda_decode(group, kernels, shapes) if is_served else None
                for group, is_served, shapes in zip(self.layout.groups, served, ropes, strict=True)
            ]
        self._decode_step = DecodeStep(self.pools, self.plans, self.outcomes, arm, cuda, defers_rope=any(ropes))
        self._prefill_step = prefill_step(self.pools, self.outcomes, arm)
        layers = range(self.layout.num_layers)
        self._decode_caches = [PagedLayerCache(layer, self._decode_step) for layer in layers]
        self._prefill_caches = [PagedLayerCache(layer, self._prefill_step) for layer in layers]

    def prefill(self, tokens: Sequence[int], tables: Sequence[_core.PageTable], start: int) -> None:
        """Computes the KV of a chunk of one prompt. No logits: the prompt's last token is its first decode row.

        Args:
            tokens: The chunk's token ids.
            tables: The sequence's page tables, one per group, to which the chunk's tokens are already appended.
            start: Absolute position of the first token.
        """
        self._prefill_step.begin(tables, start)
        self._model(mx.array(list(tokens), mx.int32)[None], cache=self._prefill_caches)
        self._prefill_step.finish()

    def launch_rows(self, num_rows: int) -> int:
        """Rows that a decode step of `num_rows` sequences should have: more where padding keeps launches alike.

        Chooses the paths of the step; the next `decode` keeps to them if it has as many rows.
        """
        self._chosen_rows = num_rows
        if self._decode_step.choose_paths():
            self._chosen_rows = bucket_rows(num_rows, self._max_slots)
        return self._chosen_rows

    def decode(self, tokens: mx.array | Sequence[int]) -> mx.array:
        """Runs one decode step and returns the logits, `[rows, vocab]` float32.

        Args:
            tokens: The newest token of every row, in the plans' row order; the plans already count them. Up to
                `launch_rows` of them, the last ones padding.
        """
        inputs = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)
        if inputs.ndim != 1:
            raise ValueError(f"tokens must be one per row of the plan: got shape {inputs.shape}")
        if inputs.shape[0] != self._chosen_rows:
            self._decode_step.choose_paths()
        self._chosen_rows = None
        try:
            self._decode_step.begin(inputs)
            logits: mx.array = self._model(inputs[:, None], cache=self._decode_caches)
        except BaseException:
            self._decode_step.drop()
            raise
        finally:
            self._decode_step.end()
        return logits[:, -1].astype(mx.float32)

    def drop_pass(self) -> None:
        """Gives up what a failed step left unevaluated, which later ones would run, and waits for what is under way."""
        self._decode_step.drop()

    def _is_fused_on_cuda(self, group: KVGroup) -> bool:
        return shape_path(
            backend="cuda",
            dtype=self.pools.dtype,
            num_qo_heads=group.num_qo_heads,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            page_size=self.page_size,
        ).is_fused

    def _cuda_decode(self, group: KVGroup, kernels: CudaKernels, ropes: set[RopeShape]) -> CudaDecode:
        return CudaDecode(self.plans[group.index], group, self.page_size, self.pools.dtype, kernels, ropes)

    def copy_pages(self, group: int, copies: Iterable[tuple[int, int]]) -> None:
        """Copies pages `(src, dst)` of `group`, in order (copy-on-write)."""
        for src, dst in copies:
            self.pools.copy_page(group, src, dst)


def new_decode_plan(
    group: KVGroup, *, num_pages: int, page_size: int, max_slots: int, max_context: int, on_cpu: bool
) -> _core.DecodePlan:
    """Makes the plan of one KV group. Its number of work items bounds the workspace of a decode launch.

    On the CPU rows are cut at fixed chunks as long as projections are batch-invariant too (`MAX_PROJECTION_ROWS` in the
    core): a decode step then gives a sequence the same bits alone and in a batch, at no cost. On a GPU a row's part of
    the table does not depend on `num_pages`: it is a constant of kernels that are compiled at start.
    """
    max_pages = -(-max_context // page_size) + 1
    return _core.DecodePlan(
        max_slots=max_slots,
        max_pages_per_slot=min(num_pages, max_pages) if on_cpu else max_pages,
        num_pages=num_pages,
        page_size=page_size,
        num_qo_heads=group.num_qo_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        window=group.window,
        batch_invariant=on_cpu and max_slots <= _core.MAX_PROJECTION_ROWS,
    )
