"""uvicorn's HTTP/1.1 protocol with OpenAI's error body where it refuses what is no HTTP request."""

from __future__ import annotations

import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxcel_paged.server.errors import ApiError


class ApiH11Protocol(H11Protocol):
    """One connection. h11 is the parser that uvicorn always has; it bounds the size of headers."""

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that h11 could not parse and closes the connection."""
        content = json.dumps(ApiError(400, "invalid_http", msg).body()).encode("ascii")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode("ascii")),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=content), h11.EndOfMessage())
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
