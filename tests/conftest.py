"""Puts an optimised BLAS under MLX before any test imports it: that is when it is decided.

One BLAS thread: those of OpenBLAS wait for each other by spinning, and where something else uses the cores, as in a
test run, a decode step of the embedded model takes seconds instead of 80 ms (2026-11, 2 cores, load 7).
"""

import os

# OpenBLAS reads it when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from mlxcel_paged import blas

blas.prepare()
