"""Why an engine does not take a request, or did not finish it."""

from __future__ import annotations

from mlxcel_paged.errors import PagedError


class EngineNotReadyError(PagedError, RuntimeError):
    """The engine takes no requests now: it is loading, stopping or stopped."""

    slug = "engine_not_ready"


class EngineFailedError(PagedError, RuntimeError):
    """The engine cannot go on; it takes no requests any more."""

    slug = "engine_failed"
