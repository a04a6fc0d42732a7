"""Computes the products of a decode batch with kernels that read the weights once and cost the host little.

MLX hands a dense product of several rows to cuBLAS, as a graph of its own inside the step's, which costs the host more
than a kernel of ours, and reads quantized weights several times. A decode step of an 8B model has 225 products and is
bound by the host from two rows on. `benchmarks/bench_products_cuda.py` measures both.
"""

from __future__ import annotations

import logging
import time

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.affine_kernel import affine_kernel_compiles
from mlxcel_paged.models.dense_kernel import dense_kernel_compiles
from mlxcel_paged.models.flat_quantized import FlatQuantizedEmbedding, FlatQuantizedLinear
from mlxcel_paged.models.product_launch import ELEMENTS
from mlxcel_paged.models.siblings import join_siblings
from mlxcel_paged.models.streamed_dense import StreamedEmbedding, StreamedLinear
from mlxcel_paged.models.streamed_layer import SharesLaunches
from mlxcel_paged.models.streamed_quantized import StreamedQuantizedEmbedding, StreamedQuantizedLinear, layer_format

logger = logging.getLogger("mlxcel_paged")

_DENSE = {nn.Linear: StreamedLinear, nn.Embedding: StreamedEmbedding}
_QUANTIZED = {
    nn.QuantizedLinear: StreamedQuantizedLinear,
    nn.QuantizedEmbedding: StreamedQuantizedEmbedding,
    FlatQuantizedLinear: StreamedQuantizedLinear,
    FlatQuantizedEmbedding: StreamedQuantizedEmbedding,
}


def stream_products(model: nn.Module, dtype: mx.Dtype, num_caches: int) -> int:
    """Turns dense and quantized layers of `model` into classes that launch our kernels, in place.

    Subclasses are left alone. Nothing is turned where MLX cannot compile a kernel, which takes seconds a dtype or
    quantization once a process. Layers that a decode pass calls with one array then share launches.

    Args:
        dtype: Dtype of activations.
        num_caches: Caches that the model is called with.

    Returns:
        The layers that were turned; 0 the second time.
    """
    started_at = time.perf_counter()
    turned = []
    for module in model.modules():
        streamed = _streamed_class(module, dtype)
        if streamed is not None:
            _lay_out_rows(module)
            module.__class__ = streamed
            turned.append(module)
    if turned:
        linear = [module for module in turned if isinstance(module, SharesLaunches)]
        joined = join_siblings(model, num_caches, linear, lambda layers: layers[0].layers_launch(layers))
        seconds = time.perf_counter() - started_at
        logger.info("%d layers use our products, %d in shared launches (%.1f s)", len(turned), joined, seconds)
    return len(turned)


def _lay_out_rows(module: nn.Module) -> None:
    """Stores arrays that are views, such as a transposed weight, row by row: a launch would copy them each time."""
    arrays = {name: mx.contiguous(array) for name, array in module.parameters().items()}
    mx.eval(arrays)
    module.update(arrays)


def _streamed_class(module: nn.Module, dtype: mx.Dtype) -> type[nn.Module] | None:
    kind = type(module)
    if kind in _DENSE:
        return _DENSE[kind] if dtype in ELEMENTS and dense_kernel_compiles(dtype) else None
    if kind in _QUANTIZED:
        form = layer_format(module)
        if form is not None and form.dtype == dtype and form.is_served and affine_kernel_compiles(form):
            return _QUANTIZED[kind]
    return None
