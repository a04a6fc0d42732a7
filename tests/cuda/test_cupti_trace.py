"""The trace reads CUPTI's records where they are, and says so when CUPTI cannot be used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUPTI is looked for on Linux")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

from cupti_trace import KERNEL, MEMCPY, MIGRATION, CuptiTrace, CuptiUnavailableError, Record, kernel_summary  # noqa: E402

GRAPH_TRACE = 51


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed to build the project"
    path = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", str(HERE / "fake_cupti.c"), "-o", str(path)], check=True)
    return str(path)


def test_every_kind_of_record_is_read(fake: str, tmp_path: Path) -> None:
    trace = CuptiTrace(tmp_path, ["libcupti.so.missing", fake])
    assert list(trace.records()) == []
    trace.count_migrations()
    trace.enable(MEMCPY)
    trace.enable(KERNEL)
    copy, kernel = Record(MEMCPY, 2, 4096, 100, None), Record(KERNEL, 0, 250, 1000, "_Z6decodev")
    migration = Record(MIGRATION, 1, 65536, 200, None)
    assert list(trace.records()) == [copy, kernel, migration]
    trace.enable(KERNEL, False)
    trace.clear()
    assert list(trace.records()) == [copy, migration]
    assert trace.now_ns() == 777


def test_a_refusal_is_an_error_with_its_status(fake: str, tmp_path: Path) -> None:
    trace = CuptiTrace(tmp_path, [fake])
    with pytest.raises(CuptiUnavailableError, match="kind 51: status 2"):
        trace.enable(GRAPH_TRACE)


def test_no_cupti_is_an_error_that_names_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(CuptiUnavailableError, match=r"libcupti\.so\.missing"):
        CuptiTrace(tmp_path, ["libcupti.so.missing"])


def test_kernels_are_summed_by_name() -> None:
    records = [Record(KERNEL, 0, 1000 * us, 0, name) for us, name in ((30, "gemm"), (40, "decode"), (50, "decode"))]
    assert kernel_summary([*records, Record(MEMCPY, 1, 8, 0, None)], num_steps=2) == {
        "kernels_per_step": 1.5,
        "kernel_ms_per_step": 0.06,
        "longest": [{"name": "decode", "us": 45.0, "launches": 1.0}, {"name": "gemm", "us": 15.0, "launches": 0.5}],
    }
