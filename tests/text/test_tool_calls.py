"""Calls in the text of an answer: our own format and models' formats, cut into pieces of every size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlx_lm.tool_parsers import json_tools, mistral, pythonic, qwen3_coder

from mlxcel_paged.request import FinishReason, TokenEvent
from mlxcel_paged.text.detokenize import DetokenizerFactory
from mlxcel_paged.text.sequence_text import SequenceText
from mlxcel_paged.text.special import special_tokens
from mlxcel_paged.text.tool_calls import GrammarToolCalls, NativeFormat, NativeToolCalls, Parsed, ToolCallParser

from .byte_tokenizer import byte_tokenizer, spell


def run(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and name and arguments of every call."""
    content, calls, call_ids = "", [], set()
    for parsed in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        for call in parsed.calls:
            if call.call_id is not None:
                assert call.index == len(calls)
                call_ids.add(call.call_id)
                calls.append([call.name, ""])
            else:
                assert call.name is None
            calls[call.index][1] += call.arguments
    assert len(call_ids) == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def pieces_of(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


NASTY = {
    "text": 'a "quoted" \\ brace } { ] \n "arguments": {',
    "nested": {"list": [{"x": "}"}, [], {}]},
    "é": "\U0001f680",
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_our_own_format_passes_arguments_on_as_they_come(size: int) -> None:
    arguments = [json.dumps(NASTY, ensure_ascii=False), "{}", '{\n  "a": 1\n}']
    text = "\n".join(f'{{"name": "f{index}", "arguments": {each}}}' for index, each in enumerate(arguments))
    content, calls = run(GrammarToolCalls(), pieces_of(text, size))
    assert content == ""
    assert calls == [(f"f{index}", each) for index, each in enumerate(arguments)]


def test_arguments_are_sent_before_they_are_complete_and_stay_when_cut_off() -> None:
    parser = GrammarToolCalls()
    assert parser.feed('{"name": "f", "argum') == Parsed()
    [head, first] = parser.feed('ents": {"a": "b').calls
    assert (head.name, head.arguments, first.arguments) == ("f", "", '{"a": "b')
    assert parser.feed("c").calls[0].arguments == "c"
    assert parser.finish() == Parsed()


def native(module: Any, **special: int) -> NativeFormat:
    ids = {token_id: text for text, token_id in special.items()}
    return NativeFormat(module.tool_call_start, module.tool_call_end, module.parse_tool_call, ids)


HERMES = native(json_tools)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("ends in spaces \n", "ends in spaces \n", []),
        ("a < b, <tool> and <tool_call", "a < b, <tool> and <tool_call", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('Let me see.\n\n<tool_call>{"name": "f"}</tool_call>\n', "Let me see.", [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}'
            "</tool_call> done",
            " done",
            [("f", '{"a": "é"}'), ("g", "{}")],
        ),
        ("so: <tool_call>no json</tool_call>!", "so: <tool_call>no json</tool_call>!", []),
        ("so: <tool_call>[]</tool_call>!", "so: <tool_call>[]</tool_call>!", []),
        ('cut <tool_call>{"name": "f", "argu', 'cut <tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        # Half a surrogate pair stays escaped: it could not be sent otherwise.
        (
            r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>',
            "",
            [("f", r'{"a": "\ud83d"}')],
        ),
        (r'<tool_call>{"name": "\udc00", "arguments": "\udc00"}</tool_call>', "", [("?", "?")]),
        # The end marker never came, but the call is whole.
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ],
)
def test_hermes_calls(text: str, content: str, calls: list[Any], size: int) -> None:
    assert run(NativeToolCalls(HERMES, []), pieces_of(text, size)) == (content, calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (mistral, 'hm [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
        (mistral, 'hm [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
        (pythonic, "hm <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>"),
        (
            qwen3_coder,
            "hm <tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
            "<tool_call><function=g></function></tool_call>",
        ),
    ],
)
def test_the_parsers_of_mlx_lm(module: Any, text: str, size: int) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"a": {"type": "integer"}}}}}
        for name in "fg"
    ]
    content, calls = run(NativeToolCalls(native(module), tools), pieces_of(text, size))
    assert content == "hm"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"a": 1}), ("g", {})]


def test_after_the_most_calls_nothing_is_passed_on() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = NativeToolCalls(HERMES, [], max_calls=1)
    assert not parser.is_full
    assert run(parser, [f"a {call} b {call}"]) == ("a", [("f", "{}")])
    assert parser.is_full


TOKENIZER = byte_tokenizer()
SPECIAL = special_tokens(TOKENIZER)
# A model whose markers are special tokens, which have no text of their own.
MARKED = NativeFormat(
    "<|turn|>", "<|end|>", json_tools.parse_tool_call, {token_id: text for text, token_id in SPECIAL.items()}
)


def sequence_deltas(tokens: list[int], last: FinishReason, **settings: Any) -> tuple[str, list[Any], SequenceText]:
    parser = NativeToolCalls(MARKED, [], **settings)
    sequence = SequenceText(DetokenizerFactory(TOKENIZER).new(), ["STOP"], tool_calls=parser)
    content, calls = "", []
    for number, token_id in enumerate(tokens):
        delta = sequence.take(TokenEvent("r", token_id, last if number == len(tokens) - 1 else None))
        content += delta.content
        calls += delta.calls
        if sequence.finish_reason is not None:
            break
    return content, calls, sequence


def test_markers_that_are_special_tokens_are_seen() -> None:
    call = '{"name": "f", "arguments": {"a": "\U0001f469\u200d\U0001f680"}}'
    tokens = [*spell(TOKENIZER, "hé "), SPECIAL["<|turn|>"], *spell(TOKENIZER, call), SPECIAL["<|end|>"]]
    content, calls, sequence = sequence_deltas([*tokens, *spell(TOKENIZER, " x")], FinishReason.STOP)
    assert content == "hé"
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": "\U0001f469\u200d\U0001f680"}')]
    # The last token ended the answer, so it has no text.
    assert sequence.finish_reason == "tool_calls"
    content, calls, sequence = sequence_deltas(tokens, FinishReason.LENGTH)
    assert (content, len(calls), sequence.finish_reason) == ("hé", 1, "length")


def test_an_answer_ends_after_the_only_call_it_may_make() -> None:
    call = spell(TOKENIZER, '{"name": "f", "arguments": {}}')
    tokens = [SPECIAL["<|turn|>"], *call, SPECIAL["<|end|>"], *spell(TOKENIZER, "more")]
    content, calls, sequence = sequence_deltas(tokens, FinishReason.LENGTH, max_calls=1)
    assert (content, len(calls), sequence.finish_reason) == ("", 1, "tool_calls")
    assert sequence.num_tokens == len(tokens) - 4


def test_a_stop_string_ends_a_call_and_its_text_is_not_lost() -> None:
    tokens = [SPECIAL["<|turn|>"], *spell(TOKENIZER, '{"name": STOP')]
    content, calls, sequence = sequence_deltas(tokens, FinishReason.LENGTH)
    assert (content, calls, sequence.finish_reason) == ('<|turn|>{"name": ', [], "stop")
