"""`tools`, `tool_choice` and `parallel_tool_calls`: which functions an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string, wrong_type

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that are offered to the model.

    Attributes:
        offered: OpenAI's tool objects, as sent, with the parameters filled in.
        forced: names of the functions of which one must be called; empty if the model may choose not to.
        parallel: whether it may make several calls; it never may where one function is named.
    """

    offered: list[dict[str, Any]]
    forced: tuple[str, ...]
    parallel: bool

    def forced_schemas(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Name and JSON schema of the arguments of the functions of which one must be called."""
        functions = (tool["function"] for tool in self.offered)
        return [(function["name"], function["parameters"]) for function in functions if function["name"] in self.forced]


def read_tools(fields: Fields, max_tools: int) -> Tools | None:
    """Takes the fields out of a request; None if no function is to be called.

    Raises:
        ApiError: 400, names the field.
    """
    parallel = fields.boolean("parallel_tool_calls")
    offered = _read_offered(fields, max_tools)
    choice = fields.take("tool_choice")
    names = tuple(tool["function"]["name"] for tool in offered)
    if choice is None:
        choice = "auto" if offered else "none"
    if isinstance(choice, dict):
        name = _named(Fields(choice, "tool_choice"))
        if name not in names:
            raise bad_request("tool_choice", f"tool_choice names {name[:64]!r}, which is none of the tools")
        return Tools(offered, (name,), parallel=False)
    if not isinstance(choice, str):
        raise wrong_type("tool_choice", "a string or an object", choice)
    if choice not in ("none", "auto", "required"):
        raise bad_request("tool_choice", f"tool_choice must be none, auto, required or an object, got {choice[:40]!r}")
    if choice == "required" and not offered:
        raise bad_request("tool_choice", "tool_choice is required, but there are no tools")
    if choice == "none" or not offered:
        return None
    return Tools(offered, names if choice == "required" else (), parallel is not False)


def _named(choice: Fields) -> str:
    kind = checked_string("tool_choice.type", choice.required("type"))
    if kind != "function":
        raise bad_request("tool_choice.type", f"tool_choice.type must be function, got {kind[:40]!r}")
    function = choice.nested("function")
    if function is None:
        raise bad_request("tool_choice.function", "tool_choice.function is required", "missing_required_parameter")
    name = checked_string("tool_choice.function.name", function.required("name"))
    function.finish()
    choice.finish()
    return name


def _read_offered(fields: Fields, max_tools: int) -> list[dict[str, Any]]:
    values = fields.take("tools")
    if values is None:
        return []
    if not isinstance(values, list):
        raise wrong_type("tools", "an array", values)
    if len(values) > max_tools:
        raise bad_request("tools", f"tools has {len(values)} tools, at most {max_tools} are allowed")
    offered = [_tool(f"tools[{index}]", value) for index, value in enumerate(values)]
    names = [tool["function"]["name"] for tool in offered]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad_request(f"tools[{index}].function.name", f"two tools are named {name!r}")
    return offered


def _tool(param: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    tool = Fields(value, param)
    kind = checked_string(tool.param("type"), tool.required("type"))
    if kind != "function":
        message = f"{tool.param('type')} must be function, got {kind[:40]!r}"
        raise bad_request(tool.param("type"), message, "unsupported_value")
    function = tool.nested("function")
    if function is None:
        raise bad_request(tool.param("function"), f"{param}.function is required", "missing_required_parameter")
    name = checked_string(function.param("name"), function.required("name"))
    if not _NAME.fullmatch(name):
        message = f"{function.param('name')} must be 1 to 64 letters, digits, underscores and dashes"
        raise bad_request(function.param("name"), message)
    description = function.string("description")
    parameters = function.mapping("parameters")
    function.boolean("strict")  # forced calls always are
    function.finish()
    tool.finish()
    if parameters is not None and parameters.get("type", "object") != "object":
        raise bad_request(function.param("parameters"), f"{function.param('parameters')}.type must be object")
    described = {} if description is None else {"description": description}
    schema = _NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return {"type": "function", "function": {"name": name, **described, "parameters": dict(schema)}}
