"""Exact re-packing of GGUF's simple block formats into MLX's affine quantization.

A block of Q4_0, Q4_1 or Q8_0 is 32 weights `scale * q + bias` with one scale, which is MLX's affine mode at group size
32; only the order of the bits differs. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType

from mlxcel_paged.models.gguf_file import GGUFTensor

GROUP_SIZE = 32
_BITS = {GGMLQuantizationType.Q4_0: 4, GGMLQuantizationType.Q4_1: 4, GGMLQuantizationType.Q8_0: 8}


def affine_bits(tensor: GGUFTensor) -> int | None:
    """Bits per weight in MLX's affine form, or None where the tensor has no exact one."""
    return _BITS.get(tensor.kind)


def to_affine(tensor: GGUFTensor, rows: np.ndarray[Any, Any], dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Packs `rows` (`tensor`'s raw bytes, possibly permuted) as `(weight uint32, scales, biases)`."""
    num_rows = rows.shape[0]
    num_groups = tensor.shape[-1] // GROUP_SIZE
    blocks = rows.reshape(num_rows, num_groups, -1)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    packed: np.ndarray[Any, Any]
    if tensor.kind == GGMLQuantizationType.Q8_0:
        codes = (blocks[..., 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
        bias = scale * -128.0
        packed = codes.reshape(num_rows, -1)
    else:
        if tensor.kind == GGMLQuantizationType.Q4_1:
            bias = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32)
            halves = blocks[..., 4:]
        else:
            bias = scale * -8.0
            halves = blocks[..., 2:]
        codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(num_rows, -1, 2)
        packed = codes[..., 0] | (codes[..., 1] << 4)
    weight = mx.array(np.ascontiguousarray(packed).view(np.uint32))
    return weight, mx.array(scale).astype(dtype), mx.array(bias).astype(dtype)
