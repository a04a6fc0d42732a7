"""How much memory there is to plan with, in bytes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Bytes that this process may still take without swapping, within its container's limit."""
    available = _meminfo_available() if sys.platform == "linux" else _physical_bytes()
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def available_device_bytes(mx: Any) -> int:
    """Bytes left on MLX's GPU, or in the memory that it shares with the host.

    Args:
        mx: the module `mlx.core`; this runs on the thread that owns it.
    """
    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory") or info["memory_size"]
    left = int(total) - int(mx.get_active_memory())
    free = info.get("free_memory")
    return max(0, left if free is None else min(left, int(free)))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _physical_bytes()


def _cgroup_available() -> int | None:
    """What a version 2 control group leaves; page cache that it can drop counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
