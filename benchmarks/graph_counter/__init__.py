"""Counts CUDA graph instantiations, graph launches, managed allocations and copies of a process (LD_PRELOAD).

    library = build(folder)                       # cc, once
    subprocess.run(..., env=preload(library))     # the process to count
    counters = Counters.loaded()                  # inside it; None where the library is not preloaded

`graph_counter.c` says how it finds the calls of a runtime that is linked statically.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("graph_counter.c")
_VARIABLE = "LD_PRELOAD"
_NAME = "libgraph_counter.so"


def build(folder: Path) -> Path:
    """Compiles the library into `folder`.

    Raises:
        FileNotFoundError: there is no C compiler.
        subprocess.CalledProcessError: it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler: install cc")
    library = folder / _NAME
    command = [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def preload(library: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns `environment` (default: this process's) with the library preloaded."""
    result = dict(os.environ if environment is None else environment)
    result[_VARIABLE] = ":".join(filter(None, [str(library), result.get(_VARIABLE, "")]))
    return result


class Counters:
    """The counters of this process, which has the library preloaded."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.graph_counter_name.restype = ctypes.c_char_p
        library.graph_counter_value.restype = ctypes.c_uint64
        library.graph_counter_device_ms.restype = ctypes.c_double
        self._names = [library.graph_counter_name(index).decode() for index in range(library.graph_counter_num())]

    @classmethod
    def loaded(cls) -> Counters | None:
        """Returns the counters if the library is preloaded here."""
        if _NAME not in os.environ.get(_VARIABLE, ""):
            return None
        return cls(ctypes.CDLL(None))

    def snapshot(self) -> dict[str, int]:
        """Calls, failures and bytes so far, by counter."""
        return {name: int(self._library.graph_counter_value(index)) for index, name in enumerate(self._names)}

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """What was counted since the snapshot `before`; counters that stood still are left out."""
        now = self.snapshot()
        return {name: now[name] - before[name] for name in now if now[name] != before[name]}

    def profile(self, on: bool) -> None:
        """Places every graph launch from here on between two events, or ends that."""
        self._library.graph_counter_profile(int(on))

    def device_ms(self) -> float | None:
        """Waits for the launches since profiling began and returns their time on the device, in milliseconds.

        A graph that is launched on an idle stream counts from the call on, so a host-bound step reads somewhat long.
        None if the driver gives no times.
        """
        total = float(self._library.graph_counter_device_ms())
        return None if total < 0 else total
