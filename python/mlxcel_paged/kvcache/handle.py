"""What a paged cache returns in place of keys and values.

mlx-lm's models pass the result of `update_and_fetch` to `scaled_dot_product_attention`, nothing else. The pair carries
the new keys and values to the replaced attention function; a model that looks inside it cannot be paged and fails here,
loudly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import mlx.core as mx

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.rotation import Rotation, RotationError, Unrotated

if TYPE_CHECKING:
    from mlxcel_paged.kvcache.step import Step


class HandleAccessError(UnsupportedModelError, AttributeError):
    """The model uses keys or values outside attention."""

    slug = "handle_access"


class KeyHandle:
    """The keys of one layer in one forward pass; also holds what the attention launch needs.

    Attributes:
        layer: Index of the layer's cache.
        step: The forward pass.
        k_new, v_new: `[batch, num_kv_heads, num_tokens, head_dim]`, this pass's keys and values.
        rotation: RoPE that the launch is to apply to `k_new` and to its queries; None if they come as they should be.
        values: The handle that stands for the values.
        is_written: The new tokens are in their pages; a second launch on this handle (layers that share KV) only reads.
        order_token: What the in-place write returned that readers in this pass must come after; None without one.
    """

    __slots__ = ("is_written", "k_new", "layer", "order_token", "rotation", "step", "v_new", "values")

    def __init__(self, layer: int, step: Step, k_new: mx.array | Unrotated, v_new: mx.array) -> None:
        self.layer = layer
        self.step = step
        self.rotation: Rotation | None = None
        if isinstance(k_new, Unrotated):
            self.rotation = k_new.rotation
            k_new = k_new.x
        self.k_new = k_new
        self.v_new = v_new
        self.values = ValueHandle()
        self.is_written = False
        self.order_token: mx.array | None = None

    def plain_queries(self, queries: mx.array | Unrotated) -> mx.array:
        """Returns queries that are as far from RoPE as `k_new` is.

        Raises:
            RotationError: RoPE was put off for one of them alone, or not the same one for both.
        """
        rotation = None
        if isinstance(queries, Unrotated):
            rotation = queries.rotation
            queries = queries.x
        if rotation is not self.rotation:
            raise RotationError(
                f"layer {self.layer} attends with queries and keys that await different rotations"
                " (hint: MLXCEL_PAGED_STEP_FUSION=0)"
            )
        return queries

    def __getattr__(self, name: str) -> NoReturn:
        raise _access_error("keys", name)


class ValueHandle:
    """The values of one layer in one forward pass. Knows nothing; its identity is checked at the launch."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise _access_error("values", name)


def _access_error(which: str, name: str) -> HandleAccessError:
    return HandleAccessError(
        f"the model reads `{which}.{name}` between its cache and its attention, so its KV cache cannot be paged"
        " (hint: --decode-storage dense)"
    )
