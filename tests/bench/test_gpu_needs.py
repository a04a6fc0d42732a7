"""What GPU scripts say on a machine that lacks something, and with which status they end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_needs  # noqa: E402

SCRIPTS = {
    "bench_decode_cuda.py": (),
    "bench_memory_cuda.py": (),
    "bench_plan_device.py": ("--device", "gpu"),
    "bench_prefill_cuda.py": (),
    "bench_products_cuda.py": (),
    "bench_step_mlx.py": (),
    "count_graphs.py": ("--modes", "driver"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_gpu_a_script_ends_with_one_line(script: str, tmp_path: Path) -> None:
    if not gpu_needs.driver_lack():
        pytest.skip("there is a GPU here")
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / script), *SCRIPTS[script], "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == gpu_needs.STATUS == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("cannot run here: no NVIDIA GPU")
    assert "hint" in line
    assert not done.stdout
    assert not out.exists()
    if hint := re.search(r"on a machine without a GPU, (.+) shows that it works$", line):
        assert f"python benchmarks/{script} {hint[1]}\n" in (BENCHMARKS / "README.md").read_text()


def mlx(*, has_cuda: bool = True, error: Exception | None = None) -> Any:
    def evaluate(_: Any) -> None:
        if error:
            raise error

    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: has_cuda),
        gpu=None,
        set_default_device=lambda _: None,
        ones=lambda _: 1,
        eval=evaluate,
    )


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_needs, "driver_lack", str)


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(
    ("module", "lack"),
    [
        (None, "MLX is not installed (hint: make install EXTRA=cuda13"),
        (mlx(has_cuda=False), "there is a GPU, but MLX has no CUDA backend (hint: make install EXTRA=cuda13"),
        (mlx(error=RuntimeError("no kernel\nimage")), "MLX does not compute on the GPU: no kernel image"),
        (mlx(), ""),
    ],
)
def test_mlx_needs_its_cuda_backend(monkeypatch: pytest.MonkeyPatch, module: Any, lack: str) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", module)
    found = gpu_needs.mlx_lack()
    assert found.startswith(lack)
    assert bool(found) is bool(lack)


@pytest.mark.usefixtures("with_gpu")
def test_a_library_that_mlx_lacks_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> Any:
        raise ImportError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(gpu_needs.importlib, "import_module", load)
    found = gpu_needs.mlx_lack()
    assert "libnvrtc.so.13: cannot open" in found
    assert "pip install 'nvidia-cuda-nvrtc" in found


@pytest.mark.usefixtures("with_gpu")
def test_kernels_need_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxcel_paged.kernels_cuda import NvrtcNotFoundError, nvrtc

    def load_library() -> Any:
        raise NvrtcNotFoundError("libnvrtc was not found; install it")

    monkeypatch.setattr(nvrtc, "load_library", load_library)
    monkeypatch.setitem(sys.modules, "mlx.core", mlx())
    assert gpu_needs.mlx_lack() == "libnvrtc was not found; install it"


@pytest.mark.usefixtures("with_gpu")
def test_peers_are_needed_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(gpu_needs.importlib.util, "find_spec", lambda _: None)
    assert gpu_needs.torch_lack() == ""
    found = gpu_needs.torch_lack("flashinfer")
    assert found.startswith("flashinfer is not installed")
    assert "--arms ours,roof,cudnn" in found
    torch.cuda.is_available = lambda: False
    assert "torch does not find it" in gpu_needs.torch_lack()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_needs.torch_lack().startswith("torch is not installed (hint: pip install --group gpu)")


def test_a_probe_that_dies_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "probe.py"
    monkeypatch.setattr(gpu_needs, "__file__", str(probe))
    for text, said in (
        (f"import os; os.kill(os.getpid(), {signal.SIGABRT:d})", "mlx dies of SIGABRT when it uses the GPU"),
        ("raise OSError('no such device')", "OSError: no such device"),
        ("import sys; sys.exit(3)", "mlx ends with status 3"),
        ("print('a remark of a library'); print('no MLX')", "no MLX; on a machine without a GPU, --device cpu"),
    ):
        probe.write_text(text)
        with pytest.raises(SystemExit) as ended:
            gpu_needs.require_mlx_gpu()
        assert ended.value.code == gpu_needs.STATUS
        assert capsys.readouterr().err.startswith(f"cannot run here: {said}")
    probe.write_text("print()")
    gpu_needs.require_mlx_gpu()
    gpu_needs.require_torch_gpu(("flashinfer",))
