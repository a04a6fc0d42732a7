"""RoPE that a decode launch is to apply: how it turns, what it is handed over in, and in which pass it may be put off.

Nothing is marked on arrays or models. A rotation that is put off is an object of its own in the array's place, which
only attention understands: a model that does anything else with it fails instead of computing with unrotated values.
"""

from __future__ import annotations

import threading
from typing import NoReturn

import mlx.core as mx
import numpy as np

from mlxcel_paged.errors import UnsupportedModelError


class RotationError(UnsupportedModelError, AttributeError):
    """The model does something between RoPE and attention that no trace of it has shown."""

    slug = "rotation"


class Rotation:
    """One configuration of `mx.fast.rope`. Equal only to itself: who makes them makes one of each.

    Args:
        dims: Leading dims that are turned.
        traditional: Pairs are neighbours, not half of `dims` apart.
        base: Base of the frequencies; None with `freqs`.
        scale: Factor on positions.
        freqs: `[dims / 2]` float32, wavelengths over 2 pi.
    """

    __slots__ = ("base", "dims", "freqs", "scale", "traditional")

    def __init__(
        self, *, dims: int, traditional: bool, base: float | None, scale: float, freqs: mx.array | None
    ) -> None:
        self.dims = dims
        self.traditional = traditional
        self.base = base
        self.scale = scale
        self.freqs = freqs

    @property
    def key(self) -> tuple[int, bool, float | None, float, bytes]:
        """Equal for configurations that turn alike. Evaluates the frequencies."""
        freqs = b"" if self.freqs is None else np.array(self.freqs).tobytes()
        return self.dims, self.traditional, self.base, self.scale, freqs

    def table(self, positions: mx.array, units: mx.array) -> mx.array:
        """Returns `[rows, 1, 1, dims]` float32: cosine and sine of the first pair's angle, of the second's, and so on.

        They are MLX's own bits: its kernel turns the unit vector of every pair.

        Args:
            positions: `[rows]` int32.
            units: `unit_pairs(rows, dims)`.
        """
        return mx.fast.rope(
            units,
            self.dims,
            traditional=True,
            base=self.base,
            scale=self.scale,
            offset=positions,
            freqs=self.freqs,
        )


def unit_pairs(num_rows: int, dims: int) -> mx.array:
    """`[num_rows, 1, 1, dims]` float32, every pair of neighbours (1, 0)."""
    return mx.tile(mx.array([1.0, 0.0]), (num_rows, 1, 1, dims // 2))


class Unrotated:
    """Queries or keys `x`, `[rows, heads, 1, head_dim]`, to which `rotation` is still to be applied."""

    __slots__ = ("rotation", "x")

    def __init__(self, x: mx.array, rotation: Rotation) -> None:
        self.x = x
        self.rotation = rotation

    def __getattr__(self, name: str) -> NoReturn:
        raise RotationError(
            f"the model reads `{name}` of rotated queries or keys before its attention"
            " (hint: MLXCEL_PAGED_STEP_FUSION=0)"
        )


class _Pass(threading.local):
    """The decode pass that this thread is building."""

    offset: object = object()


_NO_OFFSET = _Pass.offset
_pass = _Pass()


def begin_deferring(offset: mx.array) -> None:
    """From now on this thread puts off rotations by `offset`, this very object."""
    _pass.offset = offset


def end_deferring() -> None:
    """Ends what `begin_deferring` began."""
    _pass.offset = _NO_OFFSET


def is_deferred(offset: object) -> bool:
    """Whether rotations by `offset` are put off."""
    return offset is _pass.offset
