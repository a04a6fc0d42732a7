"""How products of a few rows are spread over a GPU: constants and grids that all their kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

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
    return num_tiles // 2 if num_tiles * TILE_FEATURES >= _MANY_FEATURES and has_pairs(features) else num_tiles


def has_pairs(features: Sequence[int]) -> bool:
    """Whether every matrix has an even number of tiles, so that a block may take two."""
    return not any(count % (2 * TILE_FEATURES) for count in features)
