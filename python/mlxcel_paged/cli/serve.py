"""`mlxcel-paged serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse

from mlxcel_paged.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind; loopback by default")
    group.add_argument("--port", type=_port, default=8080, help="(default: %(default)s; 0 takes a free one)")


def run(arguments: argparse.Namespace) -> int:
    config = options.engine_config(arguments)

    from mlxcel_paged.engine.engine import Engine
    from mlxcel_paged.server.config import ServerConfig
    from mlxcel_paged.server.serve import serve

    return serve(Engine(config), ServerConfig(host=arguments.host, port=arguments.port))


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port between 0 and 65535: {text!r}")
    return int(text)
