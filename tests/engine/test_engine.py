"""The engine's promises to other threads, with a scripted model: every request is answered once, whatever happens."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel_paged._core import CorruptionError
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine, EngineState
from mlxcel_paged.engine.core import EngineCore
from mlxcel_paged.engine.errors import EngineFailedError, EngineNotReadyError
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.request import ContextLengthExceededError, InvalidRequestError, QueueFullError, SamplingParams
from mlxcel_paged.scheduler import Step, StepResult
from scheduler.scripted import VOCAB_SIZE, ScriptedRunner, solo

from .conftest import ABORT, ERROR, LENGTH, STOP, Inbox, check_drained, request, scripted_core

StartEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
depths = pytest.mark.parametrize("depth", [0, 1])


class GatedRunner(ScriptedRunner):
    """Holds every step back until the test opens the gate."""

    gate = threading.Event()
    waiting = threading.Event()

    def collect(self, launch: Any) -> StepResult:
        self.waiting.set()
        assert self.gate.wait(60)
        return super().collect(launch)


@pytest.fixture
def gated() -> type[GatedRunner]:
    class Gated(GatedRunner):
        gate = threading.Event()
        waiting = threading.Event()

    return Gated


@depths
def test_concurrent_requests_give_what_each_gives_alone(start_engine: StartEngine, depth: int) -> None:
    engine = start_engine(lambda _: scripted_core(pipeline_depth=depth))
    prompts = [[(7 * salt + index) % VOCAB_SIZE for index in range(1 + 6 * salt)] for salt in range(8)]
    completions = generate(engine, prompts, GREEDY)
    assert [completion.token_ids for completion in completions] == [solo(prompt, 12) for prompt in prompts]
    assert {completion.finish_reason for completion in completions} == {LENGTH}
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (sum(map(len, prompts)), 96)
    assert stats.num_finished[LENGTH] == 8
    assert stats.busy_s >= stats.model_s > 0.0


def test_requests_are_refused_with_the_reason(start_engine: StartEngine, gated: type[GatedRunner]) -> None:
    engine = start_engine(lambda _: scripted_core(max_batch_size=1, runner_type=gated), max_queued_requests=2)
    inbox = Inbox()
    with pytest.raises(ContextLengthExceededError, match="context"):
        engine.submit(request("long", [1] * 200), inbox)
    with pytest.raises(InvalidRequestError, match="below"):
        engine.submit(request("vocabulary", [VOCAB_SIZE]), inbox)
    engine.submit(request("a", [1]), inbox)
    assert gated.waiting.wait(60)
    with pytest.raises(InvalidRequestError, match="unique"):
        engine.submit(request("a", [1]), inbox)
    engine.submit(request("b", [1]), inbox)
    engine.submit(request("c", [1]), inbox)
    with pytest.raises(QueueFullError, match="2 requests"):
        engine.submit(request("d", [1]), inbox)
    assert engine.stats().num_requests_waiting == 2
    gated.gate.set()
    inbox.wait_finished("a", "b", "c")
    assert {event.request_id for event in inbox.events} == {"a", "b", "c"}


def test_several_requests_are_taken_together_or_not_at_all(start_engine: StartEngine, gated: type[GatedRunner]) -> None:
    engine = start_engine(lambda _: scripted_core(max_batch_size=1, runner_type=gated), max_queued_requests=2)
    inbox = Inbox()
    assert engine.queue_room == 3
    with pytest.raises(ContextLengthExceededError):
        engine.submit_many([request("fits", [1]), request("long", [1] * 200)], inbox)
    with pytest.raises(InvalidRequestError, match="unique"):
        engine.submit_many([request("twin", [1]), request("twin", [1])], inbox)
    with pytest.raises(InvalidRequestError, match="at most 2"):
        engine.submit_many([request(str(index), [1]) for index in range(4)], inbox)
    engine.submit_many([request("a", [1]), request("b", [2])], inbox)
    assert gated.waiting.wait(60)
    assert engine.queue_room == 1
    with pytest.raises(QueueFullError, match="1 requests"):
        engine.submit_many([request("c", [1]), request("d", [1])], inbox)
    engine.submit(request("e", [3]), inbox)
    assert engine.queue_room == 0
    gated.gate.set()
    inbox.wait_finished("a", "b", "e")
    assert {event.request_id for event in inbox.events} == {"a", "b", "e"}
    for name, token in (("a", 1), ("b", 2), ("e", 3)):
        assert inbox.tokens(name) == solo([token], 10)


def test_prompt_tokens_in_the_queue_are_bounded(start_engine: StartEngine, gated: type[GatedRunner]) -> None:
    engine = start_engine(lambda _: scripted_core(max_batch_size=1, runner_type=gated), max_queued_tokens=10)
    inbox = Inbox()
    engine.submit(request("runs", [1] * 30), inbox)
    assert gated.waiting.wait(60)
    engine.submit(request("alone in the queue", [1] * 30), inbox)
    with pytest.raises(QueueFullError, match="1 requests with 30 prompt tokens"):
        engine.submit(request("refused", [1]), inbox)
    engine.abort("alone in the queue")
    gated.gate.set()
    inbox.wait_finished("runs", "alone in the queue")
    check_drained(engine)
    gated.gate.clear()
    gated.waiting.clear()
    engine.submit(request("runs again", [1]), inbox)
    assert gated.waiting.wait(60)
    engine.submit(request("six", [1] * 6), inbox)
    engine.submit(request("four", [1] * 4), inbox)
    with pytest.raises(QueueFullError, match="10 prompt tokens"):
        engine.submit(request("one", [1]), inbox)
    gated.gate.set()
    inbox.wait_finished("runs again", "six", "four")


def test_while_loading_and_after_stopping_nothing_is_taken(start_engine: StartEngine) -> None:
    loaded = threading.Event()

    def build(_: EngineConfig) -> EngineCore:
        assert loaded.wait(60)
        return scripted_core()

    engine = start_engine(build, wait=False)
    assert engine.state == "loading"
    with pytest.raises(EngineNotReadyError, match="loading"):
        engine.submit(request("a", [1]), Inbox())
    with pytest.raises(TimeoutError):
        engine.wait_until_ready(0.001)
    assert engine.stats().kv_pages_total == 0
    loaded.set()
    assert engine.wait_until_ready(60).name == "scripted"
    assert engine.stop(timeout_s=60)
    assert engine.state is EngineState.STOPPED
    with pytest.raises(EngineNotReadyError, match="stopped"):
        engine.submit(request("a", [1]), Inbox())


def test_a_model_that_does_not_load_is_a_failed_engine_with_the_cause(start_engine: StartEngine) -> None:
    def build(_: EngineConfig) -> EngineCore:
        raise ValueError("no such model")

    engine = start_engine(build, wait=False)
    with pytest.raises(EngineFailedError, match="no such model") as caught:
        engine.wait_until_ready(60)
    assert isinstance(caught.value.__cause__, ValueError)
    assert engine.state == "failed"
    assert isinstance(engine.failure, ValueError)
    with pytest.raises(EngineFailedError):
        engine.submit(request("a", [1]), Inbox())


@depths
@pytest.mark.parametrize("phase", ["launch", "collect"])
def test_a_step_that_raises_answers_its_requests_and_the_engine_goes_on(
    start_engine: StartEngine, depth: int, phase: str
) -> None:
    def fail(at: str, step: Step) -> Exception | None:
        return RuntimeError("injected") if (at, step.step_id) == (phase, 4) else None

    engine = start_engine(lambda _: scripted_core(pipeline_depth=depth, fail=fail))
    inbox = Inbox()
    engine.submit(request("a", [1, 2, 3]), inbox)
    (event,) = inbox.wait_finished("a")
    assert event.finish_reason is ERROR
    assert str(event.error) == "injected"
    assert event.error is not None
    assert event.error.__traceback__ is None
    assert engine.state == "ready"
    assert engine.stats().num_failed_steps in (1, 1 + depth)  # a step in flight loses its input with it
    assert generate(engine, [[5, 6, 7]], GREEDY)[0].token_ids == solo([5, 6, 7], 12)


class CorruptRunner(ScriptedRunner):
    def collect(self, launch: Any) -> StepResult:
        if launch.step.step_id == 5:
            raise make_corruption()
        return super().collect(launch)


def make_corruption() -> CorruptionError:
    from mlxcel_paged._core import PagePool

    pool = PagePool(1)
    try:
        pool.release([0])
    except CorruptionError as error:
        return error
    raise AssertionError("releasing a free page is corruption")


class DyingRunner(ScriptedRunner):
    def collect(self, launch: Any) -> StepResult:
        if launch.step.step_id == 5:
            raise SystemExit("thread killed")
        return super().collect(launch)


@pytest.mark.parametrize("runner_type", [CorruptRunner, DyingRunner])
def test_when_the_thread_cannot_go_on_every_waiter_is_answered_at_once(
    start_engine: StartEngine, runner_type: type[ScriptedRunner]
) -> None:
    engine = start_engine(lambda _: scripted_core(runner_type=runner_type, max_batch_size=2))
    inbox = Inbox()
    names = [str(index) for index in range(6)]
    for name in names:
        engine.submit(request(name, [1, 2], 50), inbox)
    events = inbox.wait_finished(*names)
    assert {event.finish_reason for event in events} == {ERROR}
    assert engine.state == "failed"
    with pytest.raises(EngineFailedError):
        engine.submit(request("late", [1]), inbox)
    stats = engine.stats()
    assert (stats.kv_pages_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert stats.num_steps > 0


def test_a_listener_that_raises_loses_its_request_alone(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _: scripted_core())
    inbox = Inbox()
    calls = []

    def broken(event: object) -> None:
        calls.append(event)
        raise RuntimeError("listener")

    engine.submit(request("broken", [1, 2], 50), broken)
    engine.submit(request("fine", [1, 2], 20), inbox)
    inbox.wait_finished("fine")
    assert inbox.tokens("fine") == solo([1, 2], 20)
    assert len(calls) == 1


def test_an_idle_engine_takes_no_turns(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _: scripted_core())
    generate(engine, [[1, 2, 3]], GREEDY)
    check_drained(engine)
    before = engine.stats()
    time.sleep(0.2)
    assert engine.stats() == before


def test_stop_aborts_what_runs_and_drain_lets_it_end(start_engine: StartEngine, gated: type[GatedRunner]) -> None:
    for drain, reason in ((False, ABORT), (True, LENGTH)):
        gated.gate.clear()
        gated.waiting.clear()
        engine = start_engine(lambda _: scripted_core(runner_type=gated, max_batch_size=1))
        inbox = Inbox()
        engine.submit(request("running", [1, 2], 5), inbox)
        engine.submit(request("queued", [3], 5), inbox)
        assert gated.waiting.wait(60)
        assert not engine.stop(drain=drain, timeout_s=0.01)
        with pytest.raises(EngineNotReadyError, match="stopping"):
            engine.submit(request("late", [1]), inbox)
        gated.gate.set()
        assert engine.stop(drain=True, timeout_s=60)
        assert [event.finish_reason for event in inbox.wait_finished("running", "queued")] == [reason, reason]


def test_threads_are_reused_and_an_engine_starts_once(start_engine: StartEngine) -> None:
    for _ in range(3):
        engine = start_engine(lambda _: scripted_core())
        with pytest.raises(RuntimeError, match="starts once"):
            engine.start()
        assert engine.stop(timeout_s=60)
    num_threads = threading.active_count()
    for _ in range(5):
        assert start_engine(lambda _: scripted_core()).stop(timeout_s=60)
    assert threading.active_count() == num_threads


def test_a_process_ends_cleanly_after_mlx_has_compiled_on_the_engines_thread() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from engine.conftest import scripted_core
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine

def build(_):
    import mlx.core as mx
    mx.eval(mx.compile(lambda x: x * 2 + 1)(mx.ones(8)))
    return scripted_core()

engines = [Engine(EngineConfig(), build=build) for _ in range(3)]
for engine in engines:
    engine.start()
    engine.wait_until_ready(60)
engines[0].stop()
"""
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", program, tests], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_engine_that_never_started_can_be_stopped() -> None:
    engine = Engine(EngineConfig(), build=lambda _: scripted_core())
    assert engine.stop()
    assert engine.state is EngineState.STOPPED


def test_the_reason_of_an_abort_is_the_callers(start_engine: StartEngine, gated: type[GatedRunner]) -> None:
    engine = start_engine(lambda _: scripted_core(runner_type=gated))
    inbox = Inbox()
    engine.submit(request("a", [1, 2], 50), inbox)
    assert gated.waiting.wait(60)
    engine.abort("a", STOP)
    engine.abort("a")
    engine.abort("unknown")
    gated.gate.set()
    assert inbox.wait_finished("a")[0].finish_reason is STOP


@depths
def test_an_abort_storm_leaves_nothing_behind(start_engine: StartEngine, depth: int) -> None:
    engine = start_engine(lambda _: scripted_core(pipeline_depth=depth, num_pages=20), max_queued_requests=None)
    inbox = Inbox()
    source = random.Random(depth)
    prompts = {}
    for index in range(400):
        name = str(index)
        prompts[name] = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 30))]
        engine.submit(request(name, prompts[name], source.randint(1, 20)), inbox)
        if source.random() < 0.7:
            engine.abort(str(source.randint(0, index)))
        if source.random() < 0.1:
            time.sleep(0.001)
    inbox.wait_finished(*prompts)
    for name, prompt in prompts.items():
        tokens = inbox.tokens(name)
        assert tokens == solo(prompt, 20)[: len(tokens)]
    assert generate(engine, [[9, 8]] * 20, GREEDY)[7].token_ids == solo([9, 8], 12)


def test_many_threads_submit_and_abort(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _: scripted_core(), max_queued_requests=None)
    inbox = Inbox()

    def work(thread: int) -> None:
        source = random.Random(thread)
        for index in range(50):
            name = f"{thread}-{index}"
            engine.submit(request(name, [thread, index], 6), inbox)
            if source.random() < 0.5:
                engine.abort(name)
            engine.stats()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [f"{thread}-{index}" for thread in range(6) for index in range(50)]
    for name, event in zip(names, inbox.wait_finished(*names), strict=True):
        thread, index = map(int, name.split("-"))
        if event.finish_reason is LENGTH:
            assert inbox.tokens(name) == solo([thread, index], 6)
