"""Grammars: random walks through what they allow always end in what the schema describes."""

from __future__ import annotations

import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from mlxcel_paged.grammar import GrammarError
from mlxcel_paged.text.json_grammar import MAX_GRAMMAR_BYTES, CompiledGrammar, GrammarCompiler, GrammarSyntaxError

from .byte_tokenizer import byte_tokenizer, sentencepiece_tokenizer, spell

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER))
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}


# Splits at spaces, so its tokens are not the bytes of the text.
WORDS = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))


def allowed(matcher: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")).tolist()


def walk(grammar: CompiledGrammar, rng: random.Random, max_tokens: int = 400) -> bytes | None:
    """A random answer; None if it did not end."""
    matcher = grammar.new_matcher()
    token_ids: list[int] = []
    for _ in range(max_tokens):
        choices = allowed(matcher)
        if EOS in choices and (len(choices) == 1 or rng.random() < 0.5):
            return b"".join(token_bytes(token_id) for token_id in token_ids)
        token_ids.append(rng.choice([token_id for token_id in choices if token_id != EOS]))
        matcher.consume(token_ids[-1:])
    return None


def token_bytes(token_id: int) -> bytes:
    from mlxcel_paged.text.byte_level import ByteLevelVocab

    return ByteLevelVocab(TOKENIZER).token_bytes(token_id)


def check(value: Any) -> None:
    assert set(value) >= {"kind", "size"}
    assert set(value) <= {"kind", "size", "tags"}
    assert value["kind"] in ("a", "b")
    assert isinstance(value["size"], int)
    assert 0 <= value["size"] <= 99
    for tag in value.get("tags", []):
        assert isinstance(tag, str)
        assert len(tag) <= 3
    assert len(value.get("tags", [])) <= 2


def test_every_answer_is_valid_and_bounded() -> None:
    grammar = COMPILER.from_json_schema(SCHEMA)
    answers = [walk(grammar, random.Random(seed)) for seed in range(60)]
    # White space is bounded, so a schema without unbounded strings has no endless answers.
    assert None not in answers
    for answer in answers:
        assert answer is not None
        check(json.loads(answer))
    assert len(set(answers)) > 50


def test_calls_of_tools_are_valid_and_named() -> None:
    grammar = COMPILER.from_tool_calls([("f", SCHEMA), ("g-2", {"type": "object", "properties": {}})], several=True)
    seen = set()
    for seed in range(60):
        answer = walk(grammar, random.Random(seed), 4000)
        if answer is None:
            continue  # g-2 may have any members
        for line in answer.decode().split("\n{"):
            call = json.loads(line if line.startswith("{") else "{" + line)
            seen.add(call["name"])
            assert set(call) == {"name", "arguments"}
            if call["name"] == "f":
                check(call["arguments"])
    assert seen == {"f", "g-2"}
    alone = COMPILER.from_tool_calls([("f", SCHEMA)], several=False)
    for seed in range(20):
        answer = walk(alone, random.Random(seed))
        assert answer is not None
        check(json.loads(answer)["arguments"])


def test_a_quote_in_a_description_is_no_way_out_of_the_grammar() -> None:
    schema = {**SCHEMA, "description": '"} "\n" start: /.*/ %json {', "title": "\\u0022"}
    answer = walk(COMPILER.from_tool_calls([("f", schema)], several=False), random.Random(0))
    assert answer is not None
    check(json.loads(answer)["arguments"])


def test_answers_in_one_grammar_do_not_know_of_each_other() -> None:
    grammar = COMPILER.from_json_schema(SCHEMA)
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.consume(spell(TOKENIZER, '{"kind": "a"'))
    assert allowed(second) == allowed(grammar.new_matcher())
    assert COMPILER.from_json_schema(dict(SCHEMA)) is grammar


def test_threads_may_start_answers_at_once() -> None:
    grammar = COMPILER.from_json_schema(SCHEMA)
    results: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: results.extend(walk(grammar, random.Random(seed)) for seed in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=repr) == sorted([walk(grammar, random.Random(seed)) for seed in range(5)] * 4, key=repr)


def test_what_a_grammar_forbids_is_an_error() -> None:
    matcher = COMPILER.from_json_schema(SCHEMA).new_matcher()
    with pytest.raises(GrammarError):
        matcher.consume(spell(TOKENIZER, "no"))
    with pytest.raises(GrammarError):
        matcher.allowed()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "thing"},
        {"enum": []},
        {"type": "string", "pattern": "("},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"$ref": "#/$defs/none"},
        {"x-guidance": {}},
        {"description": "x" * MAX_GRAMMAR_BYTES},
    ],
)
def test_schemas_that_cannot_be_compiled_say_so(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarSyntaxError):
        COMPILER.from_json_schema(schema)
    with pytest.raises(GrammarSyntaxError):
        COMPILER.from_tool_calls([("f", schema)], several=True)


def test_a_vocabulary_with_room_for_more_tokens_and_one_that_is_not_byte_level() -> None:
    grammar = GrammarCompiler(TOKENIZER, len(TOKENIZER) + 100).from_json_schema({"type": "object"})
    assert max(allowed(grammar.new_matcher())) < len(TOKENIZER)
    pieces = sentencepiece_tokenizer()
    matcher = GrammarCompiler(pieces, len(pieces)).from_json_schema({"type": "object"}).new_matcher()
    assert allowed(matcher) == [pieces.convert_tokens_to_ids("<0x7B>")]


def test_a_tokenizer_that_cannot_be_constrained_says_so() -> None:
    for tokenizer in (SimpleNamespace(), SimpleNamespace(backend_tokenizer=WORDS, eos_token_ids={0})):
        with pytest.raises(GrammarSyntaxError, match="cannot be constrained"):
            GrammarCompiler(tokenizer, 300).from_json_schema({"type": "object"})
