"""Every error that the package raises on purpose."""

from __future__ import annotations


class PagedError(Exception):
    """Base of all."""

    slug = "paged_error"


class InvalidArgumentError(PagedError, ValueError):
    slug = "invalid_argument"

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class InvalidTypeError(PagedError, TypeError):
    slug = "invalid_type"

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


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
