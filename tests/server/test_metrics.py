"""/metrics: names, labels and values."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer, wait_until

NAMES = {
    "mlxcel_paged_decode_launches": "counter",
    "mlxcel_paged_kv_pages_used": "gauge",
    "mlxcel_paged_kv_pages_total": "gauge",
    "mlxcel_paged_num_requests_running": "gauge",
    "mlxcel_paged_num_requests_waiting": "gauge",
    "mlxcel_paged_preemptions": "counter",
    "mlxcel_paged_prefilled_tokens": "counter",
    "mlxcel_paged_steps": "counter",
    "mlxcel_paged_failed_steps": "counter",
    "mlxcel_paged_prompt_tokens": "counter",
    "mlxcel_paged_generation_tokens": "counter",
    "mlxcel_paged_requests_finished": "counter",
    "mlxcel_paged_requests_rejected": "counter",
    "mlxcel_paged_time_to_first_token_seconds": "histogram",
    "mlxcel_paged_inter_token_latency_seconds": "histogram",
    "mlxcel_paged_e2e_request_latency_seconds": "histogram",
    "mlxcel_paged_time_per_output_token_seconds": "histogram",
    "mlxcel_paged_request_queue_time_seconds": "histogram",
    "mlxcel_paged_request_prefill_time_seconds": "histogram",
    "mlxcel_paged_request_decode_time_seconds": "histogram",
    "mlxcel_paged_request_rejection_time_seconds": "histogram",
    "mlxcel_paged_num_queued_tokens": "gauge",
    "mlxcel_paged_kv_pages_cached": "gauge",
    "mlxcel_paged_kv_pages_reserved": "gauge",
    "mlxcel_paged_kv_cache_usage_perc": "gauge",
    "mlxcel_paged_mlx_memory_bytes": "gauge",
    "mlxcel_paged_prefix_cache_queries": "counter",
    "mlxcel_paged_prefix_cache_hits": "counter",
    "mlxcel_paged_prefix_cache_evicted_pages": "counter",
    "mlxcel_paged_requests_aborted": "counter",
    "mlxcel_paged_stalled_steps": "counter",
    "mlxcel_paged_plan_changes": "counter",
}


def test_the_names_and_types(server: RunningServer) -> None:
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family.type for family in text_string_to_metric_families(response.text)}
    assert NAMES.items() <= families.items()


def test_launches_are_counted_by_outcome(start) -> None:
    server = start()
    fused = 'mlxcel_paged_decode_launches_total{outcome="fused"}'
    assert server.metric(fused) == 0
    server.complete(prompt="abc", max_tokens=3)
    assert server.metric(fused) == 6
    server.engine.decode_launches["gather:kill_switch"] = 3
    assert server.metric('mlxcel_paged_decode_launches_total{outcome="gather:kill_switch"}') == 3


def test_gauges_follow_the_engine_and_are_exactly_zero_when_idle(start) -> None:
    server = start(parallel=1)
    assert server.metric("mlxcel_paged_kv_pages_total") == 256
    server.engine.hold()
    connections = [server.send_raw("/v1/completions", b'{"prompt": "abc", "max_tokens": 9}') for _ in range(3)]
    wait_until(lambda: server.metric("mlxcel_paged_num_requests_waiting") == 3, "all wait")
    server.engine.step_s = 0.2
    server.engine.go_on()
    wait_until(lambda: server.metric("mlxcel_paged_num_requests_running") == 1, "one runs")
    assert server.metric("mlxcel_paged_kv_pages_used") >= 1
    server.engine.step_s = 0
    server.wait_idle()
    for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used"):
        assert f"mlxcel_paged_{name} 0.0\n" in server.client.get("/metrics").text
    for connection in connections:
        connection.close()


def test_tokens_and_reasons_are_counted(start) -> None:
    server = start()
    server.complete(prompt="abc", max_tokens=3)
    server.complete(prompt=["ab", "cd"], max_tokens=4, stop="b")
    server.events("/v1/completions", prompt="x", max_tokens=2)
    assert server.post("/v1/completions", prompt="").status_code == 400
    assert server.metric("mlxcel_paged_prompt_tokens_total") == 3 + 4 + 1
    # "ab" ends at its second token; the engine may have made more, which nobody gets.
    assert server.metric("mlxcel_paged_generation_tokens_total") == 3 + 2 + 4 + 2
    assert server.metric('mlxcel_paged_requests_finished_total{reason="length"}') == 3
    assert server.metric('mlxcel_paged_requests_finished_total{reason="stop"}') == 1
    assert server.metric('mlxcel_paged_requests_finished_total{reason="abort"}') == 0
    assert server.metric('mlxcel_paged_requests_rejected_total{reason="invalid_value"}') == 1
    assert server.metric("mlxcel_paged_time_to_first_token_seconds_count") == 4
    assert server.metric("mlxcel_paged_inter_token_latency_seconds_count") == 11 - 4
    assert server.metric("mlxcel_paged_e2e_request_latency_seconds_count") == 4


def test_servers_of_one_process_count_apart(start) -> None:
    left, right = start(), start()
    left.complete(prompt="abc", max_tokens=3)
    assert right.metric("mlxcel_paged_prompt_tokens_total") == 0


def test_cache_stats_are_those_of_the_engine(start) -> None:
    server = start(parallel=1)
    body = server.client.get("/v1/cache/stats").json()
    assert body["object"] == "cache.stats"
    [group] = body["groups"]
    assert group["pages_used"] + group["pages_cached"] + group["pages_free"] == group["pages_total"] == 256
    assert (body["budget_bytes"], body["workspace_bytes"]) == (1 << 20, 1 << 10)
    server.engine.state = "loading"
    assert server.client.get("/v1/cache/stats").status_code == 503
    server.engine.state = "ready"


def test_what_is_open_is_counted_and_returns_to_nothing(start) -> None:
    server = start(ServerConfig(debug_endpoints=True))
    idle = server.client.get("/v1/debug/state").json()
    assert (idle["open_sequences"], idle["arriving_sequences"], idle["generations"], idle["alive"]) == (0, 0, 0, 0)
    server.engine.hold()
    connection = server.send_raw("/v1/completions", b'{"prompt": ["abc", "d"], "max_tokens": 9}')
    wait_until(lambda: server.engine.num_alive == 2, "both wait")
    busy = server.client.get("/v1/debug/state").json()
    assert (busy["open_sequences"], busy["arriving_sequences"], busy["generations"], busy["alive"]) == (2, 0, 1, 2)
    assert busy["tasks"] > idle["tasks"]
    connection.close()
    del idle["threads"]  # the text thread is made for the first request
    wait_until(lambda: server.client.get("/v1/debug/state").json().items() >= idle.items(), "all is as before")


def test_the_plan_log_is_there_only_when_asked_for(start) -> None:
    assert start().client.get("/v1/debug/plan").status_code == 404
    body = start(ServerConfig(debug_endpoints=True)).client.get("/v1/debug/plan").json()
    assert body["events"] == [{"cause": "admit"}]
    assert "counts" in body
