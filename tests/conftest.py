"""Puts an optimised BLAS under MLX before any test imports it: that is when it is decided."""

from mlxcel_paged import blas

blas.prepare()
