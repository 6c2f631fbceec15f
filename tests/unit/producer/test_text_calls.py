"""Calls and tools that stand in texts: each notation gives the same values as JSON, and nothing is evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from producer.adapters.base import Conversation
from producer.adapters.brackets import bracket_calls
from producer.adapters.glaive import GLAIVE_V2
from producer.adapters.literals import NotReadableError, json_values, loose_value
from producer.adapters.schemas import json_schema
from producer.refusals import Reason, Refusal


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f()]", [("f", {})]),
        ('[f(a="x", b=1, c=-2.5, d=true, e=None)]', [("f", {"a": "x", "b": 1, "c": -2.5, "d": True, "e": None})]),
        (
            '[Get Weather(city="Oslo"), v1/news.search(q="a, (b)]")]',
            [("Get Weather", {"city": "Oslo"}), ("v1/news.search", {"q": "a, (b)]"})],
        ),
        ("[f(a='it\\'s', b=\"it's\")]", [("f", {"a": "it's", "b": "it's"})]),
        ('[f(x={"a": [1, {"b": null}]}, y=(1, 2))]', [("f", {"x": {"a": [1, {"b": None}]}, "y": [1, 2]})]),
        ('[f(user-id="u", class="c")]', [("f", {"user-id": "u", "class": "c"})]),
        ('  [ f( a = "x" ) ]\n', [("f", {"a": "x"})]),
        ('[f(u="http://a/?b=c&d=[1]")]', [("f", {"u": "http://a/?b=c&d=[1]"})]),
        ("[f(n=12345678901234567890)]", [("f", {"n": 12345678901234567890})]),
        ("no call", []),
        ("See [1](http://x) and [2].", []),
        ("[]", []),
        ("[1, 2]", []),
        ("", []),
    ],
)
def test_bracket_calls(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Names may hold spaces, values may be JSON or Python's, and other texts are no calls."""
    assert [(call["name"], call["arguments"]) for call in bracket_calls(text)] == calls


@pytest.mark.parametrize(
    "text",
    [
        "[f(a=Oslo)]",
        '[f("x")]',
        '[f(a="x)]',
        "[f(a=[1)]",
        "[f(a=1, a=2)]",
        "[f(a=__import__('os').getcwd())]",
        "[f(a=1+1)]",
        "[f(a=f'{1}')]",
        "[f(a=b'x')]",
        "[f(a=1j)]",
        "[f(a={1: 2})]",
        '[f(a="\\ud800")]',
        "[f(a=1e999)]",
        "[f(a=" + "[" * 5000 + "]" * 5000 + ")]",
    ],
)
def test_calls_that_break_their_form_are_told(text: str) -> None:
    """What cannot be read is never guessed, nothing is run, and no depth breaks it."""
    with pytest.raises(NotReadableError):
        bracket_calls(text)


def test_json_values_in_a_row() -> None:
    """Objects one after another are read up to the first other text; what JSON cannot carry is refused."""
    assert json_values(' {"a": 1}\n\n{"b": "}"} rest {x}') == ([{"a": 1}, {"b": "}"}], "rest {x}")
    assert json_values("no json") == ([], "no json")
    for text in ('{"a": ', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000):
        with pytest.raises(NotReadableError):
            json_values(text)
    assert loose_value("{'path': 'C:\\dir', 'ok': True}") == {"path": "C:\\dir", "ok": True}


def test_python_types_become_json_schema() -> None:
    """Python's type words are translated at every depth; unknown ones allow every type."""
    assert json_schema({"n": {"type": "int"}, "s": {"type": "Optional[str]"}, "d": {"type": "str", "default": ""}}) == {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "d": {"type": "string", "default": ""}},
        "required": ["n"],
    }
    deep = {
        "type": "dict",
        "properties": {"a": {"type": "list", "items": {"type": "dict", "properties": {"x": {"type": "any"}}}}},
    }
    assert json_schema(deep) == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"x": {}}}}},
    }
    proper = {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x"]}}, "required": ["a"]}
    assert json_schema(proper) == proper
    assert json_schema(None) == json_schema({}) == {"type": "object", "properties": {}}
    assert json_schema({"x": {"type": "List[Dict[str, int]]"}, "y": {"type": "Callable"}})["properties"] == {
        "x": {"type": "array"},
        "y": {},
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("""'{"a": "it's"}'""", """{"a": "it's"}"""),
        (r"""'{"a": "it\'s"}'""", """{"a": "it's"}"""),
        (r"""'{"a": "say \"x\""}'""", r"""{"a": "say \"x\""}"""),
        ("""'{}'""", "{}"),
        ("""{"a": 1}""", '{"a":1}'),
        (r'''"{\"a\": 1}"''', '{"a": 1}'),
    ],
)
def test_glaive_arguments(arguments: str, expected: str) -> None:
    """Arguments between single quotes, with apostrophes in them, are kept as the JSON text that they are."""
    call = f'<functioncall> {{"name": "f", "arguments": {arguments}}} <|endoftext|>'
    found = GLAIVE_V2.convert({"system": "", "chat": f"USER: u\n\n\nASSISTANT: {call}\n\n\nFUNCTION RESPONSE: r"})

    assert isinstance(found, Conversation)
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}


def test_glaive_rows_that_are_no_chat() -> None:
    """Text before the first speaker, a null and a number are refused with their reason."""
    for row, reason in (
        ({"chat": "Hello USER: x"}, Reason.BAD_MESSAGES),
        ({"chat": 5}, Reason.NOT_A_STRING),
        ({"chat": "USER: x", "system": 5}, Reason.NOT_A_STRING),
        ({"system": "x"}, Reason.MISSING_FIELD),
    ):
        found = GLAIVE_V2.convert(row)
        assert isinstance(found, Refusal)
        assert found.reason is reason
