"""Tools and tool calls of any common form -> OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.records import canonical_json
from producer.adapters.schemas import json_schema
from producer.refusals import Reason, Refusal, kind_of

TOOL_COLUMNS = ("tools", "functions")
"""Where the tools are looked for; the first that is not null wins."""

_BARE_KEYS = ("name", "description", "parameters", "strict")


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | Refusal | None:
    """Return the row's tools as `{"type": "function", "function": {...}}`, or None where it has none.

    The column may be a list, one object, or JSON text of either; a tool may be in OpenAI's form, a bare function, or
    JSON text. Null fields are left out at every depth: tables fill them in where other rows have a value.
    """
    for column in TOOL_COLUMNS:
        value = row.get(column)
        if value is not None:
            return _tools(column, value)
    return None


def _tools(column: str, value: Any) -> list[dict[str, Any]] | Refusal | None:
    if type(value) is str:
        if not value.strip():
            return None
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError):
            return Refusal(Reason.BAD_TOOLS, f"the column {column!r} is text that is not JSON")
    items = value if type(value) is list else [value]
    if value is None or not items:
        return None
    tools = []
    for position, item in enumerate(items, start=1):
        tool = _tool(item)
        if tool is None:
            detail = f"tool {position} in the column {column!r} is {kind_of(item)} without a function's name"
            return Refusal(Reason.BAD_TOOLS, detail)
        tools.append(tool)
    return tools


def as_tools(items: list[Any]) -> list[dict[str, Any]] | None:
    """Return functions in any form of `tools_of` in OpenAI's form; None when one of them has no name."""
    tools = [_tool(item) for item in items]
    return None if None in tools else [tool for tool in tools if tool is not None]


def _tool(item: Any) -> dict[str, Any] | None:
    if type(item) is str:
        try:
            item = msgspec.json.decode(item)
        except (ValueError, RecursionError):
            return None
    if type(item) is not dict:
        return None
    item = without_nulls(item)
    function = item.get("function", item)
    if type(function) is not dict or type(function.get("name")) is not str or not function["name"]:
        return None
    if function is item:
        function = {key: item[key] for key in _BARE_KEYS if key in item}
        if type(function.get("parameters")) is str:
            function["parameters"] = _decoded(function["parameters"])
    return {"type": "function", "function": function}


def with_json_schemas(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools whose parameters are JSON Schema, whatever notation they were in."""
    if tools is None:
        return None
    return [
        {**tool, "function": {**tool["function"], "parameters": json_schema(tool["function"].get("parameters"))}}
        for tool in tools
    ]


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the null fields of its objects, at every depth."""
    if type(value) is dict:
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if type(value) is list else value


def calls_of(value: Any, *, first: int) -> list[dict[str, Any]] | None:
    """Return calls as OpenAI's tool_calls: one or a list, an object or JSON text, bare or wrapped; None if unusable.

    Arguments that are an object become JSON text with sorted keys. Calls without an id are named `call_<n>`, where n
    counts the conversation's calls from `first`.
    """
    if type(value) is str:
        value = _decoded(value)
    items = value if type(value) is list else [value]
    calls = []
    for number, item in enumerate(items, start=first):
        call = _call(item, number)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def _call(item: Any, number: int) -> dict[str, Any] | None:
    if type(item) is str:
        item = _decoded(item)
    if type(item) is not dict:
        return None
    function = item["function"] if type(item.get("function")) is dict else item
    name = function.get("name")
    if type(name) is not str or not name:
        return None
    arguments = function.get("arguments")
    if arguments is None:
        arguments = function.get("parameters")
    if type(arguments) is not str:
        arguments = canonical_json({} if arguments is None else arguments).decode()
    own_id = item.get("id")
    return {
        "id": own_id if type(own_id) is str and own_id else f"call_{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _decoded(text: str) -> Any:
    """Return the value of JSON text; the text itself when it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
