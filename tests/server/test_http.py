"""Bodies, methods, paths, headers: every error has OpenAI's body, and the server lives on."""

from __future__ import annotations

import json
import socket
import time

import pytest

from .running_server import RunningServer, read_all

URL = "/v1/completions"
MALFORMED = [
    b"", b" ", b"{", b"{}x", b"[]", b"null", b"1", b'"x"', b"true", b"{'prompt': 'x'}", b'{"prompt": "x",}',
    b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x", "metadata": {"a": 1, "a": 2}}', b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\xbd"}', b'\xef\xbb\xbf{"prompt": "x"}', '{"prompt": "x"}'.encode("utf-16"),
    b'{"prompt": "a\nb"}', b'{"prompt": "\\x"}', b'{"seed": ' + b"9" * 5000 + b"}", b"[" * 100_000,
    b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"\x00",
]  # fmt: skip


def assert_openai_error(response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:24]))
@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
def test_malformed_bodies(server: RunningServer, url: str, body: bytes) -> None:
    error = assert_openai_error(server.client.post(url, content=body), 400)
    assert error["code"] == "invalid_json"


def test_a_number_that_overflows_is_out_of_range(server: RunningServer) -> None:
    error = assert_openai_error(server.client.post(URL, content=b'{"prompt": "x", "temperature": 1e999}'), 400)
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    "path", ["/index.html", "/v1", "/v1/nothing", "/v1/completions/", "/V1/models", "/%00", "/v1/модель", "/assets"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_paths(server: RunningServer, method: str, path: str) -> None:
    error = assert_openai_error(server.client.request(method, path), 404)
    assert error["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", URL, "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("DELETE", "/health", "GET"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/metrics", "GET"),
        ("OPTIONS", URL, "POST"),
        ("PATCH", "/v1/models/default", "GET"),
    ],
)
def test_wrong_methods(server: RunningServer, method: str, path: str, allowed: str) -> None:
    response = server.client.request(method, path)
    assert_openai_error(response, 405)
    assert allowed in response.headers["allow"]


def test_a_body_that_is_too_large_is_413_however_it_is_sent(server: RunningServer) -> None:
    limit = server.config.max_body_bytes
    fits = json.dumps({"prompt": "x", "max_tokens": 1, "user": ""})
    fits = fits.replace('""', '"' + "u" * (limit - len(fits)) + '"')
    assert len(fits) == limit
    assert server.client.post(URL, content=fits).status_code == 200
    assert_openai_error(server.client.post(URL, content=fits + " "), 413)

    def chunks():
        for _ in range(5):
            yield b" " * (limit // 4)

    assert_openai_error(server.client.post(URL, content=chunks()), 413)
    assert_openai_error(server.client.post(URL, content=b" " * (8 * limit)), 413)
    assert server.complete(prompt="x", max_tokens=1)["choices"][0]["text"] == "x"


def test_a_client_that_asks_before_it_sends_a_large_body_is_told_at_once(server: RunningServer) -> None:
    with server.connect() as connection:
        length = server.config.max_body_bytes + 1
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_415(server: RunningServer) -> None:
    response = server.client.post(URL, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert_openai_error(response, 415)


def test_the_content_type_does_not_matter(server: RunningServer) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        body = b'{"prompt": "ab", "max_tokens": 2}'
        response = server.client.post(URL, content=body, headers={"content-type": content_type})
        assert response.json()["choices"][0]["text"] == "ab"


def test_a_connection_is_kept_for_the_next_request_after_errors(server: RunningServer) -> None:
    with server.connect() as connection, connection.makefile("rb") as answers:
        for path, status in (("/nothing", 404), ("/health", 200), ("/v1/completions", 405), ("/health", 200)):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answers.readline().startswith(f"HTTP/1.1 {status} ".encode())
            length = 0
            while (line := answers.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(answers.read(length))


def test_small_writes_are_sent_at_once(server: RunningServer) -> None:
    server.client.get("/health")
    connections = list(server.server.server_state.connections)
    assert connections, "the client has closed its connection"
    for protocol in connections:
        connection = protocol.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("garbage", [b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n", b"POST / HTTP/9.9\r\nx\r\n\r\n"])
def test_what_is_no_http_is_refused_and_harms_nobody(server: RunningServer, garbage: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(garbage)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    assert server.client.get("/health").status_code == 200


def test_endless_headers_are_refused(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (100 << 10))
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_stalls_in_its_body_holds_nobody_up(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert server.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"


def test_every_answer_has_a_request_id_of_its_own(server: RunningServer) -> None:
    answers = [server.client.get(path) for path in ("/health", "/health", "/nothing", "/metrics")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


def test_the_models_are_listed(server: RunningServer) -> None:
    body = server.client.get("/v1/models").json()
    assert body["object"] == "list"
    [model] = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("scripted/echo", "model", "mlxcel-paged")
    assert model["created"] <= time.time()
    for name in ("scripted/echo", "default"):
        assert server.client.get(f"/v1/models/{name}").json() == model
    assert_openai_error(server.client.get("/v1/models/other/model"), 404)
