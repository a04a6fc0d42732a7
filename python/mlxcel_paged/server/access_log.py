"""Names every request, and logs one line for each: method, path, status, time. Never a prompt, a query or an answer."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel_paged.server.request_id import HEADER, request_id

logger = logging.getLogger("mlxcel_paged.access")

CLIENT_GONE_STATUS = 499  # nginx's word for it; never sent
_POLLED_PATHS = frozenset({"/v1/status"})  # once a second by every open status page


class AccessLog:
    """ASGI middleware around the whole app. Every answer gets an `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id(scope["headers"])
        status = 0

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), (HEADER, name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        started = time.monotonic()
        state = scope.setdefault("state", {})
        state["client_gone"] = False
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            elapsed_ms = (time.monotonic() - started) * 1e3
            shown_status = CLIENT_GONE_STATUS if state["client_gone"] else status
            path = quote(scope["path"])
            level = logging.DEBUG if scope["path"] in _POLLED_PATHS else logging.INFO
            logger.log(level, "%s %s %d %.1f ms %s", scope["method"], path, shown_status, elapsed_ms, name)
