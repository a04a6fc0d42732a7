"""Paged models that take the path of a CUDA device on the CPU: MLX computes, the page kernels are doubles."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from page_kernels_double import NumpyKernels

from mlxcel_paged.attention.cuda.page_kernels import CudaPageKernels
from mlxcel_paged.models import paged_model
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel


def cuda_paged_model(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, **options: Any
) -> tuple[PagedModel, NumpyKernels]:
    """A model on pages that hold NaN until they are written."""
    double = NumpyKernels()
    monkeypatch.setattr(paged_model, "page_kernels", lambda: CudaPageKernels("sm_90", double))
    paged = PagedModel(dataclasses.replace(loaded, device="gpu"), arm="gather", **options)
    for layer in range(paged.layout.num_layers):
        for pool in (paged.pools.k(layer), paged.pools.v(layer)):
            assert pool.dtype == mx.float32
            np.array(pool, copy=False)[:] = np.nan
    double.register(paged.pools)
    return paged, double
