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
Product = Callable[[Any], list[Any]]
"""Returns the products of rows with the matrices of a cell."""

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

    def prepared(self, arm: str, num_rows: int) -> Callable[[], list[Any]]:
        """Returns what builds a chain of `length` products of the cell: arrays that need it, not evaluated."""
        import mlx.core as mx

        cell = self.cell
        products = [self._product(arm, weights) for weights in self._copies]
        bridges = [self._product(arm, weights) for weights in self._bridges]
        ones = mx.ones((num_rows, 1, cell.num_inner), mx.float16)
        mx.eval(ones)

        def build() -> list[Any]:
            x, outputs = ones, []
            for index in range(self.length):
                first, *others = products[index % len(products)](x)
                outputs += others
                if bridges:
                    (first,) = bridges[index % len(bridges)](first.reshape(num_rows, 1, -1))
                # Whole rows of the output, one behind the other: no launch is needed to make an input of them.
                x = first.reshape(-1)[: num_rows * cell.num_inner].reshape(num_rows, 1, cell.num_inner)
            return [x, *outputs]

        return build

    def error(self, arm: str, num_rows: int) -> float:
        """Largest difference from products in float32, of the largest value."""
        import mlx.core as mx

        x = mx.random.normal((num_rows, 1, self.cell.num_inner)).astype(mx.float16)
        errors = []
        for found, weight in zip(self._product(arm, self._copies[0])(x), self._copies[0], strict=True):
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

    def _product(self, arm: str, weights: Sequence[Any]) -> Product:
        """The arm's product with some weights. Launches are prepared, as layers have them."""
        if arm == "mlx":
            return self._own(weights)
        parts = [weights] if arm == "siblings" else [[weight] for weight in weights]
        launches = [self._launch(part) for part in parts]
        return lambda x: [output for launch in launches for output in launch(x, x.shape[0])]

    def _launch(self, weights: Sequence[Any]) -> Any:
        import mlx.core as mx

        from mlxcel_paged.models.affine_kernel import affine_format, affine_launch
        from mlxcel_paged.models.dense_kernel import dense_launch

        if self.storage == "f16":
            return dense_launch(weights, [None] * len(weights))
        return affine_launch(weights, affine_format(BITS, GROUP_SIZE, mx.float16))

    def _own(self, weights: Sequence[Any]) -> Product:
        import mlx.core as mx

        if self.storage == "f16":
            return lambda x: [x @ weight.T for weight in weights]
        options = {"transpose": True, "group_size": GROUP_SIZE, "bits": BITS}

        def quantized(x: Any) -> list[Any]:
            rows = x.reshape(1, -1, x.shape[-1])
            return [mx.quantized_matmul(rows, w.words, w.scales, w.offsets, **options) for w in weights]

        return quantized
