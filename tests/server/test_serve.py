"""The process: it says where it listens and how to use it, drains on a signal, and fails with a reason."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.serve import ListenError, listen

PROGRAM = str(Path(__file__).with_name("serve_scripted.py"))


@contextmanager
def running(outcome: str, port: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, PROGRAM, str(port), outcome]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    for line in process.stderr:
        if line.startswith("listening on http://127.0.0.1:"):
            return line.split()[2]
    raise AssertionError("the server said nothing")


def curl_line(process: subprocess.Popen[str]) -> list[str]:
    for line in process.stderr:
        if line.strip().startswith("curl "):
            return shlex.split(line)
    raise AssertionError("no curl line")


def test_the_printed_curl_line_works_and_the_port_answers_before(free_client: httpx.Client) -> None:
    with running("ready") as process:
        url = url_of(process)
        assert free_client.get(f"{url}/health").status_code == 503
        _, curl_url, _, header, _, body = curl_line(process)
        assert free_client.get(f"{url}/health").status_code == 200
        name, _, value = header.partition(": ")
        response = free_client.post(curl_url, content=body, headers={name: value})
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_exit_is_clean(free_client: httpx.Client, number: signal.Signals) -> None:
    with running("ready") as process:
        url = url_of(process)
        curl_line(process)
        fields = {"prompt": "ab", "max_tokens": 60, "stream": True}
        with free_client.stream("POST", f"{url}/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stdout.read() == "engine stopped\n"


def test_a_model_that_does_not_load_ends_the_process_with_the_reason() -> None:
    with running("failed") as process:
        assert process.wait(20) == 3
        assert process.stdout.read() == "engine stopped\nerror: no such model: /nowhere\n"


def test_a_port_that_is_taken_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port}: .*--port"):
            listen(ServerConfig(port=port))
        with running("ready", port) as process:
            assert process.wait(20) == 3
            assert f"port {port}" in process.stdout.read()


def test_the_default_address_is_loopback() -> None:
    assert ServerConfig().host == "127.0.0.1"
    with listen(ServerConfig(port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "settings",
    [{"port": -1}, {"port": 65536}, {"host": ""}, {"max_body_bytes": 0}, {"served_model_name": ""}, {"max_prompts": 0}],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ServerConfig(**settings)


@pytest.fixture
def free_client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client
