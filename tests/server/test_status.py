"""/v1/status: everything of /metrics as JSON, in every state of the engine."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .running_server import RunningServer


def status(server: RunningServer) -> Any:
    response = server.client.get("/v1/status")
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    return response.json()


def test_state_and_model(server: RunningServer) -> None:
    body = status(server)
    assert (body["state"], body["message"]) == ("ready", None)
    assert body["uptime_s"] > 0
    assert body["model"] == {
        "name": "scripted/echo",
        "vocab_size": server.engine.model.vocab_size,
        "max_context": 512,
        "device": "cpu",
        "decode_storage": "paged",
        "decode_storage_reason": "scripted",
        "max_batch": 4,
    }


def test_numbers_are_those_of_the_metrics(start) -> None:
    server = start()
    server.complete(prompt="abc", max_tokens=3)
    server.engine.decode_launches["gather:kill_switch"] = 3
    metrics = status(server)["metrics"]
    assert metrics["decode_launches_total"] == {"fused": 6, "gather:kill_switch": 3}
    assert metrics["prompt_tokens_total"] == 3
    assert metrics["requests_finished_total"]["length"] == 1
    assert metrics["kv_pages_total"] == 256
    first_token = metrics["time_to_first_token_seconds"]
    assert first_token["count"] == 1
    bounds, counts = zip(*first_token["buckets"], strict=True)
    assert bounds[-1] is None
    assert list(bounds[:-1]) == sorted(bounds[:-1])
    assert list(counts) == sorted(counts)
    assert counts[-1] == 1


def test_no_metric_is_missing(server: RunningServer) -> None:
    families = list(text_string_to_metric_families(server.client.get("/metrics").text))
    names = set()
    for family in families:
        names |= {family.name} if family.type == "histogram" else {sample.name for sample in family.samples}
    names = {name.removeprefix("mlxcel_paged_") for name in names if not name.endswith("_created")}
    assert names == set(status(server)["metrics"])


def test_it_answers_while_the_model_loads(start) -> None:
    body = status(start(state="loading"))
    assert (body["state"], body["message"], body["model"]) == ("loading", "the model is still loading", None)
    assert body["metrics"]["num_requests_running"] == 0


def test_it_answers_when_the_engine_has_failed(start) -> None:
    server = start()
    server.engine.die(RuntimeError("a secret of the machine"))
    body = status(server)
    assert (body["state"], body["model"]) == ("failed", None)
    assert "the engine has failed" in body["message"]
    assert "secret" not in str(body)
