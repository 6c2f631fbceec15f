"""Has every assistant turn of a sample's conversation made anew, in order; each is durable before the next is asked."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from app.records import Kind, Record, Sample, turn_id
from app.settings import GenerationSettings
from workers.caller import Outcome
from workers.clients.fits import is_cut
from workers.conversation import Conversation, End, assistant_message
from workers.faults import FaultKind
from workers.outcomes import make_conversation_record, make_record
from workers.turn_memory import TurnMemory

Ask = Callable[[Sample], Awaitable[Outcome]]
"""Asks a model server for one turn."""


class Dialogue:
    """One sample's conversation with the model."""

    def __init__(
        self, dataset: str, sample: Sample, generation: GenerationSettings, memory: TurnMemory, *, worker: str
    ) -> None:
        """Begin where the durable turns end. Raises StoreError where they cannot be read."""
        self._sample = sample
        self._memory = memory
        self._rules = generation.rules()
        self._make_record = functools.partial(make_record, dataset, generation=generation, worker=worker)
        self._follow(memory.recall())

    def _follow(self, turns: Iterable[Record]) -> None:
        """Begin anew and take those turns as they are, as far as each answers the history before it."""
        self._plan = Conversation(self._sample.messages)
        self._turns = list[Record]()
        for turn in turns:
            if self._plan.over or turn.messages != self._plan.history:
                return
            self._hold(msgspec.structs.replace(turn, messages=self._plan.history))
            self._plan.take(assistant_message(turn))

    def _hold(self, turn: Record) -> None:
        """Keep a turn in mind; of those before the last one the record needs no ids, which can be many."""
        if self._turns:
            self._turns[-1] = msgspec.structs.replace(self._turns[-1], prompt_token_ids=None, output_ids=None)
        self._turns.append(turn)

    async def run(self, ask: Ask) -> Record:
        """Return the conversation's record: accepted, rejected, or failed where a turn was given up.

        Raises StoreError where a turn cannot be kept, and what `ask` raises.
        """
        lost: Outcome | None = None
        while not self._plan.over and lost is None:
            sample = self._next_sample()
            outcome = await ask(sample)
            if self._turns and self._overflows(outcome):
                self._plan.end(End.CONTEXT_OVERFLOW, f"turn {self._plan.number} does not fit into the model's context")
                lost = outcome
            elif outcome.completion is not None:
                await self._take(sample, outcome)
            else:
                return self._given_up(outcome)
        return make_conversation_record(self._sample, self._turns, self._plan, self._rules, lost=lost)

    def _overflows(self, outcome: Outcome) -> bool:
        """Tell whether a turn had no room in the context, or too little and is not wanted so."""
        if outcome.completion is None:
            return outcome.fault is not None and outcome.fault.kind is FaultKind.CONTEXT_OVERFLOW
        return is_cut(outcome.completion) and not self._rules.keep_truncated

    def _next_sample(self) -> Sample:
        id_ = turn_id(self._sample.id, self._plan.number)
        return msgspec.structs.replace(self._sample, id=id_, messages=self._plan.history, reference=None)

    async def _take(self, sample: Sample, outcome: Outcome) -> None:
        """Go on after an answer, once it is durable if another turn follows it."""
        per_turn = msgspec.structs.replace(self._rules, min_completion_tokens=0)
        record = self._make_record(sample, outcome, rules=per_turn)
        if record.verdict is not Kind.ACCEPTED:
            self._hold(record)
            self._plan.reject(record.reason or "")
            return
        before = self._turns.copy()
        self._hold(record)
        self._plan.take(assistant_message(record))
        if self._plan.over:
            return  # the conversation's record holds it, and a retry of that may ask for it anew
        kept = await self._memory.keep(record)
        if kept is not record:
            self._follow([*before, kept])

    def _given_up(self, outcome: Outcome) -> Record:
        """Return the record of a sample that failed at a turn; a retry goes on there."""
        record = self._make_record(self._sample, outcome)
        if not self._turns:
            return record
        kept = "turn 1 is" if len(self._turns) == 1 else f"turns 1 to {len(self._turns)} are"
        note = f"It failed at turn {self._plan.number}; {kept} kept and not asked again."
        return msgspec.structs.replace(record, notes=[*record.notes, note])
