"""The tables of cosines and sines of a decode pass: one a configuration of RoPE, for all layers that share it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.rotation import Rotation, unit_pairs


@dataclass(frozen=True, slots=True)
class RotationTable:
    """What a launch needs to apply RoPE.

    Attributes:
        shape: What the kernel is compiled for.
        table: `[rows, 1, 1, dims]` float32, see `Rotation.table`.
    """

    shape: RopeShape
    table: mx.array


class RotationTables:
    """Makes the tables of one pass after the other, each when it is first asked for."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._tables: dict[Rotation, RotationTable] = {}
        self._units: dict[tuple[int, int], mx.array] = {}  # by rows and dims: they are the same in every pass

    def begin(self, positions: mx.array | None) -> None:
        """Starts a pass of rows at `positions`, `[rows]` int32; None for one without tables."""
        self._positions = positions
        self._tables.clear()

    def of(self, rotation: Rotation) -> RotationTable:
        """The table of `rotation` in this pass."""
        found = self._tables.get(rotation)
        if found is None:
            if self._positions is None:
                raise RuntimeError("RoPE was put off in a pass without tables")
            shape = RopeShape(rotation.dims, rotation.traditional)
            found = RotationTable(shape, rotation.table(self._positions, self._units_of(rotation.dims)))
            self._tables[rotation] = found
        return found

    def _units_of(self, dims: int) -> mx.array:
        assert self._positions is not None
        key = (self._positions.shape[0], dims)
        found = self._units.get(key)
        if found is None:
            found = unit_pairs(*key)
            mx.eval(found)
            self._units[key] = found
        return found
