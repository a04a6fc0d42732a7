"""What a measured number has to carry with it: date, machine and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

from mlxcel_paged import _core

_PACKAGES = ("mlxcel-paged", "mlx", "mlx-lm", "numpy")


def environment() -> dict[str, Any]:
    """Describes this run: UTC date, processor, cores, SIMD level and package versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "simd": _core.simd_level(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
