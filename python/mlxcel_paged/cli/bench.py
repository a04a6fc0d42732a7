"""`mlxcel-paged bench WHAT`: flags, tables and JSON of what `mlxcel_paged.bench` measures."""

from __future__ import annotations

import argparse
from typing import Any

from mlxcel_paged import config
from mlxcel_paged.cli import bench_serve, options
from mlxcel_paged.cli.output import console, json_document, print_table
from mlxcel_paged.config import EngineConfig

EXIT_WRONG_PATH = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, summary, add, measure in (
        ("plan", "host cost of plan updates", _add_plan, _plan),
        ("kernel", "decode attention over pages, and the memory roof of the same run", _add_kernel, _kernel),
        ("decode", "whole decode steps of a model on dense, gathered and fused storage", _add_decode, _decode),
        ("prefill", "prompt processing, ours against mlx-lm as installed", _add_prefill, _prefill),
        ("projection", "weight products of a few rows, ours against BLAS", _add_projection, _projection),
        ("serve", "servers under load, arms that take turns", bench_serve.add_arguments, bench_serve.measure),
    ):
        command = subparsers.add_parser(name, help=summary)
        add(command)
        options.add_json_flag(command)
        command.set_defaults(measure=measure, flags=options.flag_names(command))


def run(arguments: argparse.Namespace) -> int:
    with json_document(arguments.json) as write:
        document, rows, status = arguments.measure(arguments)
        write(document)
    if not arguments.json:
        print_table(f"bench {arguments.what}", rows)
    return int(status)


def _progress(text: str) -> None:
    console.print(f"[dim]{text}[/dim]")


def _add_page_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--page-size",
        type=int,
        choices=config.PAGE_SIZES,
        default=config.DEFAULT_PAGE_SIZE,
        help="tokens in a KV page (default: %(default)s)",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_page_size(parser)
    parser.add_argument("--batch", type=options.positive_int, action="append", help="repeatable (default: a grid)")
    parser.add_argument("--context", type=options.positive_int, action="append", help="repeatable (default: a grid)")


def _plan(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    from mlxcel_paged.bench import plan

    document = plan.bench_plan(
        page_size=arguments.page_size,
        batches=arguments.batch or plan.BATCHES,
        contexts=arguments.context or plan.CONTEXTS,
        progress=_progress,
    )
    return document, document["cases"], 0


def _add_kernel(parser: argparse.ArgumentParser) -> None:
    _add_page_size(parser)
    parser.add_argument("--backend", choices=("cpu", "gather"), action="append", help="repeatable (default: both)")
    parser.add_argument("--batch", type=options.positive_int, action="append", help="repeatable (default: 4)")
    parser.add_argument("--context", type=options.positive_int, action="append", help="repeatable (default: 4096)")
    parser.add_argument("--heads", type=_heads, default=(32, 8), metavar="Q/KV", help="(default: 32/8)")
    parser.add_argument("--head-dim", type=options.positive_int, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), action="append", help="repeatable (default: float16)"
    )
    parser.add_argument("--rounds", type=options.positive_int, default=7, help="(default: %(default)s)")


def _kernel(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    from mlxcel_paged.bench import kernel

    num_qo_heads, num_kv_heads = arguments.heads
    document = kernel.bench_kernel(
        backends=tuple(dict.fromkeys(arguments.backend or ("cpu", "gather"))),
        batches=arguments.batch or (4,),
        contexts=arguments.context or (4096,),
        dtypes=arguments.dtype or ("float16",),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=arguments.head_dim,
        page_size=arguments.page_size,
        num_rounds=arguments.rounds,
        progress=_progress,
    )
    return document, document["cases"], 0


def _add_decode(parser: argparse.ArgumentParser) -> None:
    options.add_model_flags(parser)
    _add_page_size(parser)
    parser.add_argument(
        "--arms",
        type=options.comma_list(("dense", "gather", "fused")),
        default=("dense", "gather", "fused"),
        help="comma-separated (default: dense,gather,fused)",
    )
    parser.add_argument(
        "--batch",
        dest="parallel",
        type=options.positive_int,
        default=4,
        metavar="BATCH",
        help="(default: %(default)s)",
    )
    parser.add_argument("--context", type=options.positive_int, action="append", help="repeatable (default: 4096)")
    parser.add_argument("--steps", type=options.positive_int, default=16, help="timed steps an arm (default: 16)")


def _decode(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    from mlxcel_paged.bench import decode

    document = decode.bench_decode(
        _cpu_config(arguments),
        arms=arguments.arms,
        batch=arguments.parallel,
        contexts=arguments.context or (4096,),
        num_steps=arguments.steps,
        progress=_progress,
    )
    wrong = [row for row in document["arms"] if not row["on_own_path"]]
    for row in wrong:
        console.print(f"[red]arm {row['arm']} did not run on its own path: {row['outcomes']}[/red]")
    return document, document["arms"], EXIT_WRONG_PATH if wrong else 0


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    options.add_model_flags(parser)
    _add_page_size(parser)
    parser.add_argument(
        "--tokens",
        dest="num_tokens",
        type=options.positive_int,
        default=2048,
        metavar="TOKENS",
        help="prompt length (default: 2048)",
    )
    parser.add_argument("--prefill-chunk", type=options.positive_int, default=512, help="(default: %(default)s)")
    parser.add_argument(
        "--arms",
        type=options.comma_list(("ours", "stock")),
        default=("ours", "stock"),
        help="comma-separated (default: ours,stock)",
    )
    parser.add_argument("--rounds", type=options.positive_int, default=3, help="runs of our arm (default: 3)")


def _prefill(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    from mlxcel_paged.bench import prefill

    document = prefill.bench_prefill(
        _cpu_config(arguments),
        arms=arguments.arms,
        num_tokens=arguments.num_tokens,
        num_rounds=arguments.rounds,
        progress=_progress,
    )
    return document, document["cases"], 0


def _add_projection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=options.positive_int, action="append", help="repeatable (default: a grid)")
    parser.add_argument("--rounds", type=options.positive_int, default=31, help="(default: %(default)s)")


def _projection(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    from mlxcel_paged.bench import projection

    document = projection.bench_projection(
        rows=arguments.rows or projection.ROWS, num_rounds=arguments.rounds, progress=_progress
    )
    return document, document["cases"], 0


def _cpu_config(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration of a measurement that runs on the CPU, whatever MLX's default device is."""
    if arguments.device == "gpu":
        raise ValueError(f"bench {arguments.what} measures the CPU; it excludes --device gpu")
    return options.engine_config(arguments)


def _heads(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"not query heads / KV heads, such as 32/8: {text!r}")
    num_qo_heads, num_kv_heads = int(parts[0]), int(parts[1])
    if num_qo_heads % num_kv_heads:
        raise argparse.ArgumentTypeError(f"query heads are no multiple of KV heads: {text!r}")
    return num_qo_heads, num_kv_heads
