"""Ends a GPU script with one line and status 2 where the machine lacks what it needs, before anything is measured.

Run as a script it prints what is missing, or nothing. That is a process of its own, as the one that measures, or that
starts those that do, shall find the GPU without a context and its libraries unloaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import subprocess
import sys
from typing import NoReturn

STATUS = 2
_TIMEOUT_S = 180.0
_LIBRARIES = {
    "libcuda.so": "install NVIDIA's driver",
    "libnvrtc": "pip install 'nvidia-cuda-nvrtc>=13.0,<13.1'",
    "libcudnn": "pip install nvidia-cudnn-cu13",
    "libcublas": "pip install nvidia-cublas",
}
_MLX = "make install EXTRA=cuda13, or pip install 'mlx[cuda13]'"
_PEERS = {"flashinfer": "pip install flashinfer-python==0.6.1, or leave it out: --arms ours,roof,cudnn"}


def require_mlx_gpu(without: str = "--device cpu --shape tiny") -> None:
    """Ends this process unless MLX computes on an NVIDIA GPU and kernels can be compiled for it.

    Args:
        without: Flags that show on any machine that the script works; empty if there are none.
    """
    _end_if(_lack_in_process("mlx"), f"on a machine without a GPU, {without} shows that it works" if without else "")


def require_torch_gpu(peers: tuple[str, ...] = ()) -> None:
    """Ends this process unless torch finds an NVIDIA GPU, kernels can be compiled for it, and `peers` are installed."""
    _end_if(_lack_in_process("torch", *peers), "")


def end(lack: str) -> NoReturn:
    """Ends this process with its line and status."""
    print(f"cannot run here: {lack}", file=sys.stderr)
    sys.exit(STATUS)


def mlx_lack() -> str:
    """What keeps MLX from computing on a GPU of this machine, and the cure; empty if nothing does."""
    if lack := driver_lack():
        return lack
    try:
        mx = importlib.import_module("mlx.core")
    except ModuleNotFoundError:
        return f"MLX is not installed (hint: {_MLX})"
    except ImportError as error:
        return f"MLX cannot be loaded: {_one_line(error)} (hint: {_cure(str(error), _MLX)})"
    if not mx.cuda.is_available():
        return f"there is a GPU, but MLX has no CUDA backend (hint: {_MLX})"
    if lack := nvrtc_lack():
        return lack
    try:
        mx.set_default_device(mx.gpu)
        mx.eval(mx.ones((4,)) + 1)
    except Exception as error:  # whatever it is, nothing can be measured
        return f"MLX does not compute on the GPU: {_one_line(error)}"
    return ""


def torch_lack(*peers: str) -> str:
    """What keeps torch from a GPU of this machine, or which of `peers` is missing, and the cure."""
    if lack := driver_lack():
        return lack
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return "torch is not installed (hint: pip install --group gpu)"
    except ImportError as error:
        return f"torch cannot be loaded: {_one_line(error)} (hint: {_cure(str(error), 'pip install --group gpu')})"
    if not torch.cuda.is_available():
        return "there is a GPU, but torch does not find it (hint: it must be built for a CUDA that the driver knows)"
    if lack := nvrtc_lack():
        return lack
    for name in peers:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (hint: {_PEERS.get(name, f'pip install {name}')})"
    return ""


def driver_lack() -> str:
    try:
        from mlxcel_paged.kernels_cuda.device import NoCudaDeviceError, current_device
    except ModuleNotFoundError as error:
        return f"{error} (hint: make install, then source .venv/bin/activate)"
    try:
        current_device()
    except NoCudaDeviceError as error:
        return f"no NVIDIA GPU: {error} (hint: run it on a host with one and its driver)"
    return ""


def nvrtc_lack() -> str:
    from mlxcel_paged.kernels_cuda.nvrtc import NvrtcNotFoundError, load_library

    try:
        load_library()
    except NvrtcNotFoundError as error:
        return str(error)
    return ""


def _lack_in_process(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{arguments[0]} has not answered within {_TIMEOUT_S:.0f} s"
    if done.returncode < 0:
        return f"{arguments[0]} dies of {signal.Signals(-done.returncode).name} when it uses the GPU"
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"{arguments[0]} ends with status {done.returncode}"
    return done.stdout.strip().rpartition("\n")[2]


def _end_if(lack: str, remark: str) -> None:
    if lack:
        end(f"{lack}; {remark}" if remark else lack)


def _cure(message: str, otherwise: str) -> str:
    return next((cure for library, cure in _LIBRARIES.items() if library in message), otherwise)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    subject, *wanted = sys.argv[1:]
    print(mlx_lack() if subject == "mlx" else torch_lack(*wanted))
