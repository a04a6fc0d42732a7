"""The access log: one line per request, and nothing of what was asked or answered."""

from __future__ import annotations

import logging

import pytest

from .running_server import RunningServer, wait_until


def test_no_prompt_query_or_answer_is_logged(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlxcel_paged")
    server.complete(prompt="the secret", max_tokens=10)
    server.events("/v1/completions", prompt="the secret", max_tokens=10)
    server.post("/v1/completions", prompt="the secret", stop="")
    server.post("/v1/completions", prompt="the secret" * 100)
    server.client.get("/health?key=the-secret")
    server.client.get("/%0aforged line")
    wait_until(lambda: "forged" in caplog.text, "the last line is logged")
    lines = [record.getMessage() for record in caplog.records if record.name == "mlxcel_paged.access"]
    assert [line.split()[2] for line in lines] == ["200", "200", "400", "400", "200", "404"]
    assert "secret" not in caplog.text
    assert not any("\n" in line for line in lines)


def test_a_client_that_left_is_logged_as_such(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxcel_paged.access")
    server.engine.hold()
    server.send_raw("/v1/completions", b'{"prompt": "x"}').close()
    wait_until(lambda: " 499 " in caplog.text, "a line with 499")
    server.engine.go_on()
