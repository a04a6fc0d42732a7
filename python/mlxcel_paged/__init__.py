"""Paged-attention serving for MLX.

For authors of engines: `paged_decode` attends once; `plan_from_csr` plans a batch that then steps without re-planning.
Both are imported on first use, because MLX must not be imported before `mlxcel_paged.blas.prepare()` has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxcel_paged import errors
from mlxcel_paged._core import __version__
from mlxcel_paged.errors import *  # noqa: F403

if TYPE_CHECKING:
    from mlxcel_paged.attention.api import paged_decode
    from mlxcel_paged.attention.plan_api import DecodePlan, plan_from_csr

_LAZY = {
    "DecodePlan": "mlxcel_paged.attention.plan_api",
    "paged_decode": "mlxcel_paged.attention.api",
    "plan_from_csr": "mlxcel_paged.attention.plan_api",
}

__all__ = ["DecodePlan", "__version__", "paged_decode", "plan_from_csr", *errors.__all__]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
