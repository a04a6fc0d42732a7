"""`mlxcel-paged bench serve` as it is run: arms, exit status, and servers that end with it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_paged.bench.serve.server_process import ServerStartError, running_server
from mlxcel_paged.cli.main import EXIT_USAGE, main
from mlxcel_paged.server.config import ServerConfig
from server.running_server import RunningServer, wait_until
from server.scripted_engine import ScriptedEngine

_SMALL = ["--clients", "2", "--context", "40", "--output-len", "6", "--alternations", "1", "--num-warmups", "0"]


def bench(*words: str, json_flag: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxcel_paged", "bench", "serve", *(["--json"] if json_flag else []), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    server = RunningServer(ScriptedEngine(step_s=0.002))
    yield server
    server.wait_idle()
    server.close()
    server.engine.stop()


@pytest.mark.model
def test_arms_are_started_take_turns_and_agree(tmp_path: Path) -> None:
    finished = bench(*_SMALL, "--check-tokens", "--output-dir", str(tmp_path), "--", "--page-size", "16")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    arms = {result["arm"]: result for result in document["results"]}
    assert list(arms) == ["dense", "gather", "fused"]
    assert set(arms["fused"]["launches"]) == {"fused"}
    assert set(arms["gather"]["launches"]) == {"gather:kill_switch"}
    assert not arms["dense"]["launches"]
    for result in arms.values():
        assert (result["completed"], result["failed"]) == (2, 0)
        assert (result["total_input"], result["total_output"]) == (80, 12)
    assert {(ratio["of"], ratio["to"]) for ratio in document["ratios"]} == {("fused", "dense"), ("fused", "gather")}
    assert document["problems"] == []
    assert (tmp_path / "throughput.png").exists()


@pytest.mark.model
def test_arm_on_another_path_fails_the_run() -> None:
    finished = bench(*_SMALL, "--arms", "fused", "--one-at-a-time", "--", "--decode-storage", "dense")
    assert finished.returncode == 1
    (problem,) = json.loads(finished.stdout)["problems"]
    assert "arm fused did not run on its own path" in problem
    assert problem in " ".join(finished.stderr.split())


@pytest.mark.model
def test_server_ends_when_the_benchmark_is_killed() -> None:
    script = (
        "import time\n"
        "from mlxcel_paged.bench.serve.server_process import running_server\n"
        "with running_server([], environment={}, start_timeout_s=120) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(120)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
        parent.kill()
    wait_until(lambda: refuses(port), "the server has ended", timeout_s=60)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return True
    return False


def test_server_that_does_not_start_tells_why() -> None:
    with (
        pytest.raises(ServerStartError, match=r"(?s)ended with status 2.*nowhere"),
        running_server(["--model", "/nowhere"], environment={}, start_timeout_s=120),
    ):
        pass


def test_server_that_is_too_slow_is_given_up() -> None:
    with (
        pytest.raises(ServerStartError, match="--start-timeout"),
        running_server([], environment={}, start_timeout_s=0.01),
    ):
        pass


def test_running_server_is_measured_by_its_url(server: RunningServer) -> None:
    url = f"http://{server.host}:{server.port}/v1/"
    finished = bench(
        *_SMALL, "--num-prompts", "5", "--request-rate", "50", "--goodput", "e2el:60000", "--base-url", url
    )
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    (result,) = document["results"]
    assert document["model"] == "scripted/echo"
    assert (result["arm"], result["completed"], result["total_output"]) == ("server", 5, 30)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert server.engine.num_submitted == 5


def test_key_is_sent_to_a_server_that_asks_for_one() -> None:
    server = RunningServer(ScriptedEngine(), ServerConfig(api_keys=("sesame",)))
    try:
        url = f"http://{server.host}:{server.port}"
        refused = bench(*_SMALL, "--base-url", url)
        assert refused.returncode == EXIT_USAGE
        assert "--api-key" in refused.stderr
        finished = bench(*_SMALL, "--base-url", url, "--api-key", "sesame")
        assert finished.returncode == 0, finished.stderr
        assert "sesame" not in finished.stdout
        server.wait_idle()
    finally:
        server.close()
        server.engine.stop()


def test_server_that_still_loads_is_waited_for(server: RunningServer) -> None:
    server.engine.state = "loading"
    loaded = threading.Timer(1.0, setattr, (server.engine, "state", "ready"))
    loaded.start()
    finished = bench(*_SMALL, "--base-url", f"http://{server.host}:{server.port}")
    loaded.join()
    assert finished.returncode == 0, finished.stderr


def test_trace_is_replayed(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 40 * i, "input_length": 600, "output_length": 30 + i, "hash_ids": [0, i]} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    url = f"http://{server.host}:{server.port}"
    words = ["--trace", str(trace), "--num-prompts", "4", "--length-scale", "0.1", "--alternations", "2"]
    finished = bench(*words, "--num-warmups", "0", "--base-url", url)
    assert finished.returncode == 0, finished.stderr
    (result,) = json.loads(finished.stdout)["results"]
    assert (result["completed"], result["total_input"], result["total_output"]) == (8, 480, 24)
    prompts = [request.prompt_token_ids for request in server.engine.last_requests]
    assert prompts[0][:51] == prompts[1][:51]
    assert prompts[0][51:] != prompts[1][51:]


def test_failed_requests_fail_the_run_unless_allowed(server: RunningServer) -> None:
    server.engine.max_waiting = 0
    url = f"http://{server.host}:{server.port}"
    finished = bench(*_SMALL, "--base-url", url, json_flag=False)
    assert finished.returncode == 1
    assert "HTTP 429" in finished.stderr
    assert "0/2" in finished.stdout
    assert bench(*_SMALL, "--base-url", url, "--allow-failures").returncode == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--base-url", "http://127.0.0.1:9", "--arms", "dense,fused"], "--base-url"),
        (["--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--trace", "x.csv", "--context", "8"], "--trace"),
        (["--time-scale", "2"], "--time-scale"),
        (["--output-dir", "/dev/null/nothing"], "--output-dir"),
    ],
)
def test_wrong_usage_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == EXIT_USAGE
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--goodput", "ttft"],
        ["--goodput", "speed:1"],
        ["--request-rate", "0"],
        ["--arms", "dense,dense"],
        ["--seed", "-1"],
    ],
)
def test_wrong_value_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "serve", *words])
    assert exit_info.value.code == EXIT_USAGE
