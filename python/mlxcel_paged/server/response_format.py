"""`response_format`: whether an answer is text, any JSON object, or JSON that a schema describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The answer must be JSON.

    Attributes:
        schema: what it must match.
        param: the field that the schema came from, for errors.
    """

    schema: Mapping[str, Any]
    param: str


def read_response_format(fields: Fields) -> JsonFormat | None:
    """Takes `response_format` out of a request; None is plain text.

    Raises:
        ApiError: 400, names the field.
    """
    members = fields.nested("response_format")
    if members is None:
        return None
    kind = checked_string(members.param("type"), members.required("type"))
    if kind == "json_schema":
        found = _read_schema(members)
    elif kind == "json_object":
        found = JsonFormat(_ANY_OBJECT, "response_format")
    elif kind == "text":
        found = None
    else:
        message = f"response_format.type must be text, json_object or json_schema, got {kind[:40]!r}"
        raise bad_request("response_format.type", message)
    members.finish()
    return found


def _read_schema(members: Fields) -> JsonFormat:
    described = members.nested("json_schema")
    if described is None:
        raise bad_request(
            members.param("json_schema"), "response_format.json_schema is required", "missing_required_parameter"
        )
    name = checked_string(described.param("name"), described.required("name"))
    if not name:
        raise bad_request(described.param("name"), "response_format.json_schema.name is an empty string")
    described.string("description")
    described.boolean("strict")  # the grammar always is
    schema = described.mapping("schema")
    described.finish()
    return JsonFormat(_ANY_OBJECT if schema is None else schema, "response_format.json_schema.schema")
