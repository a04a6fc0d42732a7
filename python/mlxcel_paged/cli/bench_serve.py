"""`mlxcel-paged bench serve`: flags of a serving benchmark, and where its results go."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcel_paged import env
from mlxcel_paged.cli import options
from mlxcel_paged.cli.output import console
from mlxcel_paged.errors import PagedError

if TYPE_CHECKING:
    from mlxcel_paged.bench.serve.servers import Servers
    from mlxcel_paged.bench.serve.workload import Workload

_ARMS = ("dense", "gather", "fused")
_PACKAGES = ("httpx", "tqdm")
EXIT_PROBLEM = 1


class MissingPackageError(PagedError, RuntimeError):
    """A package is missing that only this benchmark needs."""

    slug = "missing_package"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_flags(parser)
    group = parser.add_argument_group("arms")
    group.add_argument(
        "--arms",
        type=options.comma_list(_ARMS),
        help="comma-separated, each a server that is started for it (default: dense,gather,fused)",
    )
    group.add_argument(
        "--alternations", type=options.positive_int, default=3, metavar="N", help="turns of every arm (default: 3)"
    )
    group.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="start a server for every turn instead of keeping all of them, for models that fit into memory once",
    )
    group.add_argument(
        "--start-timeout", type=_positive, default=900.0, metavar="S", help="for a server to load (default: 900)"
    )
    group.add_argument("--base-url", metavar="URL", help="measure the server that runs there instead of starting any")
    group.add_argument("--api-key", metavar="KEY", help=f"sent to that server (default: {env.API_KEY}, else none)")
    group.add_argument(
        "--vocab-size", type=options.positive_int, metavar="N", help="token ids to draw from (default: what it says)"
    )
    group.add_argument(
        "serve_arguments", nargs="*", metavar="-- FLAGS", help="flags for `serve`, such as -- --page-size 64"
    )
    _add_load(parser)
    group = parser.add_argument_group("result")
    group.add_argument(
        "--goodput", type=_bound, action="append", metavar="NAME:MS", help="ttft, tpot or e2el bound; repeatable"
    )
    group.add_argument("--check-tokens", action="store_true", help="fail if an answer differs between arms")
    group.add_argument("--allow-failures", action="store_true", help="do not fail because requests did")
    group.add_argument("--output-dir", type=Path, metavar="DIR", help="write serve.json, serve.md and plots there")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--clients",
        "--max-concurrency",
        type=options.positive_int,
        action="append",
        metavar="N",
        help="requests in flight at most; repeatable (default: 4, or no bound with a trace)",
    )
    group.add_argument(
        "--context",
        type=options.positive_int,
        action="append",
        metavar="N",
        help="prompt tokens; repeatable (default: 1024)",
    )
    group.add_argument(
        "--output-len", type=options.positive_int, action="append", metavar="N", help="repeatable (default: 64)"
    )
    group.add_argument(
        "--num-prompts",
        type=options.positive_int,
        metavar="N",
        help="requests of a turn (default: one for each client; all of a trace)",
    )
    group.add_argument(
        "--request-rate", type=_rate, metavar="R", help="arrivals a second, Poisson (default: inf; a trace's own)"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay an Azure (.csv) or Mooncake (.jsonl) trace")
    group.add_argument("--time-scale", type=_positive, default=1.0, metavar="X", help="factor of a trace's times")
    group.add_argument("--length-scale", type=_positive, default=1.0, metavar="X", help="factor of a trace's lengths")
    group.add_argument(
        "--num-warmups", type=_count, metavar="N", help="uncounted requests (default: one for each client)"
    )
    group.add_argument(
        "--warmup-tokens", type=options.positive_int, default=64, metavar="N", help="cut their prompts to (default: 64)"
    )
    group.add_argument("--seed", type=_count, default=0, help="of prompts and arrivals (default: 0)")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Runs the benchmark; returns its document, the rows of its table and the exit status."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"bench serve needs {package} (hint: pip install 'mlxcel-paged[bench]')")
    from mlxcel_paged.bench.serve import arms, report
    from mlxcel_paged.bench.serve.run import bench_serve
    from mlxcel_paged.bench.serve.servers import ExistingServer, StartedServers
    from mlxcel_paged.bench.serve.turn import Endpoint, WarmUp

    workloads = _workloads(arguments)
    is_foreign = arguments.base_url is not None
    arm_names: Sequence[str] = arguments.arms or ((arms.ANY,) if is_foreign else _ARMS)
    if is_foreign and (len(arm_names) > 1 or arguments.serve_arguments or arguments.one_at_a_time):
        raise ValueError("--base-url measures one server as it is; it takes one of --arms at most and no server flags")

    if arguments.output_dir is not None:
        _make_folder(arguments.output_dir)  # rather now than after the measurement
    api_key = arguments.api_key or (env.api_key() if is_foreign else None)

    def run(servers: Servers) -> dict[str, Any]:
        return bench_serve(
            servers,
            workloads,
            arms=arm_names,
            alternations=arguments.alternations,
            endpoint=lambda url: Endpoint(url, api_key, arguments.vocab_size, ask_by_name=is_foreign),
            warm_up=WarmUp(arguments.num_warmups, arguments.warmup_tokens),
            goodput_ms=dict(arguments.goodput or ()),
            check_tokens=arguments.check_tokens,
            allow_failures=arguments.allow_failures,
        )

    if is_foreign:
        document = run(ExistingServer(arguments.base_url, start_timeout_s=arguments.start_timeout))
    else:
        with StartedServers(
            _serve_flags(arguments, workloads),
            start_timeout_s=arguments.start_timeout,
            together=not arguments.one_at_a_time,
        ) as started:
            document = run(started)
    document = {"command": _command(), "seed": arguments.seed, "alternations": arguments.alternations, **document}
    if arguments.output_dir is not None:
        for path in report.write_report(document, arguments.output_dir):
            console.print(f"[dim]wrote {path}[/dim]")
    for line in report.ratio_lines(document):
        console.print(line, markup=False)
    for note in document["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False)
    for problem in document["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False)
    return document, report.rows(document), EXIT_PROBLEM if document["problems"] else 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-dir {folder} cannot be made: {error.strerror}") from error


def _workloads(arguments: argparse.Namespace) -> list[Workload]:
    from mlxcel_paged.bench.serve.trace import read_trace
    from mlxcel_paged.bench.serve.workload import SyntheticWorkload, TraceWorkload

    clients = arguments.clients
    if arguments.trace is not None:
        if arguments.context or arguments.output_len or len(clients or ()) > 1:
            raise ValueError("--trace has its own lengths; it excludes --context, --output-len and several --clients")
        trace, block_tokens = read_trace(
            arguments.trace,
            max_requests=arguments.num_prompts,
            time_scale=arguments.time_scale,
            length_scale=arguments.length_scale,
        )
        bound = clients[0] if clients else None
        name = arguments.trace.name
        return [TraceWorkload(name, trace, block_tokens, bound, arguments.request_rate, arguments.seed)]
    if arguments.time_scale != 1 or arguments.length_scale != 1:
        raise ValueError("--time-scale and --length-scale scale a --trace")
    return [
        SyntheticWorkload(
            num_clients,
            context,
            output_len,
            arguments.num_prompts or num_clients,
            arguments.request_rate or float("inf"),
            arguments.seed,
        )
        for num_clients in clients or (4,)
        for context in arguments.context or (1024,)
        for output_len in arguments.output_len or (64,)
    ]


def _serve_flags(arguments: argparse.Namespace, workloads: Sequence[Workload]) -> list[str]:
    """Flags of `serve` that all arms share; those of the user come last and win."""
    flags = ["--model", arguments.model, "--device", arguments.device]
    if arguments.dtype is not None:
        flags += ["--dtype", arguments.dtype]
    if arguments.keep_quantized is not None:
        flags.append("--keep-quantized" if arguments.keep_quantized else "--no-keep-quantized")
    bounds = [workload.clients for workload in workloads if workload.clients is not None]
    if bounds:
        flags += ["--parallel", str(max(bounds))]
    # Room for what is asked and no more: KV pools are allocated whole.
    flags += ["--max-context", str(max(2, *(workload.max_tokens for workload in workloads)))]
    return [*flags, *arguments.serve_arguments]


def _command() -> str:
    words = list(sys.argv[1:])
    if "--api-key" in words:
        words[words.index("--api-key") + 1] = "..."
    return shlex.join(
        ["mlxcel-paged", *(word if not word.startswith("--api-key=") else "--api-key=..." for word in words)]
    )


def _rate(text: str) -> float:
    return float("inf") if text == "inf" else _positive(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number: {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite: {text}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"not an integer from 0 to {(1 << 31) - 1}: {text!r}")
    return int(text)


def _bound(text: str) -> tuple[str, float]:
    from mlxcel_paged.bench.serve.metrics import GOODPUT_METRICS

    name, separator, bound = text.partition(":")
    if not separator or name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"not NAME:MS with a name out of {', '.join(GOODPUT_METRICS)}: {text!r}")
    return name, _positive(bound)
