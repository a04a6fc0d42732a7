"""Every error that the package raises on purpose: those of the compiled core, and Python's own."""

from __future__ import annotations

from mlxcel_paged._core import (
    AllocationError,
    BudgetExceededError,
    BudgetTooSmallError,
    CorruptionError,
    InvalidArgumentError,
    InvalidPlanError,
    InvalidTypeError,
    OutOfPagesError,
    PagedError,
    PlanFullError,
    StaleSlotError,
)

__all__ = [
    "AllocationError",
    "BackendUnavailableError",
    "BudgetExceededError",
    "BudgetTooSmallError",
    "CorruptionError",
    "InvalidArgumentError",
    "InvalidModelError",
    "InvalidPlanError",
    "InvalidTypeError",
    "ModelNotFoundError",
    "OutOfPagesError",
    "PagedError",
    "PlanFullError",
    "SelfCheckError",
    "StaleSlotError",
    "UnsupportedModelError",
]


class ModelNotFoundError(PagedError, ValueError):
    """No model under that name."""

    slug = "model_not_found"


class InvalidModelError(PagedError, ValueError):
    """Model files are damaged or inconsistent."""

    slug = "invalid_model"


class UnsupportedModelError(PagedError, ValueError):
    """The model is of a kind that cannot be loaded, or cannot be paged."""

    slug = "unsupported_model"


class SelfCheckError(PagedError, RuntimeError):
    """Paged decode and the model's own cache disagree."""

    slug = "self_check"


class BackendUnavailableError(PagedError, RuntimeError):
    """The backend does not run here."""

    slug = "backend_unavailable"
