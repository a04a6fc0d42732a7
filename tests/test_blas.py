"""BLAS preparation, each case in a process of its own: what a library is bound to cannot be undone."""

import json
import os
import subprocess
import sys

import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have an optimised BLAS")

PRODUCT = """
import mlx.core as mx, time
mx.set_default_device(mx.cpu)
a, b = mx.random.normal((768, 768)), mx.random.normal((768, 768))
mx.eval(a, b)
seconds = 1e9
for _ in range(5):
    start = time.perf_counter()
    mx.eval(a @ b)
    seconds = min(seconds, time.perf_counter() - start)
report["gflops"] = 2 * 768**3 / seconds / 1e9
exact = mx.ones((96, 64)) @ mx.ones((64, 80))
report["is_exact"] = bool(mx.all(exact == 64).item())
complex_product = mx.full((2, 2), 1j, dtype=mx.complex64) @ mx.full((2, 2), 2 + 1j, dtype=mx.complex64)
report["complex"] = str(complex_product[0, 0].item())
transposed = mx.arange(6, dtype=mx.float32).reshape(2, 3).T @ mx.arange(8, dtype=mx.float32).reshape(2, 4)
report["transposed"] = transposed.tolist()
"""


def run(code: str, **env: str) -> dict[str, object]:
    program = "import dataclasses, json\nreport = {}\n" + code + "\nprint(json.dumps(report))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return {**report, "stderr": result.stderr}


def check_products(report: dict[str, object]) -> None:
    assert report["is_exact"]
    assert report["complex"] == "(-2+4j)"
    assert report["transposed"] == [[12.0, 15.0, 18.0, 21.0], [16.0, 21.0, 26.0, 31.0], [20.0, 27.0, 34.0, 41.0]]


@linux
def test_prepared_before_mlx_products_go_to_openblas() -> None:
    report = run(
        "from mlxcel_paged import blas\n"
        "report['first'] = dataclasses.asdict(blas.prepare())\n"
        "report['again'] = dataclasses.asdict(blas.prepare())\n"
        "report['before'] = dataclasses.asdict(blas.status())\n"
        + PRODUCT
        + "report['after'] = dataclasses.asdict(blas.status())\n"
    )
    check_products(report)
    first, after = report["first"], report["after"]
    assert isinstance(first, dict)
    assert isinstance(after, dict)
    assert first["library"] == "scipy-openblas32"
    assert first["is_optimized"]
    assert "OpenBLAS" in str(first["config"])
    assert report["again"] == first == report["before"]
    assert first["is_verified"] is None
    assert after["is_verified"] is True
    assert report["stderr"] == ""


@linux
def test_prepared_products_are_many_times_faster() -> None:
    slow = run(PRODUCT)
    fast = run("from mlxcel_paged import blas\nblas.prepare()\n" + PRODUCT)
    assert float(str(fast["gflops"])) > 3 * float(str(slow["gflops"]))


@linux
def test_without_prepare_nothing_changes() -> None:
    report = run(
        "from mlxcel_paged import _core, blas\n"
        + PRODUCT
        + "report['num_calls'] = _core.blas_num_calls()\n"
        + "report['status'] = dataclasses.asdict(blas.status())\n"
        + "report['global'] = _core.global_blas_path()\n"
    )
    check_products(report)
    assert report["num_calls"] == 0
    assert report["global"] is None
    status = report["status"]
    assert isinstance(status, dict)
    assert status["library"] == "mlx"
    assert not status["is_optimized"]
    assert status["is_verified"] is True
    assert "prepare()" in status["hint"]


@linux
def test_too_late_is_told_once_and_harmless() -> None:
    report = run(
        "import logging; logging.basicConfig(format='%(message)s')\n"
        + PRODUCT
        + "from mlxcel_paged import blas\n"
        + "for _ in range(3): report['status'] = dataclasses.asdict(blas.prepare())\n"
    )
    check_products(report)
    status = report["status"]
    assert isinstance(status, dict)
    assert not status["is_optimized"]
    assert str(report["stderr"]).count("before its BLAS could be replaced") == 1
    assert "before importing mlx" in status["hint"]


@linux
def test_no_blas_is_told_with_the_cure() -> None:
    report = run(
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "from mlxcel_paged import blas\n"
        "blas._scipy_openblas_path = lambda: None\n"
        "blas.SYSTEM_LIBRARY = 'libno-such-blas.so.0'\n"
        "for _ in range(3): report['status'] = dataclasses.asdict(blas.prepare())\n" + PRODUCT
    )
    check_products(report)
    status = report["status"]
    assert isinstance(status, dict)
    assert not status["is_optimized"]
    assert status["hint"].startswith("pip install scipy-openblas32")
    assert str(report["stderr"]).count("no optimised BLAS was found") == 1


@linux
def test_a_broken_library_is_told_and_passed_over(tmp_path: object) -> None:
    report = run(
        "import logging, pathlib; logging.basicConfig(format='%(message)s')\n"
        f"broken = pathlib.Path({str(tmp_path)!r}) / 'libscipy_openblas.so'\n"
        "broken.write_bytes(b'not a library')\n"
        "from mlxcel_paged import blas\n"
        "blas._scipy_openblas_path = lambda: broken\n"
        "blas.SYSTEM_LIBRARY = 'libno-such-blas.so.0'\n"
        "blas.prepare()\n" + PRODUCT
    )
    check_products(report)
    assert "cannot be used" in str(report["stderr"])


@linux
def test_install_blas_refuses_libraries_without_the_functions() -> None:
    from mlxcel_paged import _core

    for path, message in [("/no/such/library.so", "no such|cannot open"), ("libm.so.6", "has no scipy_cblas_sgemm")]:
        with pytest.raises(_core.InvalidArgumentError, match=message) as caught:
            _core.install_blas(path)
        assert caught.value.argument == "path"
    with pytest.raises(_core.InvalidArgumentError, match="null byte"):
        _core.install_blas("a\0b")


@linux
def test_numpy_keeps_its_own() -> None:
    report = run(
        "import numpy as np\n"
        "from mlxcel_paged import _core, blas\n"
        "blas.prepare()\n"
        "calls = _core.blas_num_calls()\n"
        "a = np.arange(90000, dtype=np.float32).reshape(300, 300) % 7\n"
        "report['is_right'] = bool((a @ np.ones((300, 300), np.float32) == a.sum(1, keepdims=True)).all())\n"
        "report['num_calls'] = _core.blas_num_calls() - calls\n" + PRODUCT
    )
    check_products(report)
    assert report["is_right"]
    assert report["num_calls"] == 0


@linux
def test_a_process_that_loads_modules_globally_still_multiplies() -> None:
    report = run(
        "import os, sys; sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)\nfrom mlxcel_paged import _core\n" + PRODUCT
    )
    check_products(report)


def test_importing_the_module_does_not_import_mlx() -> None:
    report = run("import sys\nfrom mlxcel_paged import blas\nreport['is_loaded'] = 'mlx.core' in sys.modules\n")
    assert not report["is_loaded"]


def test_macs_use_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxcel_paged import blas

    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas._inspect() == blas.BlasStatus("accelerate", None, is_optimized=True)
