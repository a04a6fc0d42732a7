"""API keys: with any configured, every path but the open ones asks for one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel_paged.server.errors import ApiError

# Probes carry no keys; the status page and its files are part of the package and say nothing about this server.
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
_OPEN_FOLDER = "/assets/"
METRICS_PATH = "/metrics"


class RequireApiKey:
    """ASGI middleware. A key is sent as `Authorization: Bearer KEY`.

    Args:
        keys: accepted keys, at least one.
        open_metrics: whether `/metrics` asks for none.
        on_refusal: called with the code of every refusal.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], open_metrics: bool, on_refusal: Callable[[str], None]
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = OPEN_PATHS | {METRICS_PATH} if open_metrics else OPEN_PATHS
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope).headers.get("authorization", ""))
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._on_refusal(refusal.code)
        await refusal.response()(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(_OPEN_FOLDER)

    def _refusal(self, authorization: str) -> ApiError | None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return _unauthorized("missing_api_key", "this server asks for a key: Authorization: Bearer KEY")
        given = _digest(key.strip().encode("utf-8", "surrogateescape"))
        # Digests are all of one length and every key is looked at, so the time tells nothing about any of them.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else _unauthorized("invalid_api_key", "the API key is not one of this server's")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(code: str, message: str) -> ApiError:
    return ApiError(401, code, message, headers={"www-authenticate": "Bearer"})
