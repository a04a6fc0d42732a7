"""Reads the body of a request as one JSON object, strictly and within a size."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from mlxcel_paged.server.errors import ApiError

# Closing a connection with unread data resets it, and the client may never see why. So a body that is too large is read
# on for a while and dropped before the answer goes out.
_MAX_DISCARDED_BYTES = 64 << 20
_DISCARD_TIMEOUT_S = 5.0


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        ApiError: 413 for a body larger than `max_bytes`, 415 for a compressed one, 400 for one whose end is told in two
            ways and for anything but an object (malformed, not UTF-8, NaN or Infinity, a key given twice, nested too
            deeply).
        starlette.requests.ClientDisconnect: the client left while it was sending.
    """
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        # A proxy that goes by the length would take the rest of the body for the next request (RFC 9112, 6.1).
        message = "the request has both a Content-Length and a Transfer-Encoding"
        raise ApiError(400, "invalid_http", message, headers=_CLOSE)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "unsupported_encoding", f"the body must not be compressed: {encoding}", headers=_CLOSE)
    return parse_json_object(await _read(request, max_bytes))


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parses a body; see `read_json_object`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique_members)
    except UnicodeDecodeError as error:
        raise _malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _malformed("the body is nested too deeply") from None
    except ValueError as error:
        raise _malformed(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _malformed(f"the body must be a JSON object, got {json_type(value)}")
    return value


def json_type(value: object) -> str:
    """JSON's name for the type of a parsed value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "an array", str: "a string", int: "an integer", float: "a number"}
    return names[type(value)]


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        if "expect" not in request.headers:
            await _discard(request)
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            await _discard(request)
            raise _too_large(max_bytes)
        body += chunk
    return bytes(body)


async def _discard(request: Request) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            more = True
            while more and num_bytes < _MAX_DISCARDED_BYTES:
                message = await request.receive()
                num_bytes += len(message.get("body", b""))
                more = message.get("more_body", False)
    except TimeoutError:
        pass


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body is larger than {max_bytes} bytes", headers=_CLOSE)


def _malformed(message: str) -> ApiError:
    return ApiError(400, "invalid_json", message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} is given twice")
            seen.add(key)
    return members


_CLOSE = {"connection": "close"}
