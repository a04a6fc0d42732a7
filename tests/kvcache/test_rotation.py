"""Queries and keys that await RoPE: what they refuse, and that attention takes them in pairs alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxcel_paged.attention.launch import attend
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache
from mlxcel_paged.kvcache.rotation import Rotation, RotationError, Unrotated, unit_pairs


class _Step:
    """Answers attention with the queries."""

    offset = 0

    def attend(self, handle: KeyHandle, queries: mx.array, **options: Any) -> mx.array:
        return queries


X = mx.zeros((1, 2, 1, 64))


def rotation() -> Rotation:
    return Rotation(dims=64, traditional=False, base=10_000.0, scale=1.0, freqs=None)


def handle(keys: mx.array | Unrotated) -> KeyHandle:
    found = PagedLayerCache(0, _Step()).update_and_fetch(keys, X)[0]
    assert isinstance(found, KeyHandle)
    return found


def launched(queries: mx.array | Unrotated, keys: KeyHandle) -> mx.array:
    return attend(queries, keys, keys.values, scale=1.0, mask=None)


def test_a_pair_reaches_the_step_bare() -> None:
    turn = rotation()
    queries = X + 1
    keys = handle(Unrotated(X, turn))
    assert keys.k_new is X
    assert keys.rotation is turn
    assert launched(Unrotated(queries, turn), keys) is queries
    plain = handle(X)
    assert plain.rotation is None
    assert launched(queries, plain) is queries


def test_pairs_that_await_different_rotations_are_refused() -> None:
    turn = rotation()
    for queries, keys in (
        (Unrotated(X, turn), X),
        (X, Unrotated(X, turn)),
        (Unrotated(X, turn), Unrotated(X, rotation())),
    ):
        with pytest.raises(RotationError, match="layer 0"):
            launched(queries, handle(keys))


def test_anything_else_with_them_fails() -> None:
    queries = Unrotated(X, rotation())
    for use in (
        lambda: queries.shape,
        lambda: queries * 2,  # type: ignore[operator]
        lambda: X + queries,  # type: ignore[operator]
        lambda: mx.softmax(queries),  # type: ignore[call-overload]
        lambda: queries[0],  # type: ignore[index]
    ):
        with pytest.raises((RotationError, TypeError, ValueError)):
            use()


def test_rotations_that_turn_alike_have_one_key() -> None:
    freqs = mx.array([1.0, 2.0, 3.0, 4.0])

    def of(**changes: Any) -> Any:
        return Rotation(**{"dims": 8, "traditional": False, "base": 100.0, "scale": 1.0, "freqs": None, **changes}).key

    assert of() == of()
    changes: list[dict[str, Any]] = [
        {}, {"dims": 6}, {"traditional": True}, {"base": 10.0}, {"scale": 2.0}, {"base": None, "freqs": freqs},
        {"base": None, "freqs": freqs + 1},
    ]  # fmt: skip
    assert len({of(**change) for change in changes}) == len(changes)
    assert of(base=None, freqs=freqs) == of(base=None, freqs=freqs + 0)


def test_unit_pairs() -> None:
    assert unit_pairs(2, 4).tolist() == [[[[1, 0, 1, 0]]], [[[1, 0, 1, 0]]]]
