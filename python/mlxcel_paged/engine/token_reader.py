"""How the host reads the tokens of a step that ran on an NVIDIA GPU.

`array.tolist()` moves the array's buffer to managed memory, for good: MLX recycles the buffer, the next step's tokens
land in it, and its page travels up and down once a step, with faults on both sides. MLX has no read that leaves an
array where it is (DLPack export of CUDA memory is refused). So a kernel at the end of a step copies the tokens to
page-locked host memory, and the host reads them there.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import mlx.core as mx
from numpy.typing import NDArray

from mlxcel_paged._core import CorruptionError
from mlxcel_paged.attention.cuda.kernel import Kernel
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.kernels_cuda import CompileError, NvrtcNotFoundError
from mlxcel_paged.kernels_cuda.pinned import PinnedMemory, PinnedMemoryError

logger = logging.getLogger("mlxcel_paged")

# One step is in flight when the next one is launched; twice as many slots, and none is waited for to be read.
NUM_SLOTS = 4
# Slots begin at lines of the memory, so that two steps never write one line.
_LINE_WORDS = 32
_MAX_STEP = 2**31 - 1


class PendingTokens(Protocol):
    """The tokens of a launched step."""

    def wait(self) -> list[int]:
        """Waits for the device and returns one token per row; padding is left out."""


class ArrayTokens:
    """Tokens read out of their array.

    Args:
        token_ids: [num_rows or more], NumPy or MLX; what is behind the rows is padding.
        num_rows: rows of the step.
    """

    def __init__(self, token_ids: Any, num_rows: int) -> None:
        self._token_ids = token_ids
        self._num_rows = num_rows

    def wait(self) -> list[int]:
        tokens: list[int] = self._token_ids.tolist()
        return tokens[: self._num_rows]


class HostMemory(Protocol):
    """Host memory that kernels write; `PinnedMemory`, or a test's."""

    words: NDArray[Any]
    device_address: int

    def free(self) -> None: ...


class TokenReader:
    """A ring of slots in host memory, one a step; one thread and one MLX stream use it.

    A slot is taken by a new step only when nobody will ask for its tokens any more: they were read, or their step was
    dropped. Launches follow each other on the stream, so a dropped step cannot write after the one that got its slot.

    Args:
        kernel: `mlxcel_publish_tokens`.
        memory: `num_words(max_tokens)` int32; freed with the reader, once the last launch is done.
        max_tokens: tokens of a step at most.
    """

    def __init__(self, kernel: Kernel, memory: HostMemory, max_tokens: int) -> None:
        self._kernel = kernel
        self._stride = _slot_words(max_tokens)
        self._slots = memory.words.reshape(NUM_SLOTS, self._stride)
        self._address = memory.device_address
        self._max_tokens = max_tokens
        self._step = 0
        self._holders: list[weakref.ref[_SlotTokens] | None] = [None] * NUM_SLOTS
        self._last: list[mx.array] = []
        weakref.finalize(self, _free, memory, self._last).atexit = False

    def publish(self, tokens: mx.array, num_tokens: int) -> PendingTokens:
        """Enqueues `tokens` and their way to the host.

        Args:
            tokens: [num_tokens or more] int32.
            num_tokens: rows of the step.
        """
        if num_tokens > self._max_tokens:
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]
            return ArrayTokens(tokens, num_tokens)
        self._step = self._step % _MAX_STEP + 1
        index = self._step % NUM_SLOTS
        holder = self._holders[index]
        unread = None if holder is None else holder()
        if unread is not None:
            unread.fetch()
        address = self._address + 4 * self._stride * index
        (done,) = self._kernel(
            (tokens,), ((1,),), (mx.int32,), (_int32(address), _int32(address >> 32), num_tokens, self._step), (1, 1)
        )
        mx.async_eval(tokens, done)  # type: ignore[no-untyped-call]
        self._last[:] = [done]
        pending = _SlotTokens(self, done, self._slots[index], self._step, num_tokens)
        self._holders[index] = weakref.ref(pending)
        return pending


class _SlotTokens:
    """Tokens on their way to a slot."""

    def __init__(self, reader: TokenReader, done: mx.array, slot: NDArray[Any], step: int, num_tokens: int) -> None:
        self._reader = reader  # whose memory lives as long
        self._done: mx.array | None = done
        self._slot = slot
        self._step = step
        self._num_tokens = num_tokens
        self._tokens: list[int] = []

    def wait(self) -> list[int]:
        self.fetch()
        return self._tokens

    def fetch(self) -> None:
        """Waits and copies the tokens out of the slot, once.

        Raises:
            CorruptionError: the slot holds another step's tokens.
        """
        if self._done is None:
            return
        # `mx.eval` of an array that is under way waits for all that was enqueued after it, too. An element of up to 8
        # bytes is read where it lies: MLX keeps it in memory that the device writes without moving a page.
        done = self._done.item()
        if not done == self._slot[0] == self._step:
            raise CorruptionError(f"the tokens of step {self._step} are those of {self._slot[0]}, signalled as {done}")
        self._tokens = self._slot[1 : 1 + self._num_tokens].tolist()
        self._done = None


def new_token_reader(kernels: CudaKernels | None, max_tokens: int) -> TokenReader | None:
    """The reader for steps of `max_tokens` at most on the GPU of `kernels`; None, with the reason logged, where tokens
    must be read out of their array."""
    if kernels is None:
        return None
    try:
        kernel = kernels.publish_tokens()
        memory = PinnedMemory(4 * num_words(max_tokens))
    except (CompileError, NvrtcNotFoundError, PinnedMemoryError) as error:
        logger.warning("tokens are read through managed memory: %s", error)
        return None
    return TokenReader(kernel, memory, max_tokens)


def num_words(max_tokens: int) -> int:
    """Words of host memory that a reader for steps of `max_tokens` at most needs."""
    return NUM_SLOTS * _slot_words(max_tokens)


def _slot_words(max_tokens: int) -> int:
    return -(-(1 + max_tokens) // _LINE_WORDS) * _LINE_WORDS


def _int32(word: int) -> int:
    """The low 32 bits, signed: what MLX takes by value."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)


def _free(memory: HostMemory, last: list[mx.array]) -> None:
    try:
        for done in last:
            done.item()
        memory.free()
    except (RuntimeError, ValueError) as error:
        # Whether launches still write it is unknown after a failure; a few KiB are kept until the process ends.
        logger.warning("the memory that tokens are read from is not freed: %s", error)
