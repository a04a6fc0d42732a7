"""The KV pages of one model: one K and one V array per layer, allocated once, never rebound."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.kvcache.layout import KVLayout
from mlxcel_paged.kvcache.page_kernels import PageKernels
from mlxcel_paged.kvcache.pool_memory import prepare_zeroed

LAYOUT = "HND"


class KVPools:
    """Owns every page of a model.

    A layer's pool is `[num_pages, num_kv_heads, page_size, head_dim]` (HND: a head's tokens are contiguous in a page).
    Kernels write in place; MLX must never see a functional update of a pool while a kernel reads it, or it copies the
    whole.

    Args:
        layout: The model's KV groups.
        num_pages: Pages of every group, in order.
        page_size: Tokens in a page.
        on_cpu: The pools are written through pointers by CPU kernels; else by MLX.
        page_kernels: What writes the pools in place where they are not on the CPU; None: MLX updates them.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: Sequence[int],
        page_size: int,
        *,
        on_cpu: bool,
        page_kernels: PageKernels | None = None,
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.num_pages = tuple(num_pages)
        self.dtype = layout.dtype
        self.on_cpu = on_cpu
        self.page_kernels = page_kernels
        self._k = [self._allocate(layer) for layer in range(layout.num_layers)]
        self._v = [self._allocate(layer) for layer in range(layout.num_layers)]
        self._k_views = [] if page_kernels is None else [pool[:1] for pool in self._k]
        self._v_views = [] if page_kernels is None else [pool[:1] for pool in self._v]
        mx.eval(self._k_views, self._v_views)

    def k(self, layer: int) -> mx.array:
        """The layer's keys, `[num_pages, num_kv_heads, page_size, head_dim]`."""
        return self._k[layer]

    def v(self, layer: int) -> mx.array:
        """The layer's values, shaped as the keys."""
        return self._v[layer]

    def view_k(self, layer: int) -> mx.array:
        """The first page of the layer's keys, which stands for the pool in launches of page kernels.

        The pointer is the same, but MLX counts whole inputs against the size of its graphs and would end one each time.
        """
        return self._k_views[layer]

    def view_v(self, layer: int) -> mx.array:
        """The same of the layer's values."""
        return self._v_views[layer]

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of `group` over all its layers, keys and values."""
        return self.layout.groups[group].page_bytes(self.page_size, self.dtype.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, touched or not."""
        return sum(
            self.page_bytes(group.index) * pages
            for group, pages in zip(self.layout.groups, self.num_pages, strict=True)
        )

    def evaluate(self) -> None:
        """Runs pending MLX updates. In-place writers leave none."""
        if not self.on_cpu and self.page_kernels is None:
            mx.eval(self._k, self._v)

    def copy_page(self, group: int, src: int, dst: int) -> None:
        """Copies page `src` onto page `dst` in every layer of `group` (copy-on-write).

        Page kernels are sent off at once, so that later copies, and the next pass, follow in the stream's order.

        Raises:
            ValueError: A page is not in the pool.
        """
        num_pages = self.num_pages[group]
        if not (0 <= src < num_pages and 0 <= dst < num_pages):
            raise ValueError(f"src and dst must be pages of {num_pages}: {src} and {dst}")
        layers = self.layout.groups[group].layer_ids
        if self.page_kernels is not None:
            copy = self.page_kernels.copy
            mx.async_eval([copy(self.view_k(layer), self.view_v(layer), src, dst) for layer in layers])  # type: ignore[no-untyped-call]
            return
        for layer in layers:
            for pool in (self._k[layer], self._v[layer]):
                if self.on_cpu:
                    _core.cpu_copy_page(pool, src, dst)
                else:
                    pool[dst] = pool[src]

    def _allocate(self, layer: int) -> mx.array:
        group = self.layout.groups[self.layout.group_of_layer[layer]]
        pool = mx.zeros(
            (self.num_pages[group.index], group.num_kv_heads, self.page_size, group.head_dim),
            self.dtype,
        )
        mx.eval(pool)
        if self.on_cpu:
            prepare_zeroed(pool)
        return pool
