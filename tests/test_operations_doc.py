"""docs/CONTINUOUS_BATCHING.md and docs/bench_serve.md against the code that they describe."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from mlxcel_paged import config
from mlxcel_paged.attention import dispatch
from mlxcel_paged.attention import outcomes as outcomes_module
from mlxcel_paged.cli import bench, doctor, serve
from mlxcel_paged.engine.stats import EngineState
from mlxcel_paged.server.metrics import Metrics
from server.scripted_engine import ScriptedEngine

_DOCS = Path(__file__).parent.parent / "docs"
OPERATIONS = (_DOCS / "CONTINUOUS_BATCHING.md").read_text()
BENCH_SERVE = (_DOCS / "bench_serve.md").read_text()


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(exit_on_error=False)
    commands = root.add_subparsers(required=True)
    for name, module in (("serve", serve), ("bench", bench), ("doctor", doctor)):
        module.add_arguments(commands.add_parser(name))
    return root


def commands() -> list[str]:
    """Indented command lines of both pages, continued lines joined, environment settings left out."""
    text = (OPERATIONS + BENCH_SERVE).replace("\\\n", " ")
    return re.findall(r"^ +(?:[A-Z_]+=\S+ )?mlxcel-paged (.+)$", text, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str) -> None:
    parser().parse_args(shlex.split(command))


def test_there_are_commands() -> None:
    assert len(commands()) >= 5


def test_every_flag_is_known() -> None:
    subparsers = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    known: set[str] = set()
    while subparsers:
        for sub in set(subparsers.pop().choices.values()):
            known |= {flag for action in sub._actions for flag in action.option_strings}
            subparsers += [action for action in sub._actions if isinstance(action, argparse._SubParsersAction)]
    assert set(re.findall(r"--[a-z][a-z-]+", OPERATIONS + BENCH_SERVE)) <= known


def test_defaults_are_those_of_serve() -> None:
    arguments = parser().parse_args(["serve"])
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+) \|", OPERATIONS, re.MULTILINE))
    assert arguments.prefill_chunk is None
    chunks = f"{config.CPU_PREFILL_CHUNK} on the CPU, {config.GPU_PREFILL_CHUNK} on a GPU"
    assert rows["--prefill-chunk"] == chunks
    for flag in ("--parallel", "--max-queued-requests"):
        assert rows[flag] == str(getattr(arguments, flag.removeprefix("--").replace("-", "_"))), flag
    assert rows["--step-timeout"] == f"{arguments.step_timeout_s:g} s"
    assert rows["--max-queued-tokens"] == "none"
    assert arguments.max_queued_tokens is None
    assert rows["--max-num-batched-tokens"] == f"{config.CPU_BATCHED_PROMPT_TOKENS} + `--parallel` on the CPU"
    assert f"(default {config.DEFAULT_PAGE_SIZE})" in OPERATIONS


def test_every_metric_is_explained() -> None:
    engine = ScriptedEngine(state=EngineState.LOADING)
    names = re.findall(r"^# TYPE mlxcel_paged_(\w+) ", Metrics(engine).exposition().decode(), re.MULTILINE)
    engine.stop()
    assert len(names) > 20
    explained = set(re.findall(r"`(\w+)`", OPERATIONS.split("## What the numbers mean")[1]))
    assert {name for name in names if not name.endswith("_created")} <= explained


def test_every_outcome_is_explained() -> None:
    outcomes = {path.outcome for path in vars(dispatch).values() if isinstance(path, dispatch.Path)}
    outcomes |= {value for name, value in vars(outcomes_module).items() if name.isupper()}
    assert outcomes <= set(re.findall(r"`([\w:]+)`", OPERATIONS))
    assert len(outcomes) >= 7
