"""Who may ask: API keys, pages of other origins, and the names of requests."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import pytest

from mlxcel_paged import env
from mlxcel_paged.cli import serve
from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.serve import example

from .running_server import RunningServer, read_all

KEY = "sk-first_key.1"
LOCKED = ServerConfig(api_keys=(KEY, "sk-second"), debug_endpoints=True)
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
    ("GET", "/v1/cache/stats"), ("GET", "/v1/status"), ("GET", "/v1/debug/plan"), ("GET", "/metrics"),
    ("GET", "/no/such/path"), ("OPTIONS", "/v1/completions"), ("GET", "/health/"), ("GET", "/health/x"),
    ("GET", "/assets"),
]  # fmt: skip


@pytest.fixture
def locked(start) -> RunningServer:
    return start(LOCKED)


def ask(server: RunningServer, authorization: str | None, path: str = "/v1/models", method: str = "GET") -> Any:
    headers = {} if authorization is None else {"authorization": authorization}
    return server.client.request(method, path, headers=headers)


WRONG = [
    None, "", "Bearer", "Basic x", KEY, "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Token {KEY}",
    "Bearer é",
]  # fmt: skip


@pytest.mark.parametrize("authorization", WRONG)
def test_without_a_key_every_route_is_401(locked: RunningServer, authorization: str | None) -> None:
    for method, path in ROUTES:
        response = locked.client.request(
            method, path, headers={} if authorization is None else {"authorization": authorization.encode("latin-1")}
        )
        assert response.status_code == 401, (method, path)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("missing_api_key", "invalid_api_key")
        assert error["param"] is None
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert "first_key" not in response.text
    assert locked.engine.num_submitted == 0


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", "Bearer  sk-second"])
def test_any_of_the_keys_opens(locked: RunningServer, authorization: str) -> None:
    assert ask(locked, authorization).status_code == 200
    assert ask(locked, authorization, "/metrics").status_code == 200
    assert ask(locked, authorization, "/no/such/path").status_code == 404
    response = locked.client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"authorization": authorization}
    )
    assert response.json()["choices"][0]["text"] == "a"


def test_probes_are_open_and_metrics_if_asked(start, locked: RunningServer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/", "/assets/page.js"):
        assert ask(locked, None, path).status_code == 200
    opened = start(ServerConfig(api_keys=(KEY,), open_metrics=True))
    assert ask(opened, None, "/metrics").status_code == 200
    assert ask(opened, None).status_code == 401
    assert opened.metric('mlxcel_paged_requests_rejected_total{reason="missing_api_key"}') == 1


def test_keys_are_in_no_log_and_no_repr(locked: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(locked, f"Bearer {KEY}")
        ask(locked, "Bearer sk-wrong-key")
    assert KEY not in caplog.text
    assert "sk-wrong-key" not in caplog.text
    assert KEY not in repr(LOCKED)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\u00e9", "x" * 513])
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_keys") as caught:
        ServerConfig(api_keys=(key,))
    assert "512" in str(caught.value)


def arguments(*flags: str) -> Any:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(flags)


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.API_KEY, raising=False)
    assert serve._api_keys(arguments()) == ()
    monkeypatch.setenv(env.API_KEY, " from-env\n")
    assert serve._api_keys(arguments()) == ("from-env",)
    assert serve._api_keys(arguments("--api-key", "a", "--api-key", "b")) == ("a", "b")
    monkeypatch.setenv(env.API_KEY, "")
    with pytest.raises(ValueError, match="empty"):
        serve._api_keys(arguments())


def test_other_origins_read_nothing_unless_they_are_named(start, server: RunningServer) -> None:
    origin = {"origin": "https://app.example"}
    assert not [name for name in server.client.get("/v1/models", headers=origin).headers if "access-control" in name]
    assert server.client.options("/v1/models", headers=origin).status_code == 405
    named = start(ServerConfig(cors_origins=("https://app.example",), api_keys=(KEY,)))
    preflight = {
        **origin, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }  # fmt: skip
    response = named.client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
    # A page must be able to see why it is refused.
    refused = named.client.get("/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
    other = {**preflight, "origin": "https://evil.example"}
    assert named.client.options("/v1/chat/completions", headers=other).status_code == 400
    answered = named.client.get("/v1/models", headers={**other, "authorization": f"Bearer {KEY}"})
    assert "access-control-allow-origin" not in answered.headers


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a.b/c", "", "https://a b"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="origin"):
        ServerConfig(cors_origins=(origin,))


@pytest.mark.parametrize("name", ["a", "req_1.2:3/4+5=6@7-8", "A" * 128, "Root=1-5759e988-bd862e3fe1be46a994272793"])
def test_a_harmless_request_id_comes_back(server: RunningServer, name: str) -> None:
    for path in ("/v1/models", "/nowhere"):
        assert server.client.get(path, headers={"x-request-id": name}).headers["x-request-id"] == name


@pytest.mark.parametrize("name", ["", " ", "a b", "A" * 129, "a;b", 'a"', "<x>", "a\tb", "\u00e9", "a\x1b[31m"])
def test_any_other_request_id_is_replaced(server: RunningServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    request = (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: "
        + name.encode("latin-1")
        + b"\r\nConnection: close\r\n\r\n"
    )
    with caplog.at_level(logging.INFO), server.connect() as connection:
        connection.sendall(request)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 400"):  # h11 refuses control characters in headers
        assert json.loads(body)["error"]["code"] == "invalid_http"
        return
    [line] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
    given = line.partition(b":")[2].strip()
    assert len(given) == 32
    assert given.isalnum()
    assert given.decode() in caplog.text


@pytest.mark.parametrize(
    ("host", "keys", "is_exposed"),
    [("127.0.0.1", (), False), ("127.1.2.3", (), False), ("::1", (), False), ("localhost", (), False),
     ("0.0.0.0", (), True), ("::", (), True), ("10.0.0.3", (), True), ("0.0.0.0", ("k",), False)],
)  # fmt: skip
def test_a_server_that_others_reach_without_a_key_is_called_exposed(
    host: str, keys: tuple[str, ...], is_exposed: bool
) -> None:
    assert ServerConfig(host=host, api_keys=keys).is_exposed is is_exposed


def test_the_printed_example_leaves_the_key_to_the_shell(server: RunningServer) -> None:
    assert f'-H "Authorization: Bearer ${env.API_KEY}"' in example(server.engine, "http://x", needs_key=True)
    assert "Authorization" not in example(server.engine, "http://x")
