"""The one replacement that lets unmodified mlx-lm models run on pages.

Model modules bind `scaled_dot_product_attention` by name at import, so it is replaced in `mlx_lm.models.base` and in
every loaded `mlx_lm.models` module that still holds the original. The replacement looks at the keys only: a handle goes
to its step, anything else to the original.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlxcel_paged.attention.launch import attend
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.models import soft_cap

_NAME = "scaled_dot_product_attention"
_original = base.scaled_dot_product_attention


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(keys, KeyHandle):
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    output: mx.array = _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return output


def install() -> None:
    """Puts the replacement in place. Idempotent; call it again after more model modules were imported."""
    for module in _model_modules():
        if getattr(module, _NAME, None) is _original:
            setattr(module, _NAME, _attention)
    soft_cap.install()


def uninstall() -> None:
    """Undoes `install`."""
    for module in _model_modules():
        if getattr(module, _NAME, None) is _attention:
            setattr(module, _NAME, _original)
    soft_cap.uninstall()


def is_installed() -> bool:
    """Whether the replacement is in place."""
    return getattr(base, _NAME) is _attention


def _model_modules() -> list[ModuleType]:
    prefix = "mlx_lm.models."
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefix) and module is not None]
