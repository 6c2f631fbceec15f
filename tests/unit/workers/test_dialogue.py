"""A conversation's turns over a real ledger and recorder: what is remembered, what is asked again, what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from app.ledger import Ledger
from app.places import DatasetFolder
from app.queue import Queue
from app.records import Completion, Kind, Record, Sample, Usage, split_turn, turn_id
from app.settings import GenerationSettings
from tests.support.turns import history, talk
from workers.caller import Outcome
from workers.clients.fits import CUT
from workers.dialogue import Dialogue
from workers.faults import FaultKind, make_fault
from workers.outcomes import make_pen
from workers.recorder import Recorder
from workers.turn_memory import TurnLedger, TurnMemory

SAMPLE = Sample(id="a", messages=talk("q1", "q2", "q3")["messages"][:-1], settings="f" * 16)
SETTINGS = GenerationSettings(turns="all", min_completion_tokens=6)


class Model:
    """Answers what it is asked, remembers it, and fails at the turns that it is told to."""

    def __init__(self, *, cut: str = "", **faults: FaultKind) -> None:
        self.asked = list[Sample]()
        self.cut = cut
        """The user turn to which the answer does not fit into the context."""
        self.faults = faults

    async def ask(self, sample: Sample) -> Outcome:
        """Return the last user turn in capitals, two tokens long, or a fault."""
        self.asked.append(sample)
        text = sample.messages[-1]["content"]
        kind = self.faults.get(text)
        usage = Usage(prompt_tokens=10, completion_tokens=2)
        ending: dict[str, Any] = {"finish_reason": "stop"}
        if text == self.cut:
            ending = {"finish_reason": "length", "notes": [f"{CUT}after 2 tokens"]}
        return Outcome(
            completion=None if kind else Completion(content=text.upper(), usage=usage, **ending),
            fault=make_fault(kind, "no") if kind else None,
            endpoint="http://server",
            protocol="openai",
            attempts=1,
            faults=[],
            started_at=time.time(),
            finished_at=time.time(),
            latency_s=0.5,
            request_id=f"{sample.id}-r0-a1",
            model="toy",
            seed=None,
        )


class Stage:
    """A sample's dialogue, begun anew as often as wanted."""

    def __init__(self, ledger: Ledger, recorder: Recorder) -> None:
        self.ledger = ledger
        self._memory = TurnMemory("d", SAMPLE, ledger, recorder)

    def run(self, model: Model) -> Record:
        """Let a worker have the conversation."""
        return asyncio.run(self.dialogue().run(model.ask))

    def dialogue(self) -> Dialogue:
        """Return the conversation as a worker takes it up."""
        return Dialogue("d", SAMPLE, SETTINGS, self._memory, worker="me")

    def write(self, *records: Record) -> None:
        """Write turns' lines as they are."""
        self.ledger.commit([make_pen(record) for record in records])

    def turns(self) -> dict[str, str | None]:
        """Return what the durable turns say, by id."""
        return {record.id: record.content for record in self._memory.recall()}


@pytest.fixture
def stage(books: Queue, folder: DatasetFolder) -> Iterator[Stage]:
    """Return a stage on an empty ledger of turns."""
    recorder = Recorder(books, on_stall=lambda _why: None)
    with TurnLedger.open(folder.turns(SAMPLE.settings)) as ledger:
        yield Stage(ledger, recorder)
        recorder.stop()


def turn(number: int, content: str, messages: list[dict[str, str]]) -> Record:
    """Return an accepted turn's record."""
    return Record(
        id=turn_id("a", number),
        dataset="d",
        verdict=Kind.ACCEPTED,
        source=SAMPLE.source,
        messages=messages,
        content=content,
        finish_reason="stop",
        usage=Usage(prompt_tokens=10, completion_tokens=2),
        sampling={},
        settings=SAMPLE.settings,
        attempts=1,
    )


def test_turns_are_kept_and_redis_hears_of_none(stage: Stage, books: Queue) -> None:
    """Each turn but the last is durable in its own ledger, and no turn ends the sample in Redis' books."""
    books.put("d", [SAMPLE])
    model = Model()
    record = stage.run(model)
    assert [sample.id for sample in model.asked] == ["a#turn1", "a#turn2", "a#turn3"]
    assert stage.turns() == {"a#turn1": "Q1", "a#turn2": "Q2"}
    assert record.messages == history("q1", "Q1", "q2", "Q2", "q3")
    assert (record.id, record.verdict, record.content) == ("a", Kind.ACCEPTED, "Q3")
    assert make_pen(record).tokens == 6
    assert books.waiting_ids("d", ["a"]) == {"a"}


def test_it_goes_on_behind_the_turns_that_are_there(stage: Stage) -> None:
    """Turns that are durable are taken as they are and not asked again, whoever wrote them."""
    stage.write(turn(1, "other", history("q1")))
    model = Model()
    record = stage.run(model)
    assert [sample.messages for sample in model.asked] == [
        history("q1", "other", "q2"),
        history("q1", "other", "q2", "Q2", "q3"),
    ]
    assert isinstance(record.turns, list)
    assert [one.id for one in record.turns] == ["a#turn1", "a#turn2", "a#turn3"]
    assert record.attempts == 3


def test_a_gap_ends_what_is_remembered(stage: Stage) -> None:
    """A turn behind one that is missing is not taken before that one is made anew; then it counts."""
    stage.write(turn(2, "second", history("q1", "Q1", "q2")))
    assert stage.turns() == {}
    model = Model()
    record = stage.run(model)
    assert [split_turn(sample.id)[1] for sample in model.asked] == [1, 2, 3]
    assert record.messages == history("q1", "Q1", "q2", "second", "q3")


def test_a_turn_of_another_history_is_passed_over(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A durable turn that answers another history is never built upon and stops nobody; the log says where it is."""
    stage.write(turn(2, "other", history("q1", "lost", "q2")))
    record = stage.run(Model())
    assert (record.verdict, record.messages) == (Kind.ACCEPTED, history("q1", "Q1", "q2", "Q2", "q3"))
    assert stage.turns() == {"a#turn1": "Q1", "a#turn2": "other"}
    (told,) = (line.getMessage() for line in caplog.records if line.levelname == "WARNING")
    assert told.startswith(f"dataset d: a line of turn a#turn2 in {stage.ledger.folder.path} cannot be used")


def test_a_turn_that_cannot_be_read_is_passed_over(stage: Stage) -> None:
    """A line that has a turn's id and is no record is not built upon; the conversation is recorded all the same."""
    path = stage.ledger.folder.lines(Kind.ACCEPTED)
    path.write_bytes(b'{"id":"a#turn1"}\n')
    stage.ledger.catch_up()
    assert stage.run(Model()).messages == history("q1", "Q1", "q2", "Q2", "q3")
    assert stage.run(Model()).verdict is Kind.ACCEPTED


def test_a_folder_of_turns_that_is_moved_away_is_made_anew(stage: Stage) -> None:
    """Turns go on to be remembered where their folder was moved away in the middle of a conversation."""
    model = Model()
    ask, moved = model.ask, stage.ledger.folder.path.parent.with_name("moved")

    async def asking(sample: Sample) -> Outcome:
        if split_turn(sample.id)[1] == 2:
            stage.ledger.folder.path.parent.rename(moved)
        return await ask(sample)

    model.ask = asking  # type: ignore[method-assign]
    assert stage.run(model).messages == history("q1", "Q1", "q2", "Q2", "q3")
    assert stage.ledger.look_up(["a#turn1", "a#turn2"]).keys() == {"a#turn2"}


def test_a_long_conversation_that_is_taken_up_shares_its_messages(stage: Stage) -> None:
    """However long the history, each message is in memory once, and ids are kept of the newest turn alone."""
    ids = list(range(1000, 1050))
    stage.write(
        msgspec.structs.replace(turn(1, "Q1", history("q1")), prompt_token_ids=ids, output_ids=ids),
        msgspec.structs.replace(turn(2, "Q2", history("q1", "Q1", "q2")), prompt_token_ids=ids, output_ids=ids),
    )
    held = stage.dialogue()._turns
    assert [one.prompt_token_ids for one in held] == [None, ids]
    assert held[0].messages[0] is held[1].messages[0] is SAMPLE.messages[0]


def test_a_later_turn_that_fails_is_gone_on_with(stage: Stage) -> None:
    """A fault fails the sample as it was asked and says which turns are kept; the next try asks from there on."""
    record = stage.run(Model(q3=FaultKind.TIMEOUT))
    assert (record.id, record.verdict, record.reason) == ("a", Kind.FAILED, "timeout")
    assert record.messages == SAMPLE.messages
    assert not record.turns
    assert record.notes == ["It failed at turn 3; turns 1 to 2 are kept and not asked again."]
    model = Model()
    assert stage.run(model).verdict is Kind.ACCEPTED
    assert [sample.id for sample in model.asked] == ["a#turn3"]


def test_a_turn_that_does_not_fit_ends_the_conversation(stage: Stage) -> None:
    """A later turn over the context ends it with the turn before, whose tokens alone count; a first one fails."""
    record = stage.run(Model(q2=FaultKind.CONTEXT_OVERFLOW))
    assert (record.ended, record.content, record.attempts) == ("context_overflow", "Q1", 2)
    assert (record.verdict, record.reason) == (Kind.REJECTED, "too_short")
    assert stage.turns() == {"a#turn1": "Q1"}


def test_a_turn_that_the_context_cuts_ends_the_conversation(stage: Stage) -> None:
    """A later turn that the context cut ends it with the turn before, which is good as it is."""
    record = stage.run(Model(cut="q3"))
    assert (record.ended, record.content, record.attempts) == ("context_overflow", "Q2", 3)
    assert record.latency_s == 1.0


def test_a_first_turn_that_the_context_cuts_is_rejected(stage: Stage) -> None:
    """Without any turn before it, the answer is kept as a rejected one, with the numbers."""
    record = stage.run(Model(cut="q1"))
    assert (record.verdict, record.reason, record.content) == (Kind.REJECTED, "truncated", "Q1")
    assert record.notes[0].startswith(CUT)


def test_the_time_of_a_conversation_is_that_of_all_turns(stage: Stage) -> None:
    """What a sample took is the sum of its answered calls, as its tokens are."""
    record = stage.run(Model())
    assert (record.latency_s, make_pen(record).tokens) == (1.5, 6)


def test_a_first_turn_that_does_not_fit_fails(stage: Stage) -> None:
    """Without any turn there is no conversation to keep."""
    record = stage.run(Model(q1=FaultKind.CONTEXT_OVERFLOW))
    assert (record.verdict, record.reason, record.notes) == (Kind.FAILED, "context_overflow", [])
