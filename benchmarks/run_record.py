"""What the JSON of every run begins with, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "mlx",
    "mlx-cuda-13",
    "mlx-lm",
    "mlxcel-paged",
    "nvidia-cuda-nvrtc",
    "torch",
    "flashinfer-python",
)


def write_run(out: Path, document: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    """Writes `document` behind what every run begins with, and returns all of it. Makes the folder.

    Args:
        complete: The run has ended and did all that it was asked for. What failed in it is said by its results.
    """
    whole = {**run_header(), "complete": complete, **document}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def run_header() -> dict[str, Any]:
    """Date, command, machine and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device_name(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": packages(),
    }


@cache
def device_name() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm", "--format=csv,noheader"]
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return platform.processor() or platform.machine()


@cache
def packages() -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
