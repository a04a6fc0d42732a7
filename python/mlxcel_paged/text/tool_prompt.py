"""Tells a model which functions it may call: through its chat template, or in words where that knows no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_paged.text.template import has_chat_template, render_chat

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe_9f2c",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_INSTRUCTION = """You answer by calling functions. Write each call on a line of its own, exactly like this:
{"name": FUNCTION_NAME, "arguments": {ARGUMENTS}}
These are the functions, with the JSON schema of their arguments:"""


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template shows tools to the model; found out by rendering one."""
    if not has_chat_template(tokenizer):
        return False
    try:
        return _PROBE["function"]["name"] in render_chat(  # type: ignore[index]
            tokenizer, [{"role": "user", "content": "x"}], tools=[_PROBE]
        )
    except Exception:  # a template that cannot render the simplest tool knows none
        return False


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: tools and calls as text, results as turns of the user."""
    rendered = [_plain(message) for message in messages]
    if tools:
        lines = [_INSTRUCTION, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)]
        instruction = "\n".join(lines)
        if rendered and rendered[0]["role"] == "system":
            rendered[0]["content"] = f"{rendered[0]['content']}\n\n{instruction}"
        else:
            rendered.insert(0, {"role": "system", "content": instruction})
    return rendered


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        plain["role"] = "user"
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message.get("tool_calls", ())
    ]
    plain["content"] = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return plain
