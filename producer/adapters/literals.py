"""Values that datasets write into prose: JSON, several JSON values in a row, or Python literals."""

from __future__ import annotations

import ast
import json
import math
import warnings
from typing import Any

import msgspec

_decoder = json.JSONDecoder()


class NotReadableError(ValueError):
    """A text holds no value that can be read."""


def json_value(text: str) -> Any:
    """Return the value of JSON text. Raises NotReadableError, also for NaN and lone surrogates."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise NotReadableError(str(error)) from error


def json_values(text: str) -> tuple[list[Any], str]:
    """Return the JSON values at a text's beginning, white space between them, and what stands behind the last one.

    Raises NotReadableError when a value is begun that JSON cannot read.
    """
    values: list[Any] = []
    rest = text.lstrip()
    while rest[:1] in {"{", "["}:
        try:
            _, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise NotReadableError(str(error)) from error
        values.append(json_value(rest[:end]))
        rest = rest[end:].lstrip()
    return values, rest


def loose_value(text: str) -> Any:
    """Return the value of JSON or of a Python literal, with `true`, `false` and `null` in it or not.

    Raises NotReadableError for anything else, names and calls included: nothing is evaluated.
    """
    text = text.strip()
    try:
        return json_value(text)
    except NotReadableError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash in a path is no escape
            tree = ast.parse(text, mode="eval")
        value = _plain(tree.body)
        return json_value(msgspec.json.encode(value).decode())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise NotReadableError(f"{text[:60]!r} is no literal") from error


_WORDS = {"true": True, "false": False, "null": None}


def _plain(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=float() as number) if not math.isfinite(number):
            raise ValueError
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _plain(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError
