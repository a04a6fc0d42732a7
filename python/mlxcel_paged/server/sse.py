"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) over one ASGI connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from mlxcel_paged.server.errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class EventStream:
    """Writes events; the headers go out with the first of them.

    Attributes:
        is_started: whether headers are sent, so that an error can only be an event.
    """

    def __init__(self, send: Send) -> None:
        self.is_started = False
        self._send = send

    async def event(self, payload: Mapping[str, Any]) -> None:
        """Sends one JSON object. An event is encoded whole, so no character is split."""
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        # JSON escapes the line ends of the protocol; clients that split lines as Python does know three more.
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
        await self._write(f"data: {text}\n\n".encode())

    async def comment(self, text: str) -> None:
        """Sends a line that clients skip; it keeps the connection alive."""
        await self._write(f": {text}\n\n".encode())

    async def done(self) -> None:
        """Ends a stream that is complete."""
        await self._write(b"data: [DONE]\n\n")
        await self._end()

    async def error(self, error: ApiError) -> None:
        """Ends a stream that failed: an error event and no [DONE]."""
        # Escaped to ASCII: a message may quote a lone surrogate of the request.
        await self._write(b"data: " + json.dumps(error.body()).encode("ascii") + b"\n\n")
        await self._end()

    async def _write(self, body: bytes) -> None:
        if not self.is_started:
            self.is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
