"""Parameters of tools in other notations -> JSON Schema."""

from __future__ import annotations

import re
from typing import Any

_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "double": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "array": "array",
    "dict": "object",
    "object": "object",
    "null": "null",
}
_WORD = re.compile(r"\s*(?:Optional\[)?\s*(\w+)\s*(?:\[(.*)\])?", re.IGNORECASE)


def json_schema(parameters: Any) -> dict[str, Any]:
    """Return a tool's parameters as JSON Schema.

    `parameters` is a schema whose types may be Python's words (`dict`, `float`, `List[int]`), or an object of
    parameter name -> `{description, type, default}`, where a parameter is required unless its type says `optional` or
    it has a default. A type word without a counterpart (`any`, `Callable`) is left out, which allows every type.
    """
    if type(parameters) is not dict or not parameters:
        return {"type": "object", "properties": {}}
    if type(parameters.get("properties")) is dict:
        return {"type": "object", **_schema(parameters)}
    named = {name: value if type(value) is dict else {} for name, value in parameters.items()}
    required = [name for name, value in named.items() if "default" not in value and not _is_optional(value)]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(value) for name, value in named.items()},
    }
    return {**schema, "required": required} if required else schema


def _is_optional(parameter: dict[str, Any]) -> bool:
    return "optional" in str(parameter.get("type", "")).casefold()


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON Schema's type words, at every depth."""
    schema = {key: item for key, item in value.items() if key not in {"type", "properties", "items"}}
    word = value.get("type")
    # A type may be a list of words already; only text is another notation.
    schema = {**(_type(word) if type(word) is str else {} if word is None else {"type": word}), **schema}
    if type(value.get("properties")) is dict:
        schema["properties"] = {
            name: _schema(item) if type(item) is dict else item for name, item in value["properties"].items()
        }
    if type(value.get("items")) is dict:
        schema["items"] = _schema(value["items"])
    elif "items" in value:
        schema["items"] = value["items"]
    return schema


def _type(word: str) -> dict[str, Any]:
    found = _WORD.match(word)
    name = _TYPES.get(found[1].casefold()) if found else None
    if found is None or name is None:
        return {}
    items = _type(found[2]) if name == "array" and found[2] and "," not in found[2] else {}
    return {"type": name, "items": items} if items else {"type": name}
