"""`generate` on the embedded model: one batch, the text, and the path that ran."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.model


def _run(*words: str, stdin: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxcel_paged", *words]
    finished = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert finished.returncode == status, finished.stderr
    return finished


def _document(*words: str) -> Any:
    return json.loads(_run(*words, "--json").stdout)


def test_several_prompts_run_as_one_fused_batch() -> None:
    document = _document(
        *("generate", "--prompt", "What is the capital of France?", "--prompt", "Name a primary color."),
        *("--max-tokens", "12"),
    )
    assert [completion["index"] for completion in document["completions"]] == [0, 1]
    assert "Paris" in document["completions"][0]["text"]
    assert document["storage"] == "paged"
    assert set(document["decode_launches"]) == {"fused"}
    assert document["num_tokens"] == sum(completion["num_tokens"] for completion in document["completions"])


def test_stdin_streams_to_stdout_and_ends_with_rate_and_path() -> None:
    finished = _run("generate", "--max-tokens", "8", stdin="What is the capital of France?")
    assert "Paris" in finished.stdout
    assert "tokens/s" in finished.stderr.splitlines()[-1]
    assert "fused" in finished.stderr.splitlines()[-1]


def test_empty_prompt_is_a_clear_error() -> None:
    finished = _run("generate", "--raw", stdin="", status=2)
    assert finished.stdout == ""
    assert "prompt" in finished.stderr.splitlines()[-1]


def test_missing_model_says_what_to_do() -> None:
    finished = _run("generate", "--model", "./no-such-model", "--prompt", "x", status=2)
    assert finished.stdout == ""
    assert "no-such-model" in finished.stderr.splitlines()[-1]
    assert "hint" in finished.stderr.splitlines()[-1]


def test_doctor_says_which_path_and_why() -> None:
    document = _document("doctor")
    assert document["problems"] == []
    assert document["model"]["storage"] == "paged"
    assert document["model"]["storage_reason"]
    assert document["model"]["decode_path"] == ["fused"]
    assert document["backend"]["blas"]
    assert document["simd"]
