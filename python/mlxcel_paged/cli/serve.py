"""`mlxcel-paged serve`: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse

from mlxcel_paged import env
from mlxcel_paged.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s, this machine alone)")
    group.add_argument("--port", type=_port, default=8080, help="0 takes a free one (default: %(default)s)")
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model in answers (default: its own)")
    group.add_argument(
        "--max-queued-requests",
        type=options.positive_int,
        default=256,
        metavar="N",
        help="sequences that may wait for a place; beyond it the answer is 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-queued-tokens",
        type=options.positive_int,
        metavar="N",
        help="prompt tokens of the sequences that wait; beyond it the answer is 429 (default: no bound)",
    )
    group.add_argument(
        "--step-timeout",
        dest="step_timeout_s",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="a step that runs longer is reported and turns /health to 503; 0 for never (default: %(default)g)",
    )
    group.add_argument(
        "--shutdown-timeout",
        dest="shutdown_timeout_s",
        type=options.positive_int,
        default=30,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        metavar="KEY",
        help=f"a key that requests must send; may be repeated (default: {env.API_KEY}, else none)",
    )
    group.add_argument("--open-metrics", action="store_true", help="serve /metrics without a key")
    group.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin, or * for any, may read answers; may be repeated (default: none)",
    )
    group.add_argument("--debug-endpoints", action="store_true", help="serve /v1/debug/plan and /v1/debug/state")


def run(arguments: argparse.Namespace) -> int:
    config = options.engine_config(arguments)
    if arguments.api_keys is None:
        arguments.flags["api_keys"] = env.API_KEY

    from mlxcel_paged.engine.engine import Engine
    from mlxcel_paged.server.config import MAX_SEQUENCES, ServerConfig
    from mlxcel_paged.server.serve import serve

    server_config = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        served_model_name=arguments.served_model_name,
        shutdown_timeout_s=arguments.shutdown_timeout_s,
        debug_endpoints=arguments.debug_endpoints,
        api_keys=_api_keys(arguments),
        open_metrics=arguments.open_metrics,
        cors_origins=tuple(arguments.cors_origins),
        # What could never be queued is a 400 and no 429.
        max_sequences=min(MAX_SEQUENCES, arguments.max_queued_requests + arguments.parallel),
        # The engine's queue refuses first; this bounds what is being tokenized or read besides.
        max_open_sequences=max(1024, 2 * (arguments.max_queued_requests + arguments.parallel)),
    )
    engine = Engine(
        config,
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        step_timeout_s=arguments.step_timeout_s or None,
        log_plan=arguments.debug_endpoints,
    )
    serve(engine, server_config)
    return 0


def _api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.api_keys is not None:
        return tuple(arguments.api_keys)
    key = env.api_key()
    return () if key is None else (key,)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port between 0 and 65535: {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}") from None
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1e9 seconds: {text!r}")
    return value
