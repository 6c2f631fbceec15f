"""How a conversation is planned of which every assistant turn is made anew: histories, splices, ends and notes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from app.records import Completion, Message
from workers.cached_results import CachedResults, arguments_of
from workers.conversation import Conversation, End, assistant_message

SYSTEM: Message = {"role": "system", "content": "Be brief."}


def user(text: str) -> Message:
    """Return a user turn."""
    return {"role": "user", "content": text}


def says(text: str, reasoning: str | None = None) -> Message:
    """Return an assistant turn that says something."""
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {})


def calls(*named: tuple[str, str, Any]) -> Message:
    """Return an assistant turn that calls functions, each given as call id, name and arguments."""
    made = [{"id": id_, "type": "function", "function": {"name": name, "arguments": args}} for id_, name, args in named]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id_: str | None, text: str, name: str | None = None) -> Message:
    """Return a tool's result."""
    message: Message = {"role": "tool", "content": text}
    return message | ({"name": name} if name else {}) | ({"tool_call_id": id_} if id_ else {})


def play(source: list[Message], *generated: Message) -> tuple[Conversation, list[list[Message]]]:
    """Let the model say these turns; return the plan and the history that each turn answers, and that of the next."""
    plan = Conversation(source)
    histories = [plan.history]
    for message in generated:
        assert not plan.over
        plan.take(message)
        histories.append(plan.history)
    return plan, histories if not plan.over else histories[:-1]


class Case(NamedTuple):
    """A source, what the model says, the histories that it is asked with, and how it ends."""

    source: list[Message]
    generated: list[Message]
    histories: list[list[Message]]
    over: bool = True
    ended: End | None = None
    notes: tuple[str, ...] = ()


A, B, C = user("a"), user("b"), user("c")
X, Y, Z = says("x"), says("y", "thought"), says("z")
OLD = says("old")
ASKS = calls(("s1", "add", '{"n": 1}'))
ADDS = calls(("g1", "add", '{"n":1}'))
FOUR = result("s1", "4")
MISSING = "The conversation ended before the source's did: turn {} calls {!r}, of which the source has no result left."
NOT_CALLED = (
    "The conversation ended before the source's did: the source has tool results after turn {}, which called no tool."
)
BAD = "The conversation ended before the source's did: turn {} calls {!r} with arguments that are no JSON object."
OTHER = "The result of {!r} after turn {} is that of a call with other arguments."

CASES = {
    "one turn": Case([A], [X], [[A]]),
    "a call where the source has no more either": Case([A], [ADDS], [[A]]),
    "two turns": Case([A, OLD, B], [X, Y], [[A], [A, X, B]]),
    "not over yet": Case([A, OLD, B], [X], [[A], [A, X, B]], over=False),
    "three turns, thoughts are handed on": Case(
        [SYSTEM, A, OLD, B, OLD, C], [Y, X, Z], [[SYSTEM, A], [SYSTEM, A, Y, B], [SYSTEM, A, Y, B, X, C]]
    ),
    "assistant turns before the first user turn stay": Case([OLD, A, OLD, B], [X, Z], [[OLD, A], [OLD, A, X, B]]),
    "a run of assistant turns is one turn": Case([A, OLD, says("older"), B], [X, Z], [[A], [A, X, B]]),
    "two user turns in a row": Case([A, B, OLD, C], [X, Z], [[A, B], [A, B, X, C]]),
    "a late system turn": Case([A, OLD, SYSTEM, B], [X, Z], [[A], [A, X, SYSTEM, B]]),
    "a result is spliced in under the new call's id": Case(
        [A, ASKS, FOUR], [ADDS, X], [[A], [A, ADDS, result("g1", "4")]]
    ),
    "a result, an answer, and the next question": Case(
        [A, ASKS, FOUR, OLD, B], [ADDS, X, Z], [[A], [A, ADDS, result("g1", "4")], [A, ADDS, result("g1", "4"), X, B]]
    ),
    "a result that the source's model never answered": Case(
        [A, ASKS, FOUR, B], [ADDS, X], [[A], [A, ADDS, result("g1", "4"), B]]
    ),
    "other arguments are noted": Case(
        [A, ASKS, FOUR],
        [calls(("g1", "add", '{"n": 2}')), X],
        [[A], [A, calls(("g1", "add", '{"n": 2}')), result("g1", "4")]],
        notes=(OTHER.format("add", 1),),
    ),
    "the result for the same arguments is preferred": Case(
        [A, calls(("s1", "add", {"n": 1}), ("s2", "add", {"n": 2})), result("s1", "one"), result("s2", "two")],
        [calls(("g1", "add", '{"n": 2}'), ("g2", "add", '{"n": 7}')), X],
        [
            [A],
            [
                A,
                calls(("g1", "add", '{"n": 2}'), ("g2", "add", '{"n": 7}')),
                result("g1", "two"),
                result("g2", "one"),
            ],
        ],
        notes=(OTHER.format("add", 1),),
    ),
    "one after the other, where the source called both at once": Case(
        [A, calls(("s1", "add", "{}"), ("s2", "sub", "{}")), result("s1", "4"), result("s2", "0"), OLD, B],
        [calls(("g1", "add", "{}")), calls(("g2", "sub", "{}")), X, Z],
        [
            [A],
            [A, calls(("g1", "add", "{}")), result("g1", "4")],
            [A, calls(("g1", "add", "{}")), result("g1", "4"), calls(("g2", "sub", "{}")), result("g2", "0")],
            [
                *[A, calls(("g1", "add", "{}")), result("g1", "4"), calls(("g2", "sub", "{}")), result("g2", "0")],
                *[X, B],
            ],
        ],
    ),
    "both at once, where the source called one after the other": Case(
        [A, calls(("s1", "add", "{}")), result("s1", "4"), calls(("s2", "sub", "{}")), result("s2", "0"), OLD, B],
        [calls(("g1", "sub", "{}"), ("g2", "add", "{}")), X, Z],
        [
            [A],
            [A, calls(("g1", "sub", "{}"), ("g2", "add", "{}")), result("g1", "0"), result("g2", "4")],
            [A, calls(("g1", "sub", "{}"), ("g2", "add", "{}")), result("g1", "0"), result("g2", "4"), X, B],
        ],
    ),
    "a result without a call is noted": Case(
        [A, calls(("s1", "add", "{}"), ("s2", "sub", "{}")), result("s1", "4"), result("s2", "0"), OLD, B],
        [calls(("g1", "add", "{}")), X, Z],
        [
            [A],
            [A, calls(("g1", "add", "{}")), result("g1", "4")],
            [A, calls(("g1", "add", "{}")), result("g1", "4"), X, B],
        ],
        notes=("1 tool result of the source before turn 3 had no call.",),
    ),
    "a call that the source never made": Case(
        [A, OLD, B], [ADDS], [[A]], ended=End.TOOL_RESULT_MISSING, notes=(MISSING.format(1, "add"),)
    ),
    "another tool than the source's": Case(
        [A, ASKS, FOUR, OLD, B],
        [calls(("g1", "sub", "{}"))],
        [[A]],
        ended=End.TOOL_RESULT_MISSING,
        notes=(MISSING.format(1, "sub"),),
    ),
    "one call of two has a result": Case(
        [A, ASKS, FOUR],
        [calls(("g1", "add", '{"n": 1}'), ("g2", "add", '{"n": 1}'))],
        [[A]],
        ended=End.TOOL_RESULT_MISSING,
        notes=(MISSING.format(1, "add"),),
    ),
    "a second call after the only result": Case(
        [A, ASKS, FOUR],
        [ADDS, ADDS],
        [[A], [A, ADDS, result("g1", "4")]],
        ended=End.TOOL_RESULT_MISSING,
        notes=(MISSING.format(2, "add"),),
    ),
    "arguments that are no JSON": Case(
        [A, ASKS, FOUR],
        [calls(("g1", "add", '{"n": '))],
        [[A]],
        ended=End.BAD_ARGUMENTS,
        notes=(BAD.format(1, "add"),),
    ),
    "no call where the source has results": Case(
        [A, ASKS, FOUR, OLD, B], [X], [[A]], ended=End.TOOL_NOT_CALLED, notes=(NOT_CALLED.format(1),)
    ),
    "results of a later round are not for this one": Case(
        [A, OLD, B, ASKS, FOUR, OLD, C], [ADDS], [[A]], ended=End.TOOL_RESULT_MISSING, notes=(MISSING.format(1, "add"),)
    ),
    "a result without any call before it is said to the model": Case(
        [A, result(None, "4"), OLD, B], [X, Z], [[A, result(None, "4")], [A, result(None, "4"), X, B]]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_conversation(name: str) -> None:
    """Each turn answers exactly the history made so far, and it ends where, and for the reason that, it should."""
    case = CASES[name]
    plan, histories = play(case.source, *case.generated)
    assert histories == case.histories
    assert (plan.over, plan.ended, tuple(plan.notes)) == (case.over, case.ended, case.notes)
    assert plan.number == len(case.generated) + 1


def test_histories_are_not_changed_afterwards() -> None:
    """The history of an earlier turn stays as it was asked, and so does the source."""
    source = [A, OLD, B]
    plan = Conversation(source)
    first = plan.history
    plan.take(X)
    assert (first, source) == ([A], [A, OLD, B])


@pytest.mark.parametrize(
    ("results", "name"),
    [
        ([result("s2", "two"), result("s1", "one")], "by the call's id, whatever the order"),
        ([result(None, "one", "add"), result(None, "two", "sub")], "by the result's own name"),
        ([result(None, "two", "sub"), result(None, "one", "add")], "by the result's own name, whatever the order"),
        ([result(None, "one"), result(None, "two")], "by the position"),
        ([result("other", "one"), result("ids", "two")], "by the position, where the ids are strangers"),
    ],
)
def test_how_a_result_finds_its_function(results: list[Message], name: str) -> None:
    """A cached result belongs to the call with its id, else to the function that it names, else to its place's call."""
    cache = CachedResults([calls(("s1", "add", "{}"), ("s2", "sub", "{}")), *results])
    asked = calls(("g1", "sub", "{}"), ("g2", "add", "{}"))["tool_calls"]
    assert cache.missing(asked) is None
    answered = cache.answer(asked)
    assert [(one["tool_call_id"], one["content"]) for one in answered.messages] == [("g1", "two"), ("g2", "one")], name
    assert (cache.left, cache.given) == (0, 2)


def test_call_ids_that_are_not_unique_tell_nothing() -> None:
    """Parallel calls that share an id are told apart by place; an id that a later turn uses again is that turn's."""
    shared = CachedResults([calls(("x", "add", "{}"), ("x", "sub", "{}")), result("x", "one"), result("x", "two")])
    asked = calls(("g1", "sub", "{}"), ("g2", "add", "{}"))["tool_calls"]
    assert [one["content"] for one in shared.answer(asked).messages] == ["two", "one"]
    again = CachedResults(
        [calls(("x", "add", "{}")), result("x", "one"), calls(("x", "sub", "{}")), result("x", "two")]
    )
    assert [one["content"] for one in again.answer(asked).messages] == ["two", "one"]


def test_results_of_nobody_answer_no_call() -> None:
    """A result that nothing gives a name is given to no call."""
    cache = CachedResults([says("I add: {...}"), result(None, "4")])
    assert cache.missing(ADDS["tool_calls"]) == "add"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": 1}', {"a": 1}, True),
        ("", {}, True),
        (None, "{}", True),
        ('{"a": 1}', '{"a": 2}', False),
        ("not json", "not json", True),
        ("not json", "{}", False),
    ],
)
def test_when_arguments_are_the_same(one: Any, other: Any, same: bool) -> None:
    """Arguments are compared as JSON, whatever their order, spaces and form."""
    assert (arguments_of({"function": {"arguments": one}}) == arguments_of({"function": {"arguments": other}})) is same


def test_a_rejected_turn_ends_it() -> None:
    """A turn that broke a rule ends the conversation, with a reason unless it was the last one anyway."""
    plan = Conversation([A, OLD, B])
    plan.reject("truncated")
    assert (plan.over, plan.ended) == (True, End.TURN_REJECTED)
    assert plan.notes == ["The conversation ended before the source's did: turn 1 was rejected as truncated."]
    last = Conversation([A])
    last.reject("truncated")
    assert (last.over, last.ended, last.notes) == (True, None, [])


def test_what_the_history_holds_of_a_turn() -> None:
    """Content, thoughts and calls are handed on; what is not there has no key, but the content always has one."""
    call = ADDS["tool_calls"]
    assert assistant_message(Completion(content="x")) == {"role": "assistant", "content": "x"}
    assert assistant_message(Completion(content="x", reasoning="r")) == says("x", "r")
    assert assistant_message(Completion(tool_calls=call)) == {"role": "assistant", "content": None, "tool_calls": call}
