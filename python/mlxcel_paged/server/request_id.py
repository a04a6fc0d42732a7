"""The name of a request: the client's own if it is harmless, else a new one."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

HEADER = b"x-request-id"
# It ends up in a header and in log lines.
_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The request id that an answer carries, from the headers of the request."""
    given = next((value for name, value in headers if name == HEADER), b"")
    return given.decode("ascii") if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
