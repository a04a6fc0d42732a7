"""Puts an optimised BLAS under MLX before any test imports it: that is when it is decided."""

from hypothesis import settings

from mlxcel_paged import blas

# A busy machine is no defect.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

blas.prepare()
