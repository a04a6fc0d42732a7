"""A wrong value is refused in terms of the flag that was typed; users of the Python API see the field."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxcel_paged import env
from mlxcel_paged.cli import options
from mlxcel_paged.cli.main import EXIT_USAGE, build_parser, main
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.queue_limits import QueueLimits
from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.request import ContextLengthExceededError, SamplingParams
from mlxcel_paged.server.config import ServerConfig

# A wrong value of every flag that takes one, and what the refusal says of those that are allowed.
WRONG = {
    "--alternations": ("0", "between 1 and"),
    "--api-key": ("a b", "1 to 512 visible"),
    "--arms": ("sparse", "dense|ours"),
    "--backend": ("tpu", "choose from"),
    "--batch": ("0", "between 1 and"),
    "--clients": ("0", "between 1 and"),
    "--context": ("0", "between 1 and"),
    "--cors-origin": ("example.org", "https://example.org"),
    "--decode-storage": ("sparse", "choose from"),
    "--device": ("tpu", "choose from"),
    "--dtype": ("int8", "choose from"),
    "--goodput": ("speed:1", "ttft"),
    "--head-dim": ("0", "between 1 and"),
    "--heads": ("8/3", "multiple"),
    "--host": ("", "127.0.0.1"),
    "--kv-cache-budget": ("1GB", "GiB"),
    "--length-scale": ("0", "positive"),
    "--max-context": ("1", "between 2 and"),
    "--max-num-batched-tokens": ("4", "between 5 and .* with --parallel 4"),
    "--max-queued-requests": ("0", "between 1 and"),
    "--max-queued-tokens": ("0", "between 1 and"),
    "--max-tokens": ("0", "between 1 and"),
    "--min-p": ("1.5", "between 0 and 1"),
    "--model": ("", "embedded"),
    "--num-prompts": ("0", "between 1 and"),
    "--num-warmups": ("-1", "from 0 to"),
    "--output-dir": ("/dev/null/here", "cannot be made"),
    "--output-len": ("0", "between 1 and"),
    "--page-size": ("24", "choose from"),
    "--parallel": ("0", "between 1 and"),
    "--port": ("70000", "between 0 and 65535"),
    "--prefill-chunk": ("0", "between 1 and"),
    "--prompt": ("", "empty"),
    "--request-rate": ("0", "positive"),
    "--rounds": ("0", "between 1 and"),
    "--rows": ("0", "between 1 and"),
    "--seed": ("99999999999999999999", "64-bit|from 0 to"),
    "--served-model-name": ("", "one character or more"),
    "--shutdown-timeout": ("0", "between 1 and"),
    "--start-timeout": ("0", "positive"),
    "--step-timeout": ("-1", "between 0 and"),
    "--steps": ("0", "between 1 and"),
    "--temperature": ("-1", "at least 0"),
    "--time-scale": ("0", "positive"),
    "--tokens": ("0", "between 1 and"),
    "--top-k": ("-1", "at least 0"),
    "--top-p": ("1.5", "between 0 and 1"),
    "--vocab-size": ("0", "between 1 and"),
    "--warmup-tokens": ("0", "between 1 and"),
}
# What no value is wrong for, or what others refuse.
ELSEWHERE = {
    ("bench serve", "--api-key"): "the server that is measured says whether it fits",
    ("bench serve", "--base-url"): "the connection says what is wrong",
    ("bench serve", "--model"): "the servers that are started refuse it",
    ("bench serve", "--trace"): "a file, whose path the refusal names",
    ("generate", "--system"): "any text will do",
}


def leaves(parser: argparse.ArgumentParser, *words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every subcommand that runs something, with the words that lead to it."""
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not choices:
        yield " ".join(words), parser
    for name, command in (item for group in choices for item in group.items()):
        yield from leaves(command, *words, name)


def flags_with_values() -> list[tuple[str, str]]:
    found = [
        (command, action.option_strings[0])
        for command, parser in leaves(build_parser())
        for action in parser._actions
        if action.option_strings and action.nargs != 0
    ]
    assert len(found) > 80
    return [case for case in found if case not in ELSEWHERE]


@pytest.mark.parametrize(("command", "flag"), flags_with_values())
def test_a_wrong_value_is_refused_by_the_name_of_its_flag(
    command: str, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert flag in WRONG, "a new flag: say above what it refuses"
    value, allowed = WRONG[flag]
    error = refusal([*command.split(), flag, value], capfd)
    assert flag in error
    assert flag == "--api-key" or value in error
    field = flag.removeprefix("--").replace("-", "_")
    assert "_" not in field or field not in error
    assert re.search(allowed, error)


def refusal(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The line that says why a command line is refused."""
    try:
        status: int | str | None = main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == EXIT_USAGE
    lines = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["serve", "--no-batch", "--decode-storage", "paged"],
            "--decode-storage must be auto or dense with --no-batch, got 'paged'",
        ),
        (
            ["doctor", "--no-batch", "--max-num-batched-tokens", "1"],
            "--max-num-batched-tokens must be between 2 and 1048576 with --no-batch, got 1",
        ),
        (["bench", "decode", "--batch", "1025"], "--batch must be between 1 and 1024, got 1025"),
        (["serve", "--para", "0"], "--parallel must be between 1 and 1024, got 0"),
    ],
)
def test_refusals_in_full(words: list[str], wanted: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert refusal(words, capfd) == f"mlxcel-paged: error: {wanted}"


def test_a_key_of_the_environment_is_sought_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.API_KEY, "se cret")
    error = refusal(["serve"], capfd)
    assert env.API_KEY in error
    assert "--api-key" not in error
    assert "se cret" not in error


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["--max-context", "16777216"], "at most 8192"),
        (["--kv-cache-budget", "9TiB"], "at most .* memory that is left .* got 9.0 TiB"),
        (["--kv-cache-budget", "9"], "smallest usable budget"),
    ],
)
def test_what_the_model_refuses_is_named_too(words: list[str], allowed: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = refusal(["generate", "--prompt", "x", *words], capfd)
    assert re.search(f"{words[0]}.* {allowed}", error)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: EngineConfig(parallel=0), "parallel"),
        (lambda: EngineConfig(max_num_batched_tokens=4), "max_num_batched_tokens"),
        (lambda: EngineConfig(arm="fused", decode_storage="dense"), "arm"),
        (lambda: ServerConfig(shutdown_timeout_s=0), "shutdown_timeout_s"),
        (lambda: ServerConfig(api_keys=("",)), "api_keys"),
        (lambda: QueueLimits(0), "max_queued_requests"),
        (lambda: QueueLimits(1, 0), "max_queued_tokens"),
        (lambda: SamplingParams(top_p=2.0), "top_p"),
    ],
)
def test_users_of_the_api_see_the_field(make: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidFieldError, match=rf"^{field} must be ") as caught:
        make()
    assert caught.value.field == field
    assert not re.search("--[a-z]", str(caught.value))


def test_a_message_without_a_field_stays_as_it_is() -> None:
    error = ContextLengthExceededError(9, 8, "the context of 8 tokens")
    assert options.message(error, {"prompt": "--prompt"}) == str(error)
    assert options.message(RuntimeError("no --flag"), {"flag": "--other"}) == "no --flag"
