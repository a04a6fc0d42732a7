"""Paged models that take the path of a CUDA device on the CPU: MLX computes, the page kernels are doubles."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
from cuda_double import KernelsDouble
from page_kernels_double import NumpyKernels

from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel


def cuda_paged_model(loaded: LoadedModel, **options: Any) -> tuple[PagedModel, NumpyKernels]:
    """A model on pages that hold NaN until they are written."""
    kernels = KernelsDouble()
    double = kernels.page_double
    paged = PagedModel(dataclasses.replace(loaded, device="gpu"), arm="gather", kernels=kernels, **options)
    for layer in range(paged.layout.num_layers):
        for pool in (paged.pools.k(layer), paged.pools.v(layer)):
            assert pool.dtype == mx.float32
            np.array(pool, copy=False)[:] = np.nan
    double.register(paged.pools)
    return paged, double
