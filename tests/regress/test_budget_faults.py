"""B52: budgets around the workspace neither wrap nor turn into "no bound"; each is refused by name or served."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.conftest import check_drained
from engine.tiny_models import load_tiny
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.build import build_core_over
from mlxcel_paged.engine.core import EngineCore
from mlxcel_paged.engine.errors import EngineFailedError
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.errors import BudgetTooSmallError
from mlxcel_paged.request import ContextLengthExceededError, SamplingParams

PAGE = 8


def start(budget: int | None) -> Engine:
    def build(config: EngineConfig) -> EngineCore:
        return build_core_over(config, load_tiny("llama"))

    engine = Engine(EngineConfig(page_size=PAGE, prefill_chunk=16, kv_cache_budget=budget), build=build)
    engine.start()
    engine.wait_until_ready(120)
    return engine


def test_b52_every_budget_is_refused_by_name_or_holds_what_it_says() -> None:
    ample = start(None)
    assert ample.model.memory is not None
    memory = ample.model.memory
    assert memory.is_auto
    workspace, page = memory.workspace_bytes, memory.pool_bytes // memory.num_pages[0]
    assert ample.stop(timeout_s=60)
    for budget in (0, 1, workspace - 1, workspace, workspace + page - 1):
        with pytest.raises(EngineFailedError, match=str(workspace + page)) as caught:
            start(budget)
        assert isinstance(caught.value.__cause__, BudgetTooSmallError)
        assert caught.value.__cause__.smallest_usable_bytes == workspace + page
    for budget, num_pages in ((workspace + page, 1), (workspace + 2 * page - 1, 1), (workspace + 3 * page, 3)):
        engine = start(budget)
        assert engine.model.memory is not None
        assert engine.model.memory.num_pages == (num_pages,)
        assert engine.model.memory.total_bytes <= budget
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        [completion] = generate(engine, [[1, 2, 3]], sampling)
        assert len(completion.token_ids) == num_pages * PAGE - 3 + 1
        with pytest.raises(ContextLengthExceededError, match=f"KV pool of {num_pages * PAGE} tokens"):
            generate(engine, [[1] * (num_pages * PAGE + 1)], sampling)
        check_drained(engine)
        assert engine.stop(timeout_s=60)
