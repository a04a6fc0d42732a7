"""Flags become a configuration, or one line that names the flag."""

from __future__ import annotations

import argparse

import pytest

from mlxcel_paged.cli import options
from mlxcel_paged.cli.main import EXIT_USAGE, main
from mlxcel_paged.config import EngineConfig


def _parse(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    options.add_engine_flags(parser)
    return options.engine_config(parser.parse_args(words))


def test_no_flags_are_the_documented_defaults() -> None:
    assert _parse() == EngineConfig()


def test_every_flag_reaches_its_field() -> None:
    config = _parse(
        *("--model", "some/dir", "--device", "cpu", "--dtype", "float16", "--keep-quantized"),
        *("--decode-storage", "paged", "--parallel", "7", "--page-size", "64", "--kv-cache-budget", "1.5GiB"),
        *("--max-context", "4096", "--prefill-chunk", "128"),
    )
    assert config == EngineConfig(
        model="some/dir",
        device="cpu",
        dtype="float16",
        keep_quantized=True,
        decode_storage="paged",
        parallel=7,
        page_size=64,
        kv_cache_budget=3 << 29,
        max_context=4096,
        prefill_chunk=128,
    )


def test_budget_auto_is_derived() -> None:
    assert _parse("--kv-cache-budget", "auto").kv_cache_budget is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--kv-cache-budget", "1GB"], "--kv-cache-budget"),
        (["--page-size", "24"], "--page-size"),
        (["--parallel", "four"], "--parallel"),
        (["--decode-storage", "sparse"], "--decode-storage"),
    ],
)
def test_flag_that_cannot_be_parsed_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", *words])
    assert exit_info.value.code == EXIT_USAGE
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--parallel", "0"], "--parallel"),
        (["serve", "--max-context", "1"], "--max-context"),
        (["serve", "--no-batch", "--decode-storage", "paged"], "--no-batch"),
        (["generate", "--prompt", "x", "--raw", "--system", "y"], "--system"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "--temperature"),
    ],
)
def test_value_out_of_range_is_one_line(words: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words) == EXIT_USAGE
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert named in lines[0]


def test_comma_list_refuses_repetition_and_strangers() -> None:
    parse = options.comma_list(("dense", "gather", "fused"))
    assert parse("fused, dense") == ("fused", "dense")
    for text in ("", "fused,fused", "fused,other"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
