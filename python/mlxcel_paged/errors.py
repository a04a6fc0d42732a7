"""Every error that the package raises on purpose: those of the compiled core, and Python's own."""

from __future__ import annotations

from collections.abc import Mapping

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
    "InvalidFieldError",
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


class InvalidFieldError(PagedError, ValueError):
    """A field of a configuration has a value that cannot be honoured.

    Args:
        field: its name.
        value: what was given.
        expected: what is allowed, as it follows "must be".
        beside: another field that this depends on, and its value; a switch is True.
        got: how the message shows the value, if not by its repr; empty for a secret.

    Attributes:
        field, value: as given.
    """

    slug = "invalid_field"

    def __init__(
        self,
        field: str,
        value: object,
        expected: str,
        *,
        beside: tuple[str, object] | None = None,
        got: str | None = None,
    ) -> None:
        self.field = field
        self.value = value
        self._expected = expected
        self._beside = beside
        self._got = repr(value) if got is None else got
        super().__init__(self.message({}))

    def message(self, names: Mapping[str, str]) -> str:
        """The message with other names for fields, such as the flags that set them; those without keep their own."""
        text = f"{names.get(self.field, self.field)} must be {self._expected}"
        if self._beside is not None:
            field, value = self._beside
            text += f" with {names.get(field, field)}" + ("" if value is True else f" {value}")
        return f"{text}, got {self._got}" if self._got else text


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
