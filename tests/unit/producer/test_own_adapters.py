"""Rows under the user's own rules: columns by other names, and functions of the user's own."""

from __future__ import annotations

import pathlib
import sys
import textwrap
from typing import Any

import pytest

from app.errors import UsageError
from producer.adapters import renamed
from producer.adapters.base import Conversation
from producer.adapters.registry import choose
from producer.reading import Reading, open_reading
from producer.refusals import Reason, Refusal

MIB = 1024 * 1024


def convert(row: dict[str, Any], columns: str, adapter: str = "auto") -> Conversation | Refusal:
    """Return what a row becomes with columns by other names."""
    return choose(adapter, renamed.parse(columns)).convert(row)


def test_a_named_prompt_hides_every_other_prompt_column() -> None:
    """The named columns are read, whatever else the row holds."""
    row = {
        "title": "the question",
        "messages": [{"role": "user", "content": "no"}],
        "prompt": "no",
        "uid": 7,
        "id": "no",
    }
    found = convert(row, "prompt=title,id=uid")

    assert isinstance(found, Conversation)
    assert (found.messages, found.source_id) == ([{"role": "user", "content": "the question"}], "7")


def test_each_target() -> None:
    """Conversation, system prompt, tools and id can each stand in a column of any name."""
    row = {
        "dialog": [{"from": "human", "value": "hi"}],
        "sys": "Be brief.",
        "fns": '[{"name": "f"}]',
        "key": "k",
        "system": "not this one",
        "tools": "not these",
    }
    found = convert(row, "messages=dialog, system=sys, tools=fns, id=key")

    assert isinstance(found, Conversation)
    assert found.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]
    assert found.source_id == "k"


def test_a_row_without_the_named_column_is_refused() -> None:
    """A row that lacks the prompt's column is not read by another one."""
    found = convert({"title": None, "prompt": "no"}, "prompt=title")

    assert isinstance(found, Refusal)
    assert found.reason is Reason.NOT_A_STRING


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt", "cannot be used at 'prompt'"),
        ("prompt=", "cannot be used at 'prompt='"),
        ("question=prompt", "with each of prompt, messages, system, tools, id"),
        ("id=a,id=b", "cannot be used at 'id=b'"),
        ("prompt=a,messages=b", "names both prompt and messages"),
        ("", "cannot be used"),
    ],
)
def test_wrong_column_names_are_refused(text: str, words: str) -> None:
    """A mistake in --columns is one sentence that shows the form."""
    with pytest.raises(UsageError, match=words):
        renamed.parse(text)


def test_a_column_that_no_row_has_is_refused(tmp_path: pathlib.Path) -> None:
    """A misspelt id column is found at the first rows, not lost in silence."""
    (tmp_path / "x.jsonl").write_text('{"q": "a", "uid": 1}\n{"uid": 2, "lang": "de"}\n')

    with pytest.raises(UsageError, match=r"id=uuid: no row has the column 'uuid'; the columns are q, uid, lang\."):
        open_reading(Reading(source=str(tmp_path / "x.jsonl"), columns="prompt=q,id=uuid"), max_row_bytes=MIB)


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of adapters into the current folder and return its name."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent(
            """
            def text(row):
                return row["a"] + row["b"]

            def chat(row):
                messages = [{"from": "human", "value": row["a"]}]
                return {"messages": messages, "tools": [{"name": "f"}], "system": "S", "id": row.get("b")}

            def some(row):
                return row["a"] if row["b"] else None

            def wrong(row):
                return {"prompt": row["a"]}

            def odd(row):
                return {"messages": [{"role": "user", "content": {1, 2}}]}

            number = 5
            """
        )
    )
    yield name
    sys.modules.pop(name, None)


def test_a_function_of_the_users_own(module: str) -> None:
    """A function may return a text or a conversation with tools, a system prompt and an id."""
    row = {"a": "x", "b": "y", "uuid": "u"}
    text, chat = choose(f"{module}:text").convert(row), choose(f"{module}:chat").convert(row)

    assert isinstance(text, Conversation)
    assert (text.messages, text.source_id) == ([{"role": "user", "content": "xy"}], "u")
    assert isinstance(chat, Conversation)
    assert chat.messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}]
    assert (chat.tools, chat.source_id) == ([{"type": "function", "function": {"name": "f"}}], "y")


@pytest.mark.parametrize(
    ("function", "row", "detail"),
    [
        ("text", {"a": "x"}, "raised KeyError: 'b'"),
        ("some", {"a": "x", "b": 0}, "returned None"),
        ("wrong", {"a": "x"}, "returned an object; it must return a text"),
        ("odd", {"a": "x"}, "turn 1"),
    ],
)
def test_what_a_function_cannot_read_is_refused(module: str, function: str, row: dict[str, Any], detail: str) -> None:
    """An exception, None and what is no prompt are refused rows with the reason in words; none stops the run."""
    found = choose(f"{module}:{function}").convert(row)

    assert isinstance(found, Refusal)
    assert detail in found.detail


def test_an_adapter_that_fails_everywhere_ends_the_command(module: str, tmp_path: pathlib.Path) -> None:
    """If no first row becomes a prompt, the function's own words are shown at once; else the rest is refused."""
    (tmp_path / "x.jsonl").write_text('{"a": "x"}\n{"a": "y"}\n')
    (tmp_path / "y.jsonl").write_text('{"a": "x"}\n{"a": "y", "b": "z"}\n')

    with pytest.raises(UsageError, match="raised KeyError: 'b'"):
        open_reading(Reading(source="x.jsonl", adapter=f"{module}:text"), max_row_bytes=MIB)
    opened = open_reading(Reading(source="y.jsonl", adapter=f"{module}:text"), max_row_bytes=MIB)
    (batch,) = opened.batches
    assert [row.reason for row in batch.refused] == [Reason.ADAPTER_FAILED]
    assert len(batch.samples) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module_x:f", "cannot be imported"),
        ("{}:nothing", "has no function 'nothing'"),
        ("{}:number", "has no function 'number'"),
        ("{}:", "has no function ''"),
    ],
)
def test_functions_that_are_not_there(module: str, name: str, words: str) -> None:
    """A wrong module or function is one sentence."""
    with pytest.raises(UsageError, match=words):
        choose(name.format(module))
