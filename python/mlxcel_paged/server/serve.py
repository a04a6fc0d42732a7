"""Runs the server in this process until a signal ends it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from mlxcel_paged.env import API_KEY
from mlxcel_paged.errors import PagedError
from mlxcel_paged.server.app import create_app
from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.drain import UNREAD_PATIENCE_S, DrainingServer
from mlxcel_paged.server.engine_api import LOADING, READY, Engine
from mlxcel_paged.server.protocol import ApiH11Protocol
from mlxcel_paged.text.template import has_chat_template

_STATE_POLL_S = 0.1
_STOP_TIMEOUT_S = 30.0


class HostedEngine(Engine, Protocol):
    """An engine whose life the server leads."""

    def start(self) -> None:
        """Begins to load the model, in the engine's own thread."""

    def stop(self, *, timeout_s: float | None = None) -> bool:
        """Ends the engine and waits for its thread, which may hang in a step; requests that still run are aborted.

        Returns:
            Whether the thread has ended.
        """

    @property
    def failure(self) -> BaseException | None:
        """Why the state is `failed`."""


class ListenError(PagedError, RuntimeError):
    """The server cannot listen at its address."""

    slug = "cannot_listen"


def serve(engine: HostedEngine, config: ServerConfig) -> None:
    """Starts the engine and serves it; returns after SIGINT or SIGTERM, once running requests have finished.

    The port is open while the model loads, so that /health can say so.

    Raises:
        ListenError: the address is taken or not ours.
        Exception: what kept the engine from loading.
    """
    listener = listen(config)
    try:
        engine.start()
        try:
            with _signals_end_only_the_server():
                asyncio.run(_serve(engine, config, listener))
        finally:
            if not engine.stop(timeout_s=_STOP_TIMEOUT_S):
                _say(f"the engine's step has not ended after {_STOP_TIMEOUT_S:g} s; leaving it behind")
    finally:
        listener.close()


def listen(config: ServerConfig) -> socket.socket:
    """Binds the address, so that a port that is taken shows before a model is loaded.

    Raises:
        ListenError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it every event of a stream may wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        message = f"cannot listen on {config.host} port {config.port}: {reason} (hint: choose another --port)"
        raise ListenError(message) from error


def make_server(app: Starlette, config: ServerConfig) -> uvicorn.Server:
    """uvicorn with the options that the endpoints count on, around what `create_app` made."""
    return DrainingServer(
        uvicorn.Config(
            app,
            http=ApiH11Protocol,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=config.shutdown_timeout_s + UNREAD_PATIENCE_S,
        ),
        app.state.service,
        config.shutdown_timeout_s,
    )


async def _serve(engine: HostedEngine, config: ServerConfig, listener: socket.socket) -> None:
    server = make_server(create_app(engine, config), config)
    url = _url(listener)
    _say(f"listening on {url} (the model is loading)")
    if config.is_exposed:
        _say(f"warning: whoever reaches {config.host} can use this server, for it asks for no key (hint: --api-key)")
    announcing = asyncio.create_task(_announce(engine, server, url, needs_key=bool(config.api_keys)))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
    if announcing.done() and not announcing.cancelled() and not announcing.result() and engine.failure is not None:
        raise engine.failure


async def _announce(engine: HostedEngine, server: uvicorn.Server, url: str, *, needs_key: bool) -> bool:
    """Waits for the model and says how to use it; ends the server if there will be none."""
    while engine.state == LOADING:
        await asyncio.sleep(_STATE_POLL_S)
    if engine.state != READY:
        server.should_exit = True
        return False
    _say(f"ready: {engine.model.name} at {url}/v1\n\n  {example(engine, url, needs_key=needs_key)}\n")
    return True


def example(engine: Engine, url: str, *, needs_key: bool = False) -> str:
    """A curl line that works with the loaded model; a key is left to the shell to fill in."""
    key = f' -H "Authorization: Bearer ${API_KEY}"' if needs_key else ""
    path, body = "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    if has_chat_template(engine.model.tokenizer):
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _signals_end_only_the_server() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more, which would end the process before the engine has stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
