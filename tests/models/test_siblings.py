"""Siblings under any order of calls: right results, shared launches where the array is the same, nothing kept."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_paged.models.siblings import Siblings

NUM_LAYERS = 3


class Counting:
    """A launch whose outputs are the input plus their place; refuses more than 4 rows, as a kernel refuses a prompt."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: mx.array) -> list[mx.array] | None:
        if x.shape[0] > 4:
            return None
        self.count += 1
        return [x + place for place in range(NUM_LAYERS)]


@pytest.fixture
def launch() -> Counting:
    return Counting()


@pytest.fixture
def siblings(launch: Counting) -> Siblings:
    return Siblings(launch)


def rows(value: float, num_rows: int = 2) -> mx.array:
    return mx.full((num_rows, 1, 8), value)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_first_computes_for_all(siblings: Siblings, launch: Counting, order: tuple[int, ...]) -> None:
    for value in (1.0, 2.0):
        x = rows(value)
        for place in order:
            found = siblings.take(place, x)
            assert found is not None
            assert mx.all(found == value + place)
    assert launch.count == 2
    assert siblings.num_waiting == 0


def test_equal_values_are_not_the_same_array(siblings: Siblings, launch: Counting) -> None:
    x, other = rows(1.0), rows(1.0)
    assert siblings.take(0, x) is not None
    assert siblings.take(1, other) is None, "its own output waits for another array"
    assert siblings.take(1, x) is not None
    assert launch.count == 1


def test_a_second_call_with_the_same_array_is_computed_alone(siblings: Siblings, launch: Counting) -> None:
    x = rows(1.0)
    assert siblings.take(0, x) is not None
    assert siblings.take(0, x) is None
    assert siblings.take(1, x) is not None
    assert siblings.take(2, x) is not None
    assert siblings.take(2, x) is not None, "a new round"
    assert launch.count == 2


def test_what_is_not_served_disturbs_nothing(siblings: Siblings, launch: Counting) -> None:
    x, prompt = rows(1.0), rows(1.0, num_rows=9)
    assert siblings.take(0, x) is not None
    assert [siblings.take(place, prompt) for place in range(NUM_LAYERS)] == [None] * NUM_LAYERS
    assert siblings.take(1, x) is not None
    assert launch.count == 1


def test_outputs_go_with_their_input(siblings: Siblings) -> None:
    x = rows(1.0)
    siblings.take(0, x)
    assert siblings.num_waiting == 2
    assert siblings._round is not None
    waiting = [weakref.ref(output) for output in siblings._round[1] if output is not None]
    del x
    gc.collect()
    assert siblings.num_waiting == 0
    assert [reference() for reference in waiting] == [None, None]


def test_a_new_round_drops_what_nobody_took(siblings: Siblings) -> None:
    first, second = rows(1.0), rows(2.0)
    siblings.take(0, first)
    siblings.take(0, second)
    found = siblings.take(1, second)
    assert found is not None
    assert mx.all(found == 3.0)
    del first
    gc.collect()
    assert siblings.num_waiting == 1, "the end of an array that is not waited for changes nothing"


@settings(max_examples=100, deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(0, 3), st.booleans()), max_size=30))
def test_any_order_of_calls_computes_the_same(calls: list[tuple[int, int, bool]]) -> None:
    """Arrays come, go and come again at the same addresses."""
    launch = Counting()
    siblings = Siblings(launch)
    arrays: dict[int, mx.array] = {}
    for place, name, drop in calls:
        if drop:
            arrays.pop(name, None)
        x = arrays.setdefault(name, rows(10.0 * name + launch.count, num_rows=9 if name == 3 else 2))
        found = siblings.take(place, x)
        result = x + place if found is None else found
        assert np.array_equal(np.array(result), np.array(x) + place)
        assert siblings.num_waiting < NUM_LAYERS
        del x, found, result
    arrays.clear()
    assert siblings.num_waiting == 0


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_hasty_threads")
def test_threads_never_get_outputs_of_each_other() -> None:
    class Output:
        def __init__(self, x: Any, place: int) -> None:
            self.origin = id(x), place

    class Input:
        pass

    shared: Any = Siblings(lambda x: [Output(x, place) for place in range(NUM_LAYERS)])  # type: ignore[misc,arg-type]
    wrong: list[object] = []

    def compute() -> None:
        for _ in range(20_000):
            x = Input()
            for place in range(NUM_LAYERS):
                try:
                    found = shared.take(place, x)
                except Exception as error:
                    wrong.append(error)
                    return
                if found is not None and found.origin != (id(x), place):
                    wrong.append(found.origin)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
