"""Managed-memory migrations, copies and kernels of this process, from CUPTI's activity records.

MLX keeps arrays that come from or go to the host in managed memory, so an upload is no copy call: pages migrate when a
kernel first reads them. Only CUPTI sees that. CUPTI comes with CUDA's toolkit and with the packages that torch needs.
"""

from __future__ import annotations

import ctypes
import glob
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("cupti_trace.c")
MEMCPY, KERNEL, MIGRATION = 1, 10, 25
# CUpti_ActivityUnifiedMemoryCounterKind and CUpti_ActivityMemcpyKind
MIGRATION_DETAILS = {1: "htod_bytes", 2: "dtoh_bytes", 3: "cpu_page_faults", 4: "gpu_page_fault_groups"}
COPY_DETAILS = {1: "htod", 2: "dtoh", 8: "dtod"}


class CuptiUnavailableError(RuntimeError):
    """CUPTI is not there or refuses."""


@dataclass(frozen=True, slots=True)
class Record:
    """One activity: a copy's or counter's `detail` and bytes or count, or a kernel's nanoseconds and mangled name."""

    kind: int
    detail: int
    value: int
    start_ns: int
    name: str | None


class _Raw(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("detail", ctypes.c_uint32),
        ("value", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    )


def find_cupti() -> list[str]:
    """Where CUPTI may be, most likely first: that of CUDA 13, as MLX is built for, before any other."""
    packages = sysconfig.get_paths()["purelib"]
    patterns = (f"{packages}/nvidia/*/lib/libcupti.so.*", "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.*")
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern), reverse=True)]
    found += ["libcupti.so.13", "libcupti.so.12"]
    return sorted(found, key=lambda path: not path.endswith(".so.13"))


def kernel_summary(records: Iterable[Record], num_steps: int) -> dict[str, Any]:
    """Kernels and kernel time a step, and the kernels that take most of it."""
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for record in records:
        if record.kind == KERNEL:
            name = (record.name or "?")[:120]
            times[name] += record.value
            launches[name] += 1
    return {
        "kernels_per_step": round(launches.total() / num_steps, 1),
        "kernel_ms_per_step": round(times.total() / num_steps / 1e6, 3),
        "longest": [
            {"name": name, "us": round(ns / num_steps / 1e3, 1), "launches": round(launches[name] / num_steps, 1)}
            for name, ns in times.most_common(15)
        ],
    }


class CuptiTrace:
    """CUPTI in this process. Make it before the first CUDA context.

    Args:
        folder: Where the library is built.
        candidates: Paths or names of CUPTI, tried in order.

    Raises:
        CuptiUnavailableError: no candidate can be used, or there is no C compiler.
    """

    def __init__(self, folder: Path, candidates: list[str] | None = None) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise CuptiUnavailableError("no C compiler: install cc")
        path = folder / "libcupti_trace.so"
        command = [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", str(SOURCE), "-o", str(path)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True)
        self._library = library = ctypes.CDLL(str(path))
        library.cupti_trace_now.restype = library.cupti_trace_lost.restype = ctypes.c_uint64
        library.cupti_trace_num.restype = ctypes.c_size_t
        library.cupti_trace_records.restype = ctypes.POINTER(_Raw)
        tried = candidates if candidates is not None else find_cupti()
        for candidate in tried:
            if library.cupti_trace_load(candidate.encode()) == 0:
                self.path = candidate
                break
        else:
            raise CuptiUnavailableError(f"no usable CUPTI among {', '.join(tried)}")

    def count_migrations(self) -> None:
        """Begins records of managed-memory migrations and faults.

        Raises:
            CuptiUnavailableError: the device does not report them.
        """
        self._check(self._library.cupti_trace_count_migrations(), "unified memory counters")

    def enable(self, kind: int, on: bool = True) -> None:
        """Begins or ends records of `MEMCPY` or `KERNEL`."""
        self._check(self._library.cupti_trace_enable(kind, int(on)), f"activity kind {kind}")

    def clear(self) -> None:
        """Forgets the records so far."""
        self._check(self._library.cupti_trace_flush(), "flush")
        self._library.cupti_trace_clear()

    def now_ns(self) -> int:
        """The clock of `Record.start_ns`."""
        return int(self._library.cupti_trace_now())

    def records(self) -> Iterator[Record]:
        """The records since `clear`; call it when the device is idle.

        Raises:
            CuptiUnavailableError: records were lost.
        """
        self._check(self._library.cupti_trace_flush(), "flush")
        if lost := self._library.cupti_trace_lost():
            raise CuptiUnavailableError(f"{lost} records were lost: no memory")
        raw = self._library.cupti_trace_records()
        for index in range(self._library.cupti_trace_num()):
            record = raw[index]
            name = record.name.decode(errors="replace") if record.name else None
            yield Record(record.kind, record.detail, record.value, record.start, name)

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status != 0:
            raise CuptiUnavailableError(f"CUPTI refuses {what}: status {status}")
