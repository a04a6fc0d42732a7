"""`mlxcel-paged serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse

from mlxcel_paged.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s, this machine alone)")
    group.add_argument("--port", type=_port, default=8080, help="0 takes a free one (default: %(default)s)")
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model in answers (default: its own)")


def run(arguments: argparse.Namespace) -> int:
    config = options.engine_config(arguments)

    from mlxcel_paged.engine.engine import Engine
    from mlxcel_paged.server.config import ServerConfig
    from mlxcel_paged.server.serve import serve

    server_config = ServerConfig(
        host=arguments.host, port=arguments.port, served_model_name=arguments.served_model_name
    )
    serve(Engine(config), server_config)
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port between 0 and 65535: {text!r}")
    return int(text)
