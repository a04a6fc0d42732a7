"""The kill switch and what happens to values that nobody defined."""

from __future__ import annotations

import logging

import pytest

from mlxcel_paged import env
from mlxcel_paged.env import NativeAttention


@pytest.mark.parametrize("value", ["0", "false", "off", "no", "OFF", " No "])
def test_kill_switch_values(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.NATIVE_ATTENTION, value)
    assert env.native_attention() is NativeAttention.OFF


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "On"])
def test_force_values(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.NATIVE_ATTENTION, value)
    assert env.native_attention() is NativeAttention.FORCE


def test_unset_means_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.NATIVE_ATTENTION, raising=False)
    assert env.native_attention() is NativeAttention.POLICY


def test_stray_value_is_policy_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(env.NATIVE_ATTENTION, "maybe-so")
    with caplog.at_level(logging.WARNING, logger="mlxcel_paged"):
        assert env.native_attention() is NativeAttention.POLICY
        assert env.native_attention() is NativeAttention.POLICY
    assert [record.getMessage().count("maybe-so") for record in caplog.records] == [1]


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("", True), ("1", True), ("0", False), (" Off ", False)])
def test_step_fusion_is_on_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool
) -> None:
    monkeypatch.delenv(env.STEP_FUSION, raising=False)
    if value is not None:
        monkeypatch.setenv(env.STEP_FUSION, value)
    assert env.step_fusion() is wanted
