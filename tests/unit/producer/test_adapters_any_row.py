"""Adapters on damaged rows: whatever a dataset holds, a row becomes a sample that JSON can carry, or a refusal."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.records import canonical_json
from producer.adapters.base import Conversation
from producer.adapters.registry import ADAPTERS, choose
from producer.refusals import Refusal
from producer.samples import to_prompt

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures" / "datasets"
AUTO = choose("auto")
ROWS = [
    json.loads(line)
    for path in sorted(FIXTURES.glob("*.jsonl"))
    if ".expected" not in path.name
    for line in path.read_text(encoding="utf-8").split("\n")
    if line
]
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1.5,
    "",
    " ",
    "[",
    "{}",
    "[null]",
    '"\\ud800"',
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": {}},
)


def damaged(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with a few parts replaced, cut or doubled."""
    if rng.random() < 0.04:
        return rng.choice(ODD)
    if type(value) is dict:
        return {key: damaged(item, rng) for key, item in value.items() if rng.random() > 0.02}
    if type(value) is list:
        items = [damaged(item, rng) for item in value if rng.random() > 0.03]
        return items + items[-1:] if rng.random() < 0.05 else items
    if type(value) is str and value and rng.random() < 0.15:
        at, end = sorted(rng.randrange(len(value) + 1) for _ in range(2))
        return rng.choice((value[:at], value[at:], value[:at] + value[end:], value + value[at:end], value.swapcase()))
    return value


def check(found: Conversation | Refusal) -> None:
    """Assert that a conversation can be asked or refused, and written."""
    if isinstance(found, Refusal):
        assert found.detail
        return
    prompt = to_prompt(found)
    if isinstance(prompt, Refusal):
        return
    json.loads(canonical_json([prompt.messages, prompt.tools, prompt.source_id, prompt.reference]))
    for message in prompt.messages:
        assert message["role"] in {"system", "user", "assistant", "tool"}
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function"
            assert type(call["id"]) is str
            assert type(call["function"]["name"]) is str
            assert type(call["function"]["arguments"]) is str


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=st.sampled_from(ROWS), rng=st.randoms(use_true_random=False))
def test_a_damaged_row_breaks_nothing(row: dict[str, Any], rng: random.Random) -> None:
    """Rows of all presets with parts cut, replaced or doubled raise nothing under any adapter."""
    broken = damaged(row, rng)
    if type(broken) is not dict:
        return
    check(AUTO.convert(broken))
    for adapter in ADAPTERS:
        adapter.recognises(broken)
        check(adapter.convert(broken))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_an_empty_row_is_refused(adapter: Any) -> None:
    """A row without any column is not recognised and lacks a field."""
    found = adapter.convert({})

    assert not adapter.recognises({})
    assert isinstance(found, Refusal)
    assert found.reason == "missing_field"


def test_the_fixtures_are_found() -> None:
    """The damaged rows come from all presets."""
    assert len(ROWS) > 250
