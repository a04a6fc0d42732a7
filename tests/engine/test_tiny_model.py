"""Whole engines over tiny random models: batches give what each request gives alone, on every arm."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.build import build_core_over
from mlxcel_paged.engine.core import EngineCore, EngineModel
from mlxcel_paged.engine.decode_tokens import DecodeTokens
from mlxcel_paged.engine.dense_runner import DenseRunner
from mlxcel_paged.engine.errors import EngineFailedError
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.engine.paged_runner import PagedRunner
from mlxcel_paged.engine.storage import StorageChoice
from mlxcel_paged.errors import BudgetTooSmallError
from mlxcel_paged.models.dense_model import DenseModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.request import FinishReason, SamplingParams
from mlxcel_paged.scheduler import PagedGroup, Scheduler, SchedulerConfig

from .conftest import Inbox, check_drained, request
from .tiny_models import MAX_CONTEXT, VOCAB_SIZE, load_tiny

ARMS: dict[str, dict[str, Any]] = {
    "fused": {"decode_storage": "paged", "arm": "fused"},
    "gather": {"decode_storage": "paged", "arm": "gather"},
    "dense": {"decode_storage": "dense"},
}
LENGTHS = (1, 2, 7, 8, 9, 24, 25, 33, 60, 100)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    source = random.Random(length * 100 + salt)
    return [source.randrange(VOCAB_SIZE - 1) for _ in range(length)]


def tiny_engine(family: str, **config: Any) -> Engine:
    def build(config: EngineConfig) -> EngineCore:
        return build_core_over(config, load_tiny(family))

    config = {"page_size": 8, "prefill_chunk": 16, **config}
    engine = Engine(EngineConfig(**config), build=build)
    engine.start()
    engine.wait_until_ready(120)
    return engine


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    """Engines by their arguments, shared by the tests of this module."""
    cached = functools.cache(tiny_engine)
    engines: list[Engine] = []

    def get(family: str, **config: Any) -> Engine:
        engine = cached(family, **config)
        if engine not in engines:
            engines.append(engine)
        return engine

    yield get
    for engine in engines:
        check_drained(engine)
        assert engine.stop(timeout_s=60)


def alone(engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    return [generate(engine, [prompt], [each])[0].token_ids for prompt, each in zip(prompts, sampling, strict=True)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_batch_gives_what_each_request_gives_alone(engine_of: Callable[..., Engine], family: str, arm: str) -> None:
    engine = engine_of(family, **ARMS[arm])
    prompts = [prompt_of(length) for length in LENGTHS]
    # Greedy, seeded and filtered rows side by side.
    kinds = [
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=33, temperature=0.8, seed=5),
        SamplingParams(max_tokens=36, temperature=1.0, top_p=0.9, seed=6),
        SamplingParams(max_tokens=30, temperature=1.2, top_k=9, min_p=0.01, seed=7),
    ]
    sampling = [kinds[index % 4] for index in range(len(prompts))]
    together = [completion.token_ids for completion in generate(engine, prompts, sampling)]
    assert together == alone(engine, prompts, sampling)
    shuffled = list(reversed(range(len(prompts))))
    again = generate(engine, [prompts[index] for index in shuffled], [sampling[index] for index in shuffled])
    assert [completion.token_ids for completion in again] == [together[index] for index in shuffled]
    check_drained(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_all_arms_give_the_same_greedy_tokens(engine_of: Callable[..., Engine], family: str) -> None:
    prompts = [prompt_of(length, salt=1) for length in LENGTHS]
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    outputs = {
        arm: [completion.token_ids for completion in generate(engine_of(family, **config), prompts, sampling)]
        for arm, config in ARMS.items()
    }
    assert outputs["fused"] == outputs["gather"]
    assert outputs["fused"] == outputs["dense"]


def test_each_arm_runs_on_its_own_path(engine_of: Callable[..., Engine]) -> None:
    for arm, config in ARMS.items():
        engine = engine_of("llama", **config)
        generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
        launches = engine.stats().decode_launches
        if arm == "dense":
            assert not launches
            assert engine.stats().kv_pages_total == 0
        else:
            assert launches
            assert all(outcome.startswith(arm) for outcome in launches)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_pool_that_is_short_preempts_and_gives_the_same_tokens(engine_of: Callable[..., Engine], family: str) -> None:
    ample = engine_of(family, **ARMS["fused"])
    assert ample.model.memory is not None
    workspace_bytes, pool_bytes = ample.model.memory.workspace_bytes, ample.model.memory.pool_bytes
    page_bytes = pool_bytes // sum(ample.model.memory.num_pages)
    num_groups = len(ample.model.memory.num_pages)
    short = engine_of(family, **ARMS["fused"], kv_cache_budget=workspace_bytes + 8 * num_groups * page_bytes)
    assert short.model.memory is not None
    assert max(short.model.memory.num_pages) == 8
    prompts = [prompt_of(3, salt) for salt in range(4)]
    sampling = SamplingParams(max_tokens=28, temperature=0.9, seed=3, ignore_eos=True)
    expected = [completion.token_ids for completion in generate(ample, prompts, sampling)]
    before = short.stats().num_preemptions
    found = generate(short, prompts, sampling)
    assert [completion.token_ids for completion in found] == expected
    assert {completion.finish_reason for completion in found} == {FinishReason.LENGTH}
    assert 0 < short.stats().num_preemptions - before <= 8
    clamped = generate(short, [prompt_of(50)], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert len(clamped.token_ids) == 64 - 50 + 1


@pytest.mark.parametrize("storage", ["paged", "dense"])
def test_one_step_ahead_gives_the_same_tokens(engine_of: Callable[..., Engine], storage: str) -> None:
    expected_engine = engine_of("gemma3_text", **ARMS["fused"])
    prompts = [prompt_of(length, salt=2) for length in LENGTHS]
    sampling = [
        SamplingParams(max_tokens=20 + index, temperature=0.0 if index % 2 else 0.9, seed=index)
        for index in range(len(prompts))
    ]
    expected = [completion.token_ids for completion in generate(expected_engine, prompts, sampling)]
    engine = Engine(EngineConfig(page_size=8, prefill_chunk=16), build=functools.partial(one_step_ahead, storage))
    engine.start()
    engine.wait_until_ready(120)
    assert [completion.token_ids for completion in generate(engine, prompts, sampling)] == expected
    check_drained(engine)
    assert engine.stop(timeout_s=60)


def one_step_ahead(storage: str, config: EngineConfig) -> EngineCore:
    """A core whose sampled tokens stay lazy and whose pipeline is one step deep, as on a GPU."""
    loaded = load_tiny("gemma3_text")
    tokens = DecodeTokens(mx, on_cpu=False)
    groups: list[PagedGroup] = []
    runner: PagedRunner | DenseRunner
    if storage == "paged":
        model = PagedModel(loaded, num_pages=200, page_size=8, max_slots=4, max_context=MAX_CONTEXT)
        groups = [
            PagedGroup(pool, plan, 8, group.window)
            for pool, plan, group in zip(model.page_pools, model.plans, model.layout.groups, strict=True)
        ]
        runner = PagedRunner(model, tokens)
    else:
        runner = DenseRunner(DenseModel(loaded), tokens)
    limits = SchedulerConfig(
        max_batch_size=4,
        max_context=MAX_CONTEXT,
        vocab_size=VOCAB_SIZE,
        prefill_chunk=16,
        eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
        pipeline_depth=1,
    )
    view = EngineModel("tiny", loaded.tokenizer, VOCAB_SIZE, MAX_CONTEXT, "cpu", StorageChoice("dense", 4, ""), None)
    return EngineCore(view, Scheduler(limits, groups), runner)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_pools_take_what_was_planned(family: str) -> None:
    config = EngineConfig(page_size=8, prefill_chunk=16, kv_cache_budget=1 << 20)
    core = build_core_over(config, load_tiny(family))
    memory = core.model.memory
    assert memory is not None
    assert isinstance(core.runner, PagedRunner)
    assert core.runner._model.pools.nbytes == memory.pool_bytes
    assert memory.total_bytes <= 1 << 20
    assert core.scheduler.stats().num_pages == memory.num_pages


def test_the_end_of_sequence_token_ends_a_request(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", **ARMS["fused"])
    sampling = [SamplingParams(max_tokens=200, temperature=1.5, seed=seed) for seed in range(8)]
    completions = generate(engine, [[1, 2]] * 8, sampling)
    for completion in completions:
        if completion.finish_reason is FinishReason.STOP:
            assert completion.token_ids[-1] == VOCAB_SIZE - 1
        assert VOCAB_SIZE - 1 not in completion.token_ids[:-1]
    assert any(completion.finish_reason is FinishReason.STOP for completion in completions)


def test_aborts_at_random_moments_leave_the_neighbours_alone(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("gemma3_text", **ARMS["fused"])
    source = random.Random(4)
    prompts = {str(index): prompt_of(source.choice(LENGTHS), salt=9) for index in range(60)}
    expected = {
        name: generate(engine, [prompt], SamplingParams(max_tokens=12, temperature=0.0))[0].token_ids
        for name, prompt in list(prompts.items())[:10]
    }
    inbox = Inbox()
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, 12), inbox)
    for name in source.sample(list(prompts), 40):
        inbox.wait_for(lambda: len(inbox.events) > source.randrange(200))
        engine.abort(name)
    inbox.wait_finished(*prompts)
    for name, tokens in expected.items():
        assert inbox.tokens(name) == tokens[: len(inbox.tokens(name))]
    check_drained(engine)


@pytest.mark.parametrize(
    ("config", "cause", "match"),
    [
        ({"kv_cache_budget": 0}, BudgetTooSmallError, "smallest"),
        ({"kv_cache_budget": 1 << 60}, ValueError, "left beside the weights"),
        ({"max_context": 257}, ValueError, "at most 256.* got 257"),
    ],
)
def test_a_configuration_that_cannot_work_fails_with_the_reason(
    config: dict[str, Any], cause: type[Exception], match: str
) -> None:
    with pytest.raises(EngineFailedError, match=match) as caught:
        tiny_engine("llama", **config)
    assert isinstance(caught.value.__cause__, cause)


def test_a_cached_prefix_gives_the_tokens_of_a_cold_run(engine_of: Callable[..., Engine]) -> None:
    cold = engine_of("llama", **ARMS["fused"], prefix_cache=False)
    warm = engine_of("llama", **ARMS["fused"])
    shared = prompt_of(70, salt=3)
    prompts = [[*shared[:length], *prompt_of(9, salt)] for salt, length in enumerate((70, 64, 63, 65, 33, 8, 7, 1, 70))]
    sampling = [
        SamplingParams(max_tokens=30, temperature=0.0 if index % 2 else 0.8, seed=index)
        for index in range(len(prompts))
    ]
    expected = [completion.token_ids for completion in generate(cold, prompts, sampling)]
    for _ in range(2):
        assert [completion.token_ids for completion in generate(warm, prompts, sampling)] == expected
    for prompt, each, tokens in zip(prompts, sampling, expected, strict=True):
        turn = [*prompt, *tokens, 5]
        found = [generate(engine, [turn], [each])[0].token_ids for engine in (cold, warm)]
        assert found[0] == found[1]
    assert warm.stats().kv.num_prefix_hits > 0
    assert cold.stats().kv.num_prefix_queries == 0
    check_drained(warm)


def test_a_model_with_windows_caches_no_prefix(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("gemma3_text", **ARMS["fused"])
    for _ in range(2):
        generate(engine, [prompt_of(60)], SamplingParams(max_tokens=3, temperature=0.0))
    assert engine.stats().kv.num_prefix_queries == 0
    assert engine.stats().kv.total("num_cached") == 0
