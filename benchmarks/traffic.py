"""A batch that changes all the time inside one bucket, through the engine's own scheduler, runner and step loop.

Requests come and go so that the batch wanders between half of its places (plus one) and all of them; every one crosses
pages on its way. Weights are random, sampling is greedy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from step_arms import build_model
from step_cells import ModelShape

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.build import build_core_over
from mlxcel_paged.engine.core import EngineCore
from mlxcel_paged.engine.step_loop import StepLoop
from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenEvent
from mlxcel_paged.scheduler import Step

_OUTPUT_TOKENS = (40, 160)
_TURNS_PER_TARGET = 25
_WARM_OUTPUT_TOKENS = (6, 14)
_WARM_TURNS_PER_SIZE = 6


def load_random(shape: ModelShape, *, device: Any, bits: int, max_context: int) -> LoadedModel:
    """A model with random weights as the engine's loader would give it; sets MLX's default device."""
    mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    dtype = mx.float32 if device == "cpu" else mx.float16
    model = build_model(shape, bits=bits, dtype=dtype)
    if bits and device == "gpu":
        from mlxcel_paged.models.flat_quantized import flatten_quantized

        flatten_quantized(model)
    tokenizer: Any = SimpleNamespace(eos_token_ids=())
    return LoadedModel(model, tokenizer, "random", max_context, shape.arguments(), dtype, device)


def core_over(
    loaded: LoadedModel, *, batch: int, page_size: int, budget_bytes: int | None, **others: Any
) -> EngineCore:
    """The engine's core, self-check included. `others` are further fields of `EngineConfig`; None is their default."""
    chosen = {name: value for name, value in others.items() if value is not None}
    config = EngineConfig(
        model="random",
        device=loaded.device,
        decode_storage="paged",
        parallel=batch,
        page_size=page_size,
        kv_cache_budget=budget_bytes,
        max_context=loaded.max_context,
        arm="fused",
        **chosen,
    )
    return build_core_over(config, loaded)


def build_core(
    shape: ModelShape, *, device: Any, bits: int, batch: int, page_size: int, max_context: int, budget_bytes: int
) -> EngineCore:
    """Both in one."""
    loaded = load_random(shape, device=device, bits=bits, max_context=max_context)
    return core_over(loaded, batch=batch, page_size=page_size, budget_bytes=budget_bytes)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the step loop launched.

    Attributes:
        num_rows: Rows of the decode batch.
        is_steady: The rows are those of the turn before, and nothing was prefilled.
        num_crossings: Rows whose token began a page.
        has_prefill: A prompt chunk ran.
    """

    num_rows: int
    is_steady: bool
    num_crossings: int
    has_prefill: bool


class Traffic:
    """Feeds one core and turns its step loop.

    Args:
        core: The core; nothing else may use it.
        batch: Its places.
        prompt_tokens: Tokens of every prompt; all but the last are prefilled.
        page_size: Tokens in a page.
    """

    def __init__(self, core: EngineCore, *, batch: int, prompt_tokens: int, page_size: int) -> None:
        self._core = core
        self._random = random.Random(11)
        self._batch = batch
        self._prompt_tokens = prompt_tokens
        self._page_size = page_size
        self._loop = StepLoop(core, self._take, StepTimes())
        self._launched: list[Step] = []
        self._rows: list[int] = []
        self._alive = 0
        self._num_requests = 0
        self._target = batch
        self._left_at_target = 0
        self._output_tokens = _OUTPUT_TOKENS
        self.num_finished = 0
        self._watch_launches()

    def warm_up(self, max_turns: int = 3000) -> int:
        """Runs until every batch size has had some turns, then until the batch is as it is in `turn`.

        Returns:
            The turns that it took.

        Raises:
            RuntimeError: some size did not come up within `max_turns`.
        """
        seen = dict.fromkeys(range(1, self._batch + 1), 0)
        self._output_tokens = _WARM_OUTPUT_TOKENS
        num_turns = 0
        while min(seen.values()) < _WARM_TURNS_PER_SIZE:
            if num_turns >= max_turns:
                raise RuntimeError(f"turns by batch size after {num_turns} turns: {seen}")
            self._target = min(seen, key=lambda size: (seen[size] >= _WARM_TURNS_PER_SIZE, size))
            rows = self._step().num_rows
            if rows:
                seen[rows] += 1
            num_turns += 1
        self._output_tokens = _OUTPUT_TOKENS
        for _ in range(_WARM_OUTPUT_TOKENS[1] * 2):
            self.turn()
        return num_turns + _WARM_OUTPUT_TOKENS[1] * 2

    def turn(self) -> Turn:
        """Tops the batch up and runs one turn.

        Raises:
            RuntimeError: a request ended for another reason than its length.
        """
        self._aim()
        return self._step()

    def _step(self) -> Turn:
        while self._alive < self._target:
            self._admit()
        self._launched.clear()
        self._loop.turn()
        rows = [row for step in self._launched for row in step.decode]
        names = [row.sequence.sequence_id for row in rows]
        has_prefill = any(step.prefill for step in self._launched)
        is_steady = bool(names) and names == self._rows and not has_prefill
        self._rows = names
        return Turn(len(rows), is_steady, sum(row.position % self._page_size == 0 for row in rows), has_prefill)

    def _aim(self) -> None:
        if self._left_at_target == 0:
            self._target = self._random.randint(self._batch // 2 + 1, self._batch)
            self._left_at_target = _TURNS_PER_TARGET
        self._left_at_target -= 1

    def _admit(self) -> None:
        self._num_requests += 1
        self._alive += 1
        prompt = [self._random.randrange(1000) for _ in range(self._prompt_tokens)]
        sampling = SamplingParams(
            max_tokens=self._random.randint(*self._output_tokens), temperature=0.0, ignore_eos=True
        )
        self._core.scheduler.add(Request(f"r{self._num_requests}", prompt, sampling))

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is None:
                continue
            if event.finish_reason is not FinishReason.LENGTH:
                raise RuntimeError(f"{event.request_id} ended by {event.finish_reason}: {event.error}") from event.error
            self._alive -= 1
            self.num_finished += 1
        released = self._core.scheduler.take_released()
        if released:
            self._core.runner.release(released)

    def _watch_launches(self) -> None:
        runner: Any = self._core.runner
        original = runner.launch

        def launch(step: Step) -> Any:
            self._launched.append(step)
            return original(step)

        runner.launch = launch
