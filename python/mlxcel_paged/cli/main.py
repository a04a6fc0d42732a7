"""Entry point: picks the subcommand, turns the package's errors into one line and an exit status."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from mlxcel_paged import _core, blas
from mlxcel_paged.cli import options

COMMANDS = {
    "serve": "serve a model through an OpenAI-compatible endpoint",
    "generate": "generate text from one or several prompts",
    "bench": "measure the plan, the kernels, decode steps, prefill and servers",
    "doctor": "show versions, backend, BLAS, SIMD level and the path that a model would get",
}
EXIT_USAGE = 2
MLX_EXTRAS = "'mlxcel-paged[cpu]', or [cuda13] on an NVIDIA machine"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status (0 done, 1 failed, 2 wrong usage or setting)."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.INFO,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for library in ("httpx", "matplotlib"):
        logging.getLogger(library).setLevel(logging.WARNING)
    blas.prepare()  # has to come before the first import of mlx, whatever the subcommand imports
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as error:
        if arguments.verbose or (error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
            raise
        print(f"mlxcel-paged: error: {error} (hint: pip install {MLX_EXTRAS})", file=sys.stderr)
        return EXIT_USAGE
    except (_core.PagedError, ValueError) as error:
        if arguments.verbose:
            raise
        print(f"mlxcel-paged: error: {options.message(error, arguments.flags)}", file=sys.stderr)
        return EXIT_USAGE
    return status


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; what they parse has `run`, and in `flags` the names of the flags, see `options.flag_names`."""
    parser = argparse.ArgumentParser(prog="mlxcel-paged", description="Paged-attention serving for MLX")
    parser.add_argument("--version", action="version", version=f"mlxcel-paged {_core.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"mlxcel_paged.cli.{name}")
        command = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        module.add_arguments(command)
        command.set_defaults(run=module.run, flags=options.flag_names(command))
    return parser


if __name__ == "__main__":
    sys.exit(main())
