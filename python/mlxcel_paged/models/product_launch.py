"""Launches of the kernels for products of a few rows, whatever the weights are stored as."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.kernels_cuda.jit_header import jit_header

# Of kernels/cuda/projection_block.cuh.
MAX_ROWS = 16
NUM_THREADS = 256
TILE_ROWS = 8
TILE_FEATURES = 16
MAX_PARTS = 3
"""Matrices that one launch multiplies the same rows with."""

ELEMENTS = {mx.float16: "F16", mx.bfloat16: "Bf16"}
"""Element types of the kernels' sources."""

# From here on two tiles of features a block are faster: fewer reads of the rows, and blocks enough all the same.
_MANY_FEATURES = 6144


def num_product_blocks(features: Sequence[int]) -> int:
    """Blocks of a launch for matrices of so many features: as many as tiles, or half of it where all are even."""
    num_tiles = sum(features) // TILE_FEATURES
    has_pairs = not any(count % (2 * TILE_FEATURES) for count in features)
    return num_tiles // 2 if num_tiles * TILE_FEATURES >= _MANY_FEATURES and has_pairs else num_tiles


def product_kernel(
    name: str, file_name: str, *, function: str, part: str, arrays: Mapping[str, str], has_bias: Sequence[bool]
) -> Any:
    """What MLX is to compile for a launch over some matrices: inputs `x`, then of each matrix its arrays and its bias.

    Args:
        name: Of the kernel, but for the biases.
        file_name: File in `kernels/cuda`.
        function: Its function in `mlxcel`, with template arguments.
        part: Its type of a matrix, a `ProjectionPart`.
        arrays: What its weights consist of: names, the first of which has the features, and pointer types.
        has_bias: Of each matrix.
    """
    names, parts = ["x"], []
    features = next(iter(arrays))
    for i, biased in enumerate(has_bias):
        names += [f"{array}{i}" for array in (*arrays, *(["b"] if biased else []))]
        weights = ", ".join(f"({pointer}){array}{i}" for array, pointer in arrays.items())
        bias = f"(const u16*)b{i}" if biased else "nullptr"
        # The text of a shape makes MLX pass it by value.
        parts.append(f"{{{{{weights}}}, {bias}, (u16*)y{i}, {features}{i}_shape[0]}}")
    mask = "".join(str(int(biased)) for biased in has_bias)
    return mx.fast.cuda_kernel(
        name=f"{name}_{mask}",
        input_names=names,
        output_names=[f"y{i}" for i in range(len(parts))],
        header=jit_header(file_name, num_threads=NUM_THREADS, min_blocks=2),
        source=f"""
  using mlxcel::u16;
  const mlxcel::{part} parts[{len(parts)}] = {{{", ".join(parts)}}};
  mlxcel::{function}((const u16*)x, parts, x_shape[0], x_shape[2]);
""",
        ensure_row_contiguous=True,
    )


class ProductLaunch:
    """The launch for some matrices, prepared once for all inputs: a step makes more than a hundred.

    Args:
        kernel: What MLX compiles, with an input `x` before the matrices' own.
        inputs: Those others.
        features: Features of each matrix.
        num_inner: Inner size.
        dtype: Dtype of inputs and outputs.
        num_blocks: Blocks for a number of rows.
        kind: Matrices of one kind can share a launch.
    """

    __slots__ = ("_dtypes", "_features", "_forms", "_inputs", "_kernel", "_num_blocks", "dtype", "kind", "num_inner")

    def __init__(
        self,
        kernel: Any,
        inputs: Sequence[mx.array],
        features: Sequence[int],
        num_inner: int,
        dtype: mx.Dtype,
        num_blocks: Callable[[int], int],
        kind: Hashable,
    ) -> None:
        self.num_inner = num_inner
        self.dtype = dtype
        self.kind = kind
        self._kernel = kernel
        self._inputs = tuple(inputs)
        self._features = tuple(features)
        self._num_blocks = num_blocks
        self._dtypes = [dtype] * len(self._features)
        self._forms: dict[int, tuple[list[tuple[int, int, int]], tuple[int, int, int]]] = {}

    def __call__(self, x: mx.array, num_rows: int) -> list[mx.array]:
        """Returns the product of `x`, `[num_rows, 1, num_inner]`, with each matrix, `[num_rows, 1, features]`."""
        form = self._forms.get(num_rows)
        if form is None:
            shapes = [(num_rows, 1, count) for count in self._features]
            form = self._forms[num_rows] = shapes, (self._num_blocks(num_rows) * NUM_THREADS, 1, 1)
        outputs: list[mx.array] = self._kernel(
            inputs=[x, *self._inputs],
            output_shapes=form[0],
            output_dtypes=self._dtypes,
            grid=form[1],
            threadgroup=(NUM_THREADS, 1, 1),
        )
        return outputs


class LayersLaunch:
    """The launch for some layers, prepared anew when one of their arrays has been exchanged.

    Layers are held weakly: they hold this object, and a model that is let go should free its memory at once.

    Args:
        layers: The layers.
        keys: Names of their arrays.
        prepare: Returns the launch, or None if the kernel does not serve the layers together.
        min_rows: Rows of an input that the kernel serves at least.
    """

    __slots__ = ("_held", "_keys", "_launch", "_layers", "_min_rows", "_prepare")

    def __init__(
        self,
        layers: Sequence[nn.Module],
        keys: Sequence[str],
        prepare: Callable[[Sequence[nn.Module]], ProductLaunch | None],
        min_rows: int,
    ) -> None:
        self._layers = tuple(weakref.ref(layer) for layer in layers)
        self._keys = tuple(keys)
        self._prepare = prepare
        self._min_rows = min_rows
        self._held: list[tuple[weakref.ref[nn.Module], list[tuple[str, mx.array | None]]]] = []
        self._launch: ProductLaunch | None = None

    def __call__(self, x: mx.array) -> list[mx.array] | None:
        """Returns the products of all layers with `x`, or None if the kernel does not serve them."""
        shape = x.shape
        if len(shape) != 3 or shape[1] != 1 or not self._min_rows <= shape[0] <= MAX_ROWS:
            return None
        launch = self.current()
        if launch is None or shape[2] != launch.num_inner or x.dtype != launch.dtype:
            return None
        return launch(x, shape[0])

    def current(self) -> ProductLaunch | None:
        """The launch for the layers' arrays as they are now; None too if a layer is gone."""
        if not self._held:
            return self._renew()
        for reference, arrays in self._held:
            layer = reference()
            if layer is None:
                return None
            for key, array in arrays:
                if layer.get(key) is not array:
                    return self._renew()
        return self._launch

    def forget(self) -> None:
        """Lets the layers' arrays go until the next call."""
        self._held, self._launch = [], None

    def _renew(self) -> ProductLaunch | None:
        layers = [layer for layer in (reference() for reference in self._layers) if layer is not None]
        if len(layers) < len(self._layers):
            return None
        self._held = [
            (reference, [(key, layer.get(key)) for key in self._keys])
            for reference, layer in zip(self._layers, layers, strict=True)
        ]
        self._launch = self._prepare(layers)
        return self._launch
