"""`messages`: the turns of a conversation, checked and in the form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string, wrong_type

NEUTRAL_MESSAGE_VALUES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}
# `developer` is OpenAI's newer word for `system`; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(fields: Fields, max_messages: int) -> list[dict[str, Any]]:
    """Takes the messages out of a request.

    Returns:
        `role` and `content` of each message, and what it has of `name`, `tool_calls` (with their arguments as an object
        if they are JSON) and `tool_call_id`.

    Raises:
        ApiError: 400, names the field.
    """
    messages = fields.required("messages")
    if not isinstance(messages, list):
        raise wrong_type("messages", "an array", messages)
    if not messages:
        raise bad_request("messages", "messages is an empty array")
    if len(messages) > max_messages:
        raise bad_request("messages", f"messages has {len(messages)} messages, at most {max_messages} are allowed")
    call_ids: set[str] = set()
    return [_message(f"messages[{index}]", message, call_ids) for index, message in enumerate(messages)]


def _message(param: str, value: object, call_ids: set[str]) -> dict[str, Any]:
    """Reads one message; `call_ids` are those of the calls before it."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    fields = Fields(value, param)
    role = checked_string(fields.param("role"), fields.required("role"))
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        message = f"{fields.param('role')} must be one of {known}, got {role[:40]!r}"
        raise bad_request(fields.param("role"), message)
    fields.only_neutral(NEUTRAL_MESSAGE_VALUES)
    rendered: dict[str, Any] = {"role": _ROLES[role]}
    calls = _tool_calls(fields) if role == "assistant" else []
    # A turn that only calls functions has no content.
    content = fields.take("content") if calls else fields.required("content")
    rendered["content"] = "" if content is None else _content(fields.param("content"), content)
    if calls:
        rendered["tool_calls"] = calls
        call_ids.update(call["id"] for call in calls)
    if role == "tool":
        call_id = checked_string(fields.param("tool_call_id"), fields.required("tool_call_id"))
        if call_id not in call_ids:
            message = f"{fields.param('tool_call_id')} is the id of no call before this message"
            raise bad_request(fields.param("tool_call_id"), message)
        rendered["tool_call_id"] = call_id
    name = fields.string("name")
    if name is not None:
        rendered["name"] = name
    if role != "assistant":
        fields.only_neutral({"tool_calls": ([],)})
    fields.finish()
    return rendered


def _content(param: str, value: object) -> str:
    """The text of a message, whose parts follow each other without anything in between."""
    if isinstance(value, str):
        return checked_string(param, value)
    if not isinstance(value, list):
        raise wrong_type(param, "a string or an array of text parts", value)
    return "".join(_part(f"{param}[{index}]", part) for index, part in enumerate(value))


def _part(param: str, value: object) -> str:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    fields = Fields(value, param)
    kind = checked_string(fields.param("type"), fields.required("type"))
    if kind != "text":
        message = f"{fields.param('type')} must be text, got {kind[:40]!r}"
        raise bad_request(fields.param("type"), message, "unsupported_value")
    text = checked_string(fields.param("text"), fields.required("text"))
    fields.finish()
    return text


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    values = fields.take("tool_calls")
    if values is None:
        return []
    param = fields.param("tool_calls")
    if not isinstance(values, list):
        raise wrong_type(param, "an array", values)
    return [_tool_call(f"{param}[{index}]", value) for index, value in enumerate(values)]


def _tool_call(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    fields = Fields(value, param)
    call_id = checked_string(fields.param("id"), fields.required("id"))
    kind = checked_string(fields.param("type"), fields.required("type"))
    if kind != "function":
        message = f"{fields.param('type')} must be function, got {kind[:40]!r}"
        raise bad_request(fields.param("type"), message, "unsupported_value")
    function = fields.nested("function")
    if function is None:
        raise bad_request(fields.param("function"), f"{param}.function is required", "missing_required_parameter")
    name = checked_string(function.param("name"), function.required("name"))
    arguments = checked_string(function.param("arguments"), function.required("arguments"))
    function.finish()
    fields.ignore({"index"})  # left over from a stream's delta
    fields.finish()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _parsed(arguments)}}


def _parsed(arguments: str) -> Any:
    """Templates take arguments as an object; what a model once wrote may be no JSON, and stays text."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
