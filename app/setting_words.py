"""What is wrong with a setting's value, in words for people."""

from __future__ import annotations

import pydantic

_SHOULD_BE = "Input should be "
_PLAIN_WORDS = {
    "dict_type": 'a JSON object, such as {"key": true}',
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "bool_parsing": "true or false",
}
"""What a value should be, by kind of error, where pydantic speaks of types and parsing."""


def explain(error: pydantic.ValidationError, prefix: str) -> list[str]:
    """Return a sentence for each setting that is wrong, at least one; variables begin with `prefix`."""
    said: dict[str, list[str]] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        # A setting that takes one of several kinds has an error of each.
        name = str(one["loc"][0]) if one["loc"] else "settings"
        said.setdefault(name, []).append(_words_of(one["type"], str(one["msg"])))
    return [f"{prefix}{name.upper()} cannot be used: {_alternatives(words)}." for name, words in said.items()]


def _alternatives(words: list[str]) -> str:
    joined = " or ".join(dict.fromkeys([words[0], *(one.removeprefix(_SHOULD_BE) for one in words[1:])]))
    return f"{joined[0].lower()}{joined[1:]}"


def _words_of(kind: str, message: str) -> str:
    if kind in _PLAIN_WORDS:
        return _SHOULD_BE + _PLAIN_WORDS[kind]
    return message.removeprefix("Value error, ")
