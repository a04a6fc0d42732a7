"""The decode benchmark runs every arm on its own path and fails when one did not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.model

_COMMAND = [sys.executable, "-m", "mlxcel_paged", "bench", "decode", "--json", "--batch", "2", "--context", "48"]


def test_arms_run_on_their_own_path_and_agree() -> None:
    finished = subprocess.run([*_COMMAND, "--steps", "3"], capture_output=True, text=True, check=True)
    arms = {row["arm"]: row for row in json.loads(finished.stdout)["arms"]}
    assert list(arms) == ["dense", "gather", "fused"]
    assert set(arms["fused"]["outcomes"]) == {"fused"}
    assert all(outcome.startswith("gather:") for outcome in arms["gather"]["outcomes"])
    assert all(row["tokens_equal_first_arm"] for row in arms.values())


def test_arm_on_another_path_fails_the_run() -> None:
    environment = {**os.environ, "MLXCEL_PAGED_ATTENTION_NATIVE": "0"}
    finished = subprocess.run(
        [*_COMMAND, "--steps", "1", "--arms", "fused"], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1
    (row,) = json.loads(finished.stdout)["arms"]
    assert set(row["outcomes"]) == {"gather:kill_switch"}
    assert not row["on_own_path"]
