"""How a server ends: no new requests, running ones finish, late ones are told, and nothing is left to be cancelled.

uvicorn cancels what runs when its own patience ends, and logs each cancelled request as a crash. So late requests are
aborted by us before that: an answer that has not begun becomes a 503, a stream ends with an error event. Only clients
that do not read are left for uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import MutableMapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel_paged.server.service import Service

logger = logging.getLogger("mlxcel_paged.server")

UNREAD_PATIENCE_S = 3
"""Seconds that answers to aborted requests get to be read by their clients."""


class DrainingServer(uvicorn.Server):
    """uvicorn with the shutdown above; its `timeout_graceful_shutdown` must lie `UNREAD_PATIENCE_S` beyond ours."""

    def __init__(self, config: uvicorn.Config, service: Service, timeout_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._timeout_s = timeout_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.begin_drain()
        aborting = asyncio.create_task(self._abort_late())
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()
            await asyncio.gather(aborting, *self.server_state.tasks, return_exceptions=True)
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()  # `close` would wait for the client to read
            await asyncio.sleep(0)

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._timeout_s)
        num_aborted = self._service.abort_all()
        if num_aborted:
            logger.warning("aborted %d sequences that did not finish within %g s", num_aborted, self._timeout_s)


class QuietCancellation:
    """ASGI middleware around the whole app: a request that uvicorn cancels while draining ends without a traceback."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False

        async def watched_send(message: MutableMapping[str, Any]) -> None:
            nonlocal is_complete
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched_send)
        except asyncio.CancelledError:
            if not self._service.is_draining or scope["type"] != "http":
                raise
            if not is_complete:
                logger.warning("broke off an answer that its client did not read")
