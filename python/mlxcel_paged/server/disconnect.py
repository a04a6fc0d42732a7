"""Notices that a client has left while its request is being worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, whose request body has been read, and cancels it as soon as the client leaves.

    Raises:
        ClientGoneError: the client left first; `work` has been cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
