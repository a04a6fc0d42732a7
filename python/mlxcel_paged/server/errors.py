"""Failures of a request as OpenAI's error body: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("mlxcel_paged.server")

_TYPES = {429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status, 4xx or 5xx.
        code: stable slug of the kind.
        message: what is wrong, with the values.
        param: the field at fault, such as `messages[0].content`.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as a whole HTTP answer."""
        # Escaped to ASCII: a message may quote a lone surrogate of the request.
        content = json.dumps(self.body()).encode("ascii")
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, code, message, param=param)


async def answer_api_error(_request: Request, error: Exception) -> Response:
    """Starlette handler of `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette handler of its router's own refusals."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, "unknown_url", f"unknown URL: {request.method} {request.url.path}").response()
    if error.status_code == 405:
        message = f"method {request.method} is not allowed for {request.url.path}"
        return ApiError(405, "method_not_allowed", message, headers=error.headers).response()
    return ApiError(error.status_code, "http_error", error.detail, headers=error.headers).response()


class UnexpectedErrors:
    """ASGI middleware: what nothing else has answered is logged and becomes a 500, without details for the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            # Once an answer has begun, the only honest sign is a connection that breaks off.
            if is_started or scope["type"] != "http":
                raise
            logger.exception("a request failed unexpectedly")
            await internal_error().response()(scope, receive, send)


def internal_error() -> ApiError:
    """A 500 that tells nothing but where to look."""
    return ApiError(500, "internal_error", "the server failed on this request; its log has the cause")


def engine_failed() -> ApiError:
    """A 503 that lasts until the server is started anew."""
    return ApiError(503, "engine_failed", "the engine has failed; the server's log has the cause")


def aborted() -> ApiError:
    """A 503 for a request that shutdown has cut short."""
    return ApiError(503, "aborted", "the server is stopping and has aborted the request")
