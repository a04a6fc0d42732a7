"""The graph counter sees what a statically linked CUDA runtime calls, and nothing else.

A fake driver stands for libcuda: it is reached as the runtime reaches the real one, by dlsym and cuGetProcAddress.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and dlvsym are glibc's")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph_counter")
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed to build the project"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(HERE / "fake_driver.c")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def run_client(folder: Path, *, preloaded: bool) -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import graph_counter
    finally:
        sys.path.remove(str(BENCHMARKS))
    environment = dict(os.environ)
    if preloaded:
        environment = graph_counter.preload(graph_counter.build(folder))
    command = [sys.executable, str(HERE / "counted_client.py"), str(BENCHMARKS), str(folder / "libcuda.so.1")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_every_call_is_counted_once_and_passed_on(folder: Path) -> None:
    results = run_client(folder, preloaded=True)
    assert results["counted"] == {
        "graph_instantiations": 1,
        "graph_updates": 2,
        "graph_updates_failed": 1,
        "graph_launches": 3,
        "managed_allocs": 1,
        "managed_alloc_bytes": 4096,
        "htod_copies": 2,
        "htod_bytes": 128,
        "undirected_copies": 1,
        "undirected_bytes": 7,
    }
    passed_on = {key: results[key] for key in ("instantiate", "update", "launch", "allocate", "version")}
    assert passed_on == {
        "instantiate": [0, 42],
        "update": [0, 910],
        "launch": [0, 1, 0],
        "allocate": [0, 4097],
        "version": [0, 13000],
    }
    assert results["wrapped"] == 7  # two addresses of cuGraphLaunch; cuDriverGetVersion is left alone


def test_graph_launches_are_timed_by_events(folder: Path) -> None:
    assert run_client(folder, preloaded=True)["device_ms"] == 6.0


def test_nothing_is_counted_without_the_library(folder: Path) -> None:
    results = run_client(folder, preloaded=False)
    assert results["counted"] is None
    assert results["launch"] == [0, 1, 0]
