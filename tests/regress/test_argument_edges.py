"""Arguments at the edge of what is allowed: each was once accepted, crashed, or raised an error that was not ours."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged import InvalidArgumentError, _core, paged_decode, plan_from_csr
from mlxcel_paged.cli.main import EXIT_USAGE, main

CSR: dict[str, Any] = {"indptr": [0, 2, 3], "indices": [4, 0, 2], "last_page_len": [3, 15]}
GEOMETRY: dict[str, Any] = {"num_pages": 5, "page_size": 16, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def _normal(*shape: int) -> mx.array:
    array = mx.random.normal(shape, key=mx.random.key(sum(shape)))
    mx.eval(array)
    return array


@pytest.mark.parametrize("name", ["same", "shifted"])
def test_write_to_pools_that_share_elements_is_refused(name: str) -> None:
    memory = np.zeros((6, 16, 2, 64), np.float32)
    k_pages, v_pages = (memory[:5], memory[:5]) if name == "same" else (memory[:5], memory[1:])
    plan = _core.DecodePlan.from_csr(**CSR, **GEOMETRY)
    new = np.ones((2, 2, 64), np.float32)
    with pytest.raises(InvalidArgumentError, match="v_pages"):
        _core.cpu_write_decode(plan, new, 2 * new, k_pages, v_pages, layout="NHD")
    assert not memory.any()


def test_write_to_pools_interleaved_in_one_buffer_is_served() -> None:
    memory = np.zeros((5, 2, 16, 2, 64), np.float32)
    plan = _core.DecodePlan.from_csr(**CSR, **GEOMETRY)
    new = np.ones((2, 2, 64), np.float32)
    _core.cpu_write_decode(plan, new, 2 * new, memory[:, 0], memory[:, 1], layout="NHD")
    assert (memory[0, 0, 2] == 1).all()
    assert (memory[0, 1, 2] == 2).all()
    assert memory.sum() == 2 * new.sum() * 1.5


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap"])
@pytest.mark.parametrize("value", [1e39, 10**400])
def test_number_beyond_float32_is_refused_alike(backend: str, name: str, value: float) -> None:
    options: dict[str, Any] = {"backend": backend, name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        paged_decode(_normal(2, 8, 64), _normal(5, 16, 2, 64), _normal(5, 16, 2, 64), **CSR, **options)


def test_numpy_arrays_with_negative_strides_are_copied() -> None:
    q, k_pages, v_pages = (np.array(_normal(*shape)) for shape in ((2, 8, 64), (5, 16, 2, 64), (5, 16, 2, 64)))
    expected = paged_decode(np.ascontiguousarray(q[:, ::-1]), k_pages, v_pages, **CSR)
    assert np.array_equal(paged_decode(q[:, ::-1], k_pages, v_pages, **CSR), expected)


@pytest.mark.parametrize(("name", "value"), [("head_dim", 63), ("page_size", 256)])
def test_shape_error_names_the_argument_of_the_called_function(name: str, value: int) -> None:
    geometry = {**GEOMETRY, name: value}
    with pytest.raises(InvalidArgumentError, match=f"invalid {name}"):
        plan_from_csr(**CSR, **geometry, backend="cpu")


@pytest.mark.parametrize("index", [-1, 2**32, 2**64])
def test_slot_beyond_32_bits_is_refused(index: int) -> None:
    with pytest.raises(InvalidArgumentError, match="index"):
        _core.Slot(index, 0)


def test_comparison_with_a_blas_that_is_not_there_is_refused() -> None:
    script = (
        "from mlxcel_paged import _core, InvalidArgumentError\n"
        "try:\n    _core.bench_projection(1, 16, 16, 1)\n"
        "except InvalidArgumentError as error:\n    print('refused', 'prepare' in str(error))\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "refused True\n"


def test_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == EXIT_USAGE
    assert "Traceback" not in (error := capfd.readouterr().err)
    assert "cannot listen" in error


def test_missing_model_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "./no-such-model", "--prompt", "x"]) == EXIT_USAGE
    assert "Traceback" not in (error := capfd.readouterr().err)
    assert "no-such-model" in error


@pytest.mark.parametrize("words", [["--context", "99999999999"], ["--head-dim", "72"], ["--heads", "17/1"]])
def test_kernel_bench_refuses_a_shape_before_it_takes_memory(words: list[str]) -> None:
    command = [sys.executable, "-m", "mlxcel_paged", "bench", "kernel", "--batch", "1", "--backend", "cpu", *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == EXIT_USAGE
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_bench_does_not_ignore_a_device_that_it_cannot_measure(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what, "--device", "gpu"]) == EXIT_USAGE
    assert "--device gpu" in capfd.readouterr().err
