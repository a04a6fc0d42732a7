"""Tokens read through host memory that a kernel writes: never another step's, never after the memory is gone."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda_double import KernelsDouble, PublishTokensDouble

from engine import test_tiny_model
from engine.conftest import check_drained
from engine.test_tiny_model import one_step_ahead, prompt_of
from mlxcel_paged._core import CorruptionError
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine, token_reader
from mlxcel_paged.engine.decode_tokens import DecodeTokens
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.engine.token_reader import NUM_SLOTS, ArrayTokens, TokenReader, new_token_reader, num_words
from mlxcel_paged.kernels_cuda import CompileError
from mlxcel_paged.kernels_cuda.pinned import PinnedMemory, PinnedMemoryError
from mlxcel_paged.request import SamplingParams

POISON = -77


class Memory:
    """Host memory at a device address of its own."""

    def __init__(self, num_words: int, device_base: int = 0) -> None:
        self.words = np.full(num_words, POISON, np.int32)
        self.device_address = self.words.ctypes.data + device_base
        self.is_freed = False

    def free(self) -> None:
        self.is_freed = True
        self.words[:] = POISON


def make_reader(max_tokens: int = 40, device_base: int = 0) -> tuple[TokenReader, Memory]:
    memory = Memory(num_words(max_tokens), device_base)
    return TokenReader(PublishTokensDouble(device_base), memory, max_tokens), memory


def tokens_of(step: int, num_tokens: int) -> mx.array:
    return mx.arange(1000 * step, 1000 * step + num_tokens, dtype=mx.int32)


# Below host addresses and beyond 47 bits; the low half with and without its highest bit.
@pytest.mark.parametrize("device_base", [0, 1 << 31, 0x7FFF << 44, -(1 << 31)])
def test_every_step_gets_its_own_tokens_however_late_it_is_read(device_base: int) -> None:
    draw = random.Random(3)
    reader, _ = make_reader(device_base=device_base)
    waiting = []
    for step in range(400):
        num_tokens = draw.randint(1, 40)
        pending = reader.publish(tokens_of(step, num_tokens + draw.randint(0, 8)), num_tokens)
        waiting.append((pending, list(range(1000 * step, 1000 * step + num_tokens))))
        del pending
        while len(waiting) > draw.randint(0, 3 * NUM_SLOTS):
            taken, wanted = waiting.pop(draw.randrange(len(waiting)))
            # A step is read, dropped, or read twice.
            for _ in range(draw.randint(0, 2)):
                assert taken.wait() == wanted


def test_padding_stays_where_it_is() -> None:
    reader, memory = make_reader()
    assert reader.publish(tokens_of(1, 40), 3).wait() == [1000, 1001, 1002]
    assert (memory.words != POISON).sum() == 4


def test_the_step_number_wraps_around() -> None:
    reader, _ = make_reader()
    reader._step = 2**31 - 3
    waiting = [reader.publish(tokens_of(step, 5), 5) for step in range(8)]
    assert [pending.wait()[0] for pending in waiting] == [1000 * step for step in range(8)]
    assert reader._step == 6


def test_a_step_with_more_tokens_than_a_slot_holds_is_read_out_of_its_array() -> None:
    reader, memory = make_reader(max_tokens=31)
    assert reader.publish(tokens_of(1, 40), 33).wait() == list(range(1000, 1033))
    assert (memory.words == POISON).all()
    assert reader.publish(tokens_of(2, 40), 31).wait() == list(range(2000, 2031))


def test_tokens_of_another_step_are_an_error() -> None:
    reader, memory = make_reader()
    pending = reader.publish(tokens_of(1, 5), 5)
    memory.words[np.flatnonzero(memory.words == 1)] = 9
    with pytest.raises(CorruptionError, match="step 1 are those of 9"):
        pending.wait()


def test_memory_outlives_every_step_that_may_be_read() -> None:
    reader, memory = make_reader()
    read, unread = (reader.publish(tokens_of(step, 5), 5) for step in range(2))
    read.wait()
    del reader, read
    gc.collect()
    assert not memory.is_freed
    assert unread.wait() == [1000, 1001, 1002, 1003, 1004]
    del unread
    gc.collect()
    assert memory.is_freed


def test_memory_is_kept_when_the_last_launch_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Failed:
        def item(self) -> int:
            raise RuntimeError("an illegal address")

    reader, memory = make_reader()
    reader._last[:] = [Failed()]  # type: ignore[list-item]
    del reader
    gc.collect()
    assert not memory.is_freed
    assert "an illegal address" in caplog.text


def test_there_is_no_reader_where_memory_or_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoCompiler(KernelsDouble):
        def publish_tokens(self) -> Any:
            raise CompileError("publish_tokens.cu", "no such architecture")

    assert new_token_reader(None, 8) is None
    assert not caplog.text
    assert new_token_reader(NoCompiler(), 8) is None
    assert "no such architecture" in caplog.text
    driver = Driver(refused="cuMemHostAlloc")
    monkeypatch.setattr(token_reader, "PinnedMemory", functools.partial(PinnedMemory, driver=driver))
    assert new_token_reader(KernelsDouble(), 8) is None
    assert "cuMemHostAlloc failed with CUDA driver error 2" in caplog.text
    driver.refused = ""
    reader = new_token_reader(KernelsDouble(), 8)
    assert reader is not None
    assert reader.publish(tokens_of(1, 8), 8).wait() == list(range(1000, 1008))
    del reader
    gc.collect()
    assert driver.held == []


@pytest.mark.parametrize("storage", ["paged", "dense"])
def test_an_engine_one_step_ahead_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    sampling = [
        SamplingParams(
            max_tokens=20 + index,
            temperature=0.0 if index % 2 else 0.9,
            seed=index,
            num_logprobs=2 if index % 3 else None,
        )
        for index in range(6)
    ]
    prompts = [prompt_of(length, salt=3) for length in (3, 9, 24, 2, 40, 17)]

    def completions() -> list[list[int]]:
        engine = Engine(EngineConfig(page_size=8, prefill_chunk=16), build=functools.partial(one_step_ahead, storage))
        engine.start()
        engine.wait_until_ready(120)
        found = [completion.token_ids for completion in generate(engine, prompts, sampling)]
        check_drained(engine)
        assert engine.stop(timeout_s=60)
        return found

    wanted = completions()
    reader, _ = make_reader(max_tokens=4)
    steps: list[Any] = []
    publish = reader.publish
    monkeypatch.setattr(reader, "publish", lambda *arguments: steps.append(publish(*arguments)) or steps[-1])
    monkeypatch.setattr(test_tiny_model, "DecodeTokens", functools.partial(DecodeTokens, reader=reader))
    assert completions() == wanted
    assert steps
    assert not any(isinstance(step, ArrayTokens) for step in steps)


class Driver:
    """The CUDA driver's calls that make page-locked memory, over plain memory."""

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.held: list[str] = []
        self._buffers: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: 2 if name == self.refused else self._run(name, arguments)

    def _run(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuDevicePrimaryCtxRetain":
            arguments[0]._obj.value = 0x1234
            self.held.append("context")
        elif name == "cuDevicePrimaryCtxRelease_v2":
            self.held.remove("context")
        elif name == "cuCtxPushCurrent_v2":
            assert arguments[0].value == 0x1234
            self.held.append("current")
        elif name == "cuCtxPopCurrent_v2":
            assert self.held.pop() == "current"
        elif name == "cuMemHostAlloc":
            assert "current" in self.held
            assert arguments[2].value == 3, "portable and mapped"
            buffer = (ctypes.c_int32 * (arguments[1].value // 4))(*[POISON] * (arguments[1].value // 4))
            self._buffers[ctypes.addressof(buffer)] = buffer
            arguments[0]._obj.value = ctypes.addressof(buffer)
            self.held.insert(0, "memory")
        elif name == "cuMemHostGetDevicePointer_v2":
            arguments[0]._obj.value = arguments[1].value
        elif name == "cuMemFreeHost":
            assert "current" in self.held
            del self._buffers[arguments[0].value]
            self.held.remove("memory")
        else:
            assert name in ("cuInit", "cuDeviceGet"), name
        return 0


def test_pinned_memory_is_of_the_primary_context() -> None:
    driver = Driver()
    memory = PinnedMemory(256, driver=driver)
    assert sorted(driver.held) == ["context", "memory"]
    assert memory.words.shape == (64,)
    assert (memory.words == 0).all()
    assert memory.device_address == memory.words.ctypes.data
    memory.free()
    assert driver.held == []
    memory.free()


@pytest.mark.parametrize(
    "refused",
    [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer_v2",
    ],
)
def test_what_the_driver_refuses_leaves_nothing_behind(refused: str) -> None:
    driver = Driver(refused)
    with pytest.raises(PinnedMemoryError, match=f"{refused} failed with CUDA driver error 2"):
        PinnedMemory(256, driver=driver)
    assert driver.held == []
