"""What a device offers to move tokens between dense arrays and pages, in place."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx


class PageKernels(Protocol):
    """Launches on one layer's pools, whose views are `KVPools.view_k` and `view_v`.

    Launches are lazy. A writer returns an order token, int32 `[1]` holding 0: evaluating it runs the write, and whoever
    reads the pool in the same evaluation must take it as an input. Evaluations on a stream follow one another.
    """

    def write(self, k_view: mx.array, v_view: mx.array, k_new: mx.array, v_new: mx.array, places: mx.array) -> mx.array:
        """Writes tokens to their pages and returns the order token.

        Args:
            k_new, v_new: `[num_tokens, num_kv_heads, head_dim]`.
            places: `[num_tokens]` int32, page id * page_size + token in the page; a negative one is not written.
        """

    def copy(self, k_view: mx.array, v_view: mx.array, src: int, dst: int) -> mx.array:
        """Copies page `src` onto page `dst` and returns the order token."""

    def gather(
        self,
        k_view: mx.array,
        v_view: mx.array,
        k_new: mx.array,
        v_new: mx.array,
        page_ids: mx.array,
        *,
        first_token: int,
        num_prefix: int,
    ) -> tuple[mx.array, mx.array]:
        """Returns dense keys and values `[1, num_kv_heads, num_prefix + num_new, head_dim]` of one sequence.

        Args:
            k_new, v_new: `[num_new, num_kv_heads, head_dim]`, what follows the prefix.
            page_ids: int32, the sequence's pages.
            first_token: Where the prefix begins among the tokens of `page_ids`.
            num_prefix: Tokens of the prefix; at least 1.
        """
