"""Conversations of several turns, some with tools: the same ones each time, and what must become of each of them.

They are made to be asked with `--turns all`: for any answers `expected_of` tells every history that the server must
have seen, and how the conversation must have ended.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from producer.simulator.tokens import encode

Message = dict[str, Any]

FOUND, GO_ON = "(found)", "(go on)"
"""Ends the last tool result of a round, or one before it."""
CITY = {"city": "Rome"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name} of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "population", "twin")
]
_TAIL = "<|im_end|>\n<|im_start|>assistant\n"
"""Stands between the last message and the answer in the prompts of `tests.support.byte_tokenizer`."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How the tools of one round are used: in the source, and by the simulated model."""

    steps: tuple[tuple[str, ...], ...]
    """The functions that each of the source's turns calls."""
    called: tuple[str, ...]
    """Those that the simulated model calls first; in later steps it calls what the source does."""
    ended: str | None = None
    """How the conversation then ends."""


WAYS = {
    "one call": Way((("weather",),), ("weather",)),
    "two calls": Way((("weather", "population"),), ("population", "weather")),
    "two steps": Way((("weather",), ("population",)), ("weather",)),
    "no call": Way((("weather",),), (), "tool_not_called"),
    "another call": Way((("weather",),), ("twin",), "tool_result_missing"),
}


@dataclasses.dataclass(frozen=True)
class Round:
    """What a user says, and the results of the tools that the source's assistant used before it answered."""

    said: str
    way: Way | None
    results: Mapping[str, str]
    """By function."""


@dataclasses.dataclass(frozen=True, eq=False)
class Talk:
    """One conversation."""

    id: str
    system: str | None
    rounds: tuple[Round, ...]

    @property
    def row(self) -> dict[str, Any]:
        """The row that is enqueued, in OpenAI's form."""
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for number, each in enumerate(self.rounds, start=1):
            messages.append({"role": "user", "content": each.said})
            for step in each.way.steps if each.way else ():
                calls = [_call(name, f"source_{self.id}_{name}") for name in step]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
                messages += [
                    {"role": "tool", "content": each.results[name], "tool_call_id": f"source_{self.id}_{name}"}
                    for name in step
                ]
            messages.append({"role": "assistant", "content": f"The source's answer {number}."})
        tools = {"tools": TOOLS} if any(each.way for each in self.rounds) else {}
        return {"id": self.id, "messages": messages, **tools}

    @property
    def ended(self) -> str | None:
        """How it ends with the simulated model."""
        return next((each.way.ended for each in self.rounds if each.way), None)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What must become of a conversation, given the turns that the model made of it."""

    histories: list[list[Message]]
    """The messages of each request, in order."""
    ended: str | None


def talks(count: int) -> list[Talk]:
    """Return so many conversations of two to four user turns: two in five use tools, one in three has a system turn."""
    return [_talk(number) for number in range(count)]


def _talk(number: int) -> Talk:
    names = list(WAYS)
    way = names[(number // 5 * 2 + number % 5 // 3) % len(names)] if number % 5 in {1, 3} else None
    length = 2 + number % 3
    at = number // 2 % length
    rounds = []
    for place in range(length):
        chosen = way if place == at else None
        asked = f" [{chosen}]" if chosen else ""
        said = f"Caf\u00e9 {number}.{place + 1}?{asked} \U0001f305"
        rounds.append(Round(said, WAYS[chosen] if chosen else None, _results(number, chosen)))
    return Talk(f"talk-{number}", f"Guide {number}." if number % 3 == 0 else None, tuple(rounds))


def _results(number: int, way: str | None) -> dict[str, str]:
    if way is None:
        return {}
    steps = WAYS[way].steps
    return {name: f"{name} {number} {FOUND if step is steps[-1] else GO_ON}" for step in steps for name in step}


def expected_of(talk: Talk, answers: Sequence[Message]) -> Expected:
    """Return the requests that must have been sent and how it must have ended, given the turns that were made."""
    left = iter(answers)
    history: list[Message] = [] if talk.system is None else [{"role": "system", "content": talk.system}]
    histories: list[list[Message]] = []
    for each in talk.rounds:
        history = [*history, {"role": "user", "content": each.said}]
        results, used = dict(each.results), False
        while True:
            histories.append(history)
            answer = next(left, None)
            if answer is None:
                return Expected(histories, None)
            history = [*history, answer]
            calls = answer.get("tool_calls") or []
            if not calls and results and not used:
                return Expected(histories, "tool_not_called")
            if not calls or (not each.results and each is talk.rounds[-1]):
                break
            given = _answers(calls, results)
            if given is None:
                return Expected(histories, "tool_result_missing")
            history, used = [*history, *given], True
    return Expected(histories, None)


def _answers(calls: Sequence[Message], results: dict[str, str]) -> list[Message] | None:
    """Return the tool turns that answer the calls, taking their results; None where one is missing."""
    names = [call["function"]["name"] for call in calls]
    if len(set(names)) < len(names) or not results.keys() >= set(names):
        return None
    return [
        {"role": "tool", "content": results.pop(name), "tool_call_id": call["id"]}
        for name, call in zip(names, calls, strict=True)
    ]


def chat_rules() -> list[dict[str, Any]]:
    """Return the rules of a simulated chat server that uses the tools as the user turns say."""
    ids = ("call_0", "call_1", "call_next")
    return _rules(lambda text: [f'{text}", "tool_call_id": "{id_}"}}]' for id_ in ids])


def generate_rules() -> list[dict[str, Any]]:
    """Return the same for a simulated server that takes the ids of `tests.support.byte_tokenizer`."""
    return _rules(lambda text: [", ".join(map(str, encode(text + _TAIL))) + "]"])


def _rules(ends_on: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """`ends_on` returns how the bodies of requests may end their prompt whose last message ends on a text."""
    go_on = [_call("population", "call_next")]
    rules: list[dict[str, Any]] = [{"where": "body", "match": end, "tool_calls": go_on} for end in ends_on(GO_ON)]
    rules += [{"where": "body", "match": end, "content": "It says so: {user}"} for end in ends_on(FOUND)]
    for name, way in WAYS.items():
        calls = [_call(called, f"call_{number}") for number, called in enumerate(way.called)]
        if calls:
            rules.append({"match": f"[{name}]", "tool_calls": calls})
    return rules


def _call(name: str, id_: str) -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(CITY)}}
