"""The products of `bench_products_cuda.py`: their shapes, and chains of them for every arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 64
BITS = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """Matrices that see the same rows.

    Attributes:
        bridge: Cell whose product makes an input out of the output, where that is too short.
    """

    features: tuple[int, ...]
    num_inner: int
    bridge: str = ""

    @property
    def text(self) -> str:
        return f"{' + '.join(map(str, self.features))} x {self.num_inner}"

    def num_bytes(self, storage: str) -> int:
        """Bytes of the weights."""
        count = sum(self.features) * self.num_inner
        return count * 2 if storage == "f16" else count * BITS // 8 + count // GROUP_SIZE * 4


CELLS = {
    "qkv": Cell((4096, 1024, 1024), 4096),
    "o": Cell((4096,), 4096),
    "gate_up": Cell((14336, 14336), 4096),
    "up": Cell((14336,), 4096),
    "down": Cell((4096,), 14336, "up"),
    "lm_head": Cell((128256,), 4096),
}
HOST_CELLS = ("qkv", "o")
_LENGTH = 48
_MAX_CHAIN_BYTES = 8 << 30


def arms_of(cell: Cell) -> tuple[str, ...]:
    """Arms that make a difference for the cell."""
    return ("mlx", "single", "siblings") if len(cell.features) > 1 else ("mlx", "single")


class Case:
    """A cell's weights, several times, and chains of products with them.

    Args:
        storage: `f16` or `4-bit`.
        copies: How often the weights are there; a chain takes them in turn.
    """

    def __init__(self, cell: Cell, storage: str, copies: int) -> None:
        self.cell = cell
        self.storage = storage
        self.tolerance = 1e-2  # of MLX, which sums 4 bits less exactly than ours
        self.length = max(copies, min(_LENGTH, _MAX_CHAIN_BYTES // cell.num_bytes(storage)))
        self._copies = [self._weights(cell) for _ in range(copies)]
        self._bridges = [self._weights(CELLS[cell.bridge]) for _ in range(copies)] if cell.bridge else []

    def chain(self, arm: str, num_rows: int) -> list[Any]:
        """Arrays that need `length` products of the cell, one after the other; not evaluated."""
        import mlx.core as mx

        product = self._product(arm)
        cell = self.cell
        x = mx.ones((num_rows, 1, cell.num_inner), mx.float16)
        outputs = []
        for index in range(self.length):
            first, *others = product(x, self._copies[index % len(self._copies)])
            outputs += others
            if self._bridges:
                first = product(first.reshape(num_rows, 1, -1), self._bridges[index % len(self._bridges)])[0]
            # Whole rows of the output, one behind the other: no launch is needed to make rows of the input of them.
            x = first.reshape(-1)[: num_rows * cell.num_inner].reshape(num_rows, 1, cell.num_inner)
        return [x, *outputs]

    def error(self, arm: str, num_rows: int) -> float:
        """Largest difference from products in float32, of the largest value."""
        import mlx.core as mx

        x = mx.random.normal((num_rows, 1, self.cell.num_inner)).astype(mx.float16)
        errors = []
        for found, weight in zip(self._product(arm)(x, self._copies[0]), self._copies[0], strict=True):
            wanted = x.reshape(num_rows, -1).astype(mx.float32) @ self._exact(weight).T
            difference = mx.abs(found.reshape(wanted.shape).astype(mx.float32) - wanted).max()
            errors.append(float(difference / mx.abs(wanted).max()))
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def _exact(self, weight: Any) -> Any:
        import mlx.core as mx

        if self.storage == "f16":
            return weight.astype(mx.float32)
        shifts = mx.arange(0, 32, BITS, dtype=mx.uint32)
        values = mx.bitwise_and(mx.right_shift(weight.words[..., None], shifts), 2**BITS - 1).astype(mx.float32)
        values = values.reshape(*weight.scales.shape, GROUP_SIZE)
        exact = values * weight.scales[..., None].astype(mx.float32) + weight.offsets[..., None].astype(mx.float32)
        return exact.reshape(weight.scales.shape[0], -1)

    def _weights(self, cell: Cell) -> list[Any]:
        import mlx.core as mx

        from mlxcel_paged.models.affine_kernel import AffineWeight

        weights: list[Any] = []
        for count in cell.features:
            # Values keep their size along the chain.
            if self.storage == "f16":
                dense = mx.random.normal((count, cell.num_inner), mx.float16, scale=cell.num_inner**-0.5)
                mx.eval(dense)
                weights.append(dense)
            else:
                # Halves of words: random numbers have 24 bits.
                words = mx.random.randint(0, 2**16, (count, cell.num_inner * BITS // 16), mx.uint16).view(mx.uint32)
                spread = mx.random.uniform(0.1, 0.3, (count, cell.num_inner // GROUP_SIZE))
                scales = (spread * cell.num_inner**-0.5).astype(mx.float16)
                offsets = (-7.5 * scales).astype(mx.float16)
                mx.eval(words, scales, offsets)
                weights.append(AffineWeight(words, scales, offsets))
        return weights

    def _product(self, arm: str) -> Callable[[Any, Sequence[Any]], list[Any]]:
        import mlx.core as mx

        from mlxcel_paged.models.affine_kernel import affine_format, affine_products
        from mlxcel_paged.models.dense_kernel import dense_products

        form = affine_format(BITS, GROUP_SIZE, mx.float16)

        def mlx_quantized(x: Any, weights: Sequence[Any]) -> list[Any]:
            rows = x.reshape(1, -1, x.shape[-1])
            options = {"transpose": True, "group_size": GROUP_SIZE, "bits": BITS}
            return [mx.quantized_matmul(rows, w.words, w.scales, w.offsets, **options) for w in weights]

        if self.storage == "f16":
            return {
                "mlx": lambda x, weights: [x @ weight.T for weight in weights],
                "single": lambda x, weights: [dense_products(x, [weight])[0] for weight in weights],
                "siblings": lambda x, weights: dense_products(x, weights, [None] * len(weights)),
            }[arm]
        return {
            "mlx": mlx_quantized,
            "single": lambda x, weights: [affine_products(x, [weight], form)[0] for weight in weights],
            "siblings": lambda x, weights: affine_products(x, weights, form),
        }[arm]
