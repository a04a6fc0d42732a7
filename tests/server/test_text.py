"""Text over the wire: whole characters in every event, stop strings cut at every border, nothing lost."""

from __future__ import annotations

import json
import threading
from itertools import combinations

import pytest

from text.byte_tokenizer import spell

from .running_server import RunningServer, read_all, stream_text

URL = "/v1/completions"
TEXTS = ["😀", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪🇯🇵", "漢字かな", "e\u0301", "a😀b漢c", "\u2028\u0085\r\n\x00\x1f"]


def ids(server: RunningServer, text: str | bytes) -> list[int]:
    return spell(server.engine.tokenizer, text)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_spelled_byte_by_byte_arrive_whole(server: RunningServer, text: str) -> None:
    fields = {"prompt": ids(server, text), "max_tokens": len(text.encode())}
    assert server.complete(**fields)["choices"][0]["text"] == text
    events = server.events(URL, **fields)
    assert stream_text(events) == text
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


def test_every_network_event_is_valid_utf8_by_itself(server: RunningServer) -> None:
    body = json.dumps({"prompt": ids(server, "😀漢" * 5), "max_tokens": 35, "stream": True}).encode()
    with server.send_raw(URL, body, headers="Connection: close\r\n") as connection:
        answer = read_all(connection)
    events = answer.split(b"data: ")[1:]
    assert len(events) > 10, "one or more for each character, and the end"
    for event in events:
        event.decode("utf-8")


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_end_in_mid_character_is_flushed_once(server: RunningServer, num_bytes: int) -> None:
    fields = {"prompt": ids(server, "ab😀"), "max_tokens": 2 + num_bytes}
    body = server.complete(**fields)
    assert body["choices"][0]["text"] == "ab\ufffd"
    assert body["choices"][0]["finish_reason"] == "length"
    assert stream_text(server.events(URL, **fields)) == "ab\ufffd"


def test_invalid_bytes_become_replacement_characters(server: RunningServer) -> None:
    fields = {"prompt": ids(server, b"a\xff\xc3b"), "max_tokens": 4}
    assert server.complete(**fields)["choices"][0]["text"] == "a\ufffd\ufffdb"
    assert stream_text(server.events(URL, **fields)) == "a\ufffd\ufffdb"


class _Pieces:
    """A tokenizer whose tokens are the pieces of one text: every way of cutting it can be served."""

    eos_token_id = 0
    all_special_ids = (0,)
    special = "<eos>"

    def __init__(self) -> None:
        self.pieces = [self.special]

    def __len__(self) -> int:
        return len(self.pieces)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.pieces[token_id]

    def decode(self, token_ids, **_options) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids if token_id)


def glue(before: str, pieces: list[str], after: str) -> list[str]:
    first, *rest = pieces
    *middle, last = [before + first, *rest]
    return [*middle, last + after]


def test_every_split_of_a_stop_string_over_up_to_five_tokens(start) -> None:
    tokenizer = _Pieces()
    stop = "###STOP"
    prompts = []
    for num_pieces in range(1, 6):
        for borders in combinations(range(1, len(stop)), num_pieces - 1):
            cuts = [stop[a:b] for a, b in zip((0, *borders), (*borders, len(stop)), strict=True)]
            for pieces in (["be", "fore", *cuts, "after"], glue("before", cuts, "after")):
                first = len(tokenizer.pieces)
                tokenizer.pieces += pieces
                prompts.append((list(range(first, len(tokenizer.pieces))), pieces))
    server = start(tokenizer=tokenizer)
    for prompt, pieces in prompts:
        fields = {"prompt": prompt, "max_tokens": 50, "stop": [stop, "no"]}
        body = server.complete(**fields)
        assert body["choices"][0]["text"] == "before", pieces
        assert body["choices"][0]["finish_reason"] == "stop"
        end = next(n for n in range(len(pieces) + 1) if stop in "".join(pieces[:n]))
        assert body["usage"]["completion_tokens"] == end
        events = server.events(URL, **fields, stream_options={"include_usage": True})
        assert stream_text(events) == "before", pieces
        assert events[-2]["usage"] == body["usage"]


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("foo###bar", "###", "foo", "stop"),
        ("xabcy", ["ab", "abc"], "x", "stop"),
        ("xabcy", ["abc", "ab"], "x", "stop"),
        ("hello", "lo!", "hello", "length"),  # held back, then flushed at the end
        ("hello", ["o", "zzz"], "hell", "stop"),
        ("aaab", "aab", "a", "stop"),
        ("😀x", "😀", "", "stop"),
        ("ab", "a", "", "stop"),
    ],
)
def test_stop_strings(server: RunningServer, text: str, stop: object, expected: str, reason: str) -> None:
    fields = {"prompt": ids(server, text), "max_tokens": len(text.encode()), "stop": stop}
    choice = server.complete(**fields)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, reason)
    events = server.events(URL, **fields)
    assert stream_text(events) == expected
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == reason


def test_held_back_text_is_flushed_at_the_end_of_sequence(server: RunningServer) -> None:
    prompt = [*ids(server, "so lo"), server.engine.tokenizer.eos_token_id]
    fields = {"prompt": prompt, "max_tokens": 50, "stop": "long"}
    assert server.complete(**fields)["choices"][0] == {
        "index": 0,
        "text": "so lo",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert stream_text(server.events(URL, **fields)) == "so lo"


def test_a_match_stops_the_engine_too(start) -> None:
    server = start(step_s=0.001)
    server.complete(prompt="abcd", max_tokens=400, stop="c")
    server.wait_idle()
    assert server.engine.num_aborts == 1
    assert server.engine.num_tokens < 100


def test_stops_and_texts_of_neighbours_stay_apart(start) -> None:
    server = start(parallel=8, step_s=0.001)
    words = [f"{chr(97 + i)}{i}😀-" for i in range(8)]
    answers: dict[int, str] = {}

    def run(index: int) -> None:
        fields = {"prompt": words[index] * 5, "max_tokens": 60, "stop": f"{index}😀-{words[index]}{chr(97 + index)}"}
        events = server.events(URL, **fields) if index % 2 else None
        answers[index] = stream_text(events) if events else server.complete(**fields)["choices"][0]["text"]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: words[index][0] for index in range(8)}
