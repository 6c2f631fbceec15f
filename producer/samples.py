"""Turns source rows into samples, and accounts for every row that does not become one.

The rules, in the order in which they are applied to a conversation:

* All assistant turns at its end are cut off; the last of them is kept as the sample's `reference`. Nothing is ever sent
  as a prefill. Assistant turns anywhere else, also two in a row or one at the very start, stay where they are, as do
  consecutive user turns and late or repeated system turns: whether they can be asked is for the model server to say.
* What is left must hold a user turn and end on a user or tool turn; an assistant turn in it must say or call something.
* The last user turn must hold a visible character: white space, zero-width and other invisible characters alone are an
  empty prompt. A text that is not empty is sent unchanged, spaces included, and nothing else is ever turned into text.
* The run's own system prompt is put before conversations without a system turn (an empty system turn is one).

The id is made of messages, tools and the source's id (see `app.records.sample_id`): other columns, the order of keys
and the position of the row do not matter.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from app.errors import SourceError
from app.records import Message, RefusedRow, Sample, Source, sample_id
from producer.adapters.base import Adapter, Conversation, add_system, is_blank
from producer.adapters.registry import check_columns, shape_of, unrecognised
from producer.dedupe import Dedupe
from producer.formats.rows import Row
from producer.near import NearDuplicates
from producer.refusals import Reason, Refusal
from producer.seen import Before, Meeting, Seen
from producer.selection import Rows

BATCH_ROWS = 500
BATCH_BYTES = 16 * 1024 * 1024
"""A batch is closed early once its rows have this many bytes, so that huge rows do not pile up in memory."""
MAX_CONFLICTS = 20

_PLACE_BITS = 40
"""A place is a row number, with the number of its file above these bits."""


class Prompt(msgspec.Struct, frozen=True):
    """A conversation cut to what will be asked."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    source_id: str | None
    reference: Message | None


@dataclasses.dataclass(frozen=True)
class Conflict:
    """One source id met with two different prompts; both became samples."""

    id: str
    """The source's id."""
    first_row: str
    """Where it was met first, such as `row 1` or `row 1 of a.jsonl`."""
    row: str
    """Where it was met with another prompt."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """What became of the next rows: every row gave samples or one refused row."""

    samples: list[Sample]
    refused: list[RefusedRow]
    read: int
    """The number of rows."""


def to_prompt(conversation: Conversation, *, system: str | None = None, drop_system: bool = False) -> Prompt | Refusal:
    """Cut a conversation to its prompt, or say why it cannot be asked.

    `drop_system` takes its own system turns out before `system` is put in.
    """
    messages, reference = cut(conversation.messages)
    if drop_system:
        messages = [message for message in messages if message["role"] != "system"]
    refusal = _refusal_of(messages)
    if refusal is not None:
        return refusal
    if system is not None:
        messages = add_system(system, messages)
    return Prompt(messages, conversation.tools, conversation.source_id, reference)


def cut(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """Cut off all assistant turns at the end and return the last of them as the reference, if it says anything."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if end == len(messages):
        return messages, None
    reference = messages[-1]
    return messages[:end], reference if len(reference) > 1 else None


def _refusal_of(messages: list[Message]) -> Refusal | None:
    """Return why a cut conversation cannot be asked, if so."""
    last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last_user is None:
        return Refusal(Reason.NO_USER_TURN, "the conversation has no user turn to answer")
    if is_blank(_text_of(last_user["content"])):
        return Refusal(Reason.EMPTY_PROMPT, "the last user turn holds no visible text")
    if messages[-1]["role"] == "system":
        return Refusal(Reason.BAD_MESSAGES, "the conversation ends on a system turn")
    for position, message in enumerate(messages, start=1):
        if "content" not in message and "tool_calls" not in message:
            return Refusal(Reason.MISSING_FIELD, f"turn {position} (assistant) has neither text nor calls")
    return None


def _text_of(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _copies(row: Row, prompt: Prompt, first_id: str, copies: range, settings: str) -> list[Sample]:
    source = Source(row=row.number, id=prompt.source_id, name=row.name)
    return [
        Sample(
            id=first_id
            if copy == 1
            else sample_id(prompt.messages, prompt.tools, source_id=prompt.source_id, copy=copy),
            messages=prompt.messages,
            tools=prompt.tools,
            source=source,
            reference=prompt.reference,
            settings=settings,
        )
        for copy in copies
    ]


class Pass:
    """One pass over a source, in bounded memory: `read` is always `refused` plus the rows that became samples."""

    def __init__(
        self,
        source: Rows,
        *,
        adapter: Adapter,
        system: str | None = None,
        drop_system: bool = False,
        samples_per_prompt: int = 1,
        dedupe: Dedupe = Dedupe.EXACT,
        settings: str = "",
    ) -> None:
        """Prepare to read; `--dedupe near` without its library is a UsageError here."""
        self._source = source
        self._adapter = adapter
        self._system = system
        self._drop_system = drop_system
        self._dedupe = dedupe
        self._near = NearDuplicates() if dedupe is Dedupe.NEAR else None
        self._copies = samples_per_prompt
        self._settings = settings
        self._names: dict[str | None, int] = {}
        self.read = 0
        """Rows read so far."""
        self.refused = 0
        """Rows that became no sample, duplicates included."""
        self.duplicates = 0
        """Rows whose prompt and source id were met before."""
        self.near_duplicates = 0
        """Rows whose prompt is nearly the same as an earlier one."""
        self.reasons: collections.Counter[Reason] = collections.Counter()
        """How many rows were refused, by reason."""
        self.shapes: collections.Counter[str] = collections.Counter()
        """How many of the first rows each adapter reads."""
        self.conflicts: list[Conflict] = []
        """The first MAX_CONFLICTS source ids that were met with another prompt."""
        self.conflict_count = 0
        """How many rows repeated a source id with another prompt."""

    def batches(self, size: int = BATCH_ROWS) -> Iterator[Batch]:
        """Read the first rows at once; return what becomes of all, at most `size` at a time, in the source's order.

        Raises SourceError where the source breaks off, and UsageError, here and now, when the adapter recognises none
        of the first rows.
        """
        chunks = _chunks(self._source.rows(), size)
        first = list(itertools.islice(chunks, 1))
        for rows in first:
            self._check_shape(rows)
        return self._batches(itertools.chain(first, chunks))

    def _batches(self, chunks: Iterator[list[Row]]) -> Iterator[Batch]:
        with Seen() as seen, contextlib.ExitStack() as files:
            if self._near is not None:
                files.callback(self._near.close)
            for chunk in chunks:
                yield self._batch(chunk, seen)

    def _check_shape(self, rows: list[Row]) -> None:
        values = [row.value for row in rows if row.value is not None]
        check_columns(self._adapter, values)
        self.shapes.update(filter(None, (shape_of(self._adapter, value) for value in values)))
        if values and not any(self._adapter.recognises(value) or _is_near(self._adapter, value) for value in values):
            raise unrecognised(self._adapter, values)

    def _batch(self, rows: list[Row], seen: Seen) -> Batch:
        prompts = [self._prompt_of(row) for row in rows]
        meetings = [
            Meeting(
                sample_id(prompt.messages, prompt.tools, source_id=prompt.source_id),
                prompt.source_id,
                self._place(row),
            )
            for row, prompt in zip(rows, prompts, strict=True)
            if isinstance(prompt, Prompt)
        ]
        answers = zip(meetings, seen.meet(meetings), self._occurrences(meetings, seen), strict=True)
        samples: list[Sample] = []
        refused: list[tuple[Row, Refusal, str]] = []
        for row, prompt in zip(rows, prompts, strict=True):
            if isinstance(prompt, Refusal):
                refused.append((row, prompt, _refused_id(row, prompt)))
                continue
            met, before, occurrence = next(answers)
            repeated = self._repeated(prompt, met, before)
            if repeated is not None:
                refused.append((row, *repeated))
                continue
            self._note_conflict(met, before)
            copies = range((occurrence - 1) * self._copies + 1, occurrence * self._copies + 1)
            samples += _copies(row, prompt, met.sample_id, copies, self._settings)
        self.read += len(rows)
        self.refused += len(refused)
        self.reasons.update(refusal.reason for _, refusal, _ in refused)
        return Batch(samples, self._refused_rows(refused, seen), len(rows))

    def _prompt_of(self, row: Row) -> Prompt | Refusal:
        if row.value is None:
            return row.problem or Refusal(Reason.NOT_JSON, "the row could not be read")
        conversation = self._adapter.convert(row.value)
        if isinstance(conversation, Refusal):
            return conversation
        return to_prompt(conversation, system=self._system, drop_system=self._drop_system)

    def _occurrences(self, meetings: list[Meeting], seen: Seen) -> list[int]:
        """Return for each prompt the how manieth of its kind it is, where each is asked; else 1."""
        if self._dedupe is not Dedupe.NONE:
            return [1] * len(meetings)
        return seen.count_prompts([met.sample_id for met in meetings])

    def _repeated(self, prompt: Prompt, met: Meeting, before: Before) -> tuple[Refusal, str] | None:
        """Return why a prompt counts as repeated, and the refused row's id, if it does."""
        if self._dedupe is Dedupe.NONE:
            return None
        if before.same is not None:
            self.duplicates += 1
            detail = f"the same prompt as {self._words(before.same)}"
            return Refusal(Reason.DUPLICATE, detail), f"!dup-{met.sample_id}"
        near = self._near.meet(prompt.messages, prompt.tools, met.place) if self._near else None
        if near is None:
            return None
        self.near_duplicates += 1
        detail = f"nearly the same prompt as {self._words(near.place)} (similarity {near.similarity:.2f})"
        return Refusal(Reason.NEAR_DUPLICATE, detail), f"!near-{met.sample_id}"

    def _refused_rows(self, refused: list[tuple[Row, Refusal, str]], seen: Seen) -> list[RefusedRow]:
        counts = seen.count_refused([id_ for _, _, id_ in refused]) if refused else []
        return [
            RefusedRow(
                id=id_ if count == 1 else f"{id_}#{count}",
                source=self._source.description,
                row=row.number,
                reason=refusal.reason,
                detail=refusal.detail,
                name=row.name,
                start=row.start,
            )
            for (row, refusal, id_), count in zip(refused, counts, strict=True)
        ]

    def _note_conflict(self, met: Meeting, before: Before) -> None:
        if before.other is None or met.source_id is None:
            return
        self.conflict_count += 1
        if len(self.conflicts) < MAX_CONFLICTS:
            self.conflicts.append(Conflict(met.source_id, self._words(before.other), self._words(met.place)))

    def _place(self, row: Row) -> int:
        file = self._names.setdefault(row.name, len(self._names))
        return file << _PLACE_BITS | row.number

    def _words(self, place: int) -> str:
        name = list(self._names)[place >> _PLACE_BITS]
        number = place & ((1 << _PLACE_BITS) - 1)
        return f"row {number}" if name is None else f"row {number} of {name}"


def _is_near(adapter: Adapter, value: dict[str, Any]) -> bool:
    """Tell whether the row has the adapter's column with nothing in it."""
    refusal = adapter.convert(value)
    return isinstance(refusal, Refusal) and refusal.reason not in {Reason.MISSING_FIELD, Reason.ADAPTER_FAILED}


def _refused_id(row: Row, refusal: Refusal) -> str:
    """Return a name for a refused row that does not depend on its position."""
    digest = hashlib.sha256(refusal.reason.encode() + b"\0" + row.content()).hexdigest()
    return f"!{digest[:16]}"


def _chunks(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Yield the rows in lists of at most `size` rows and about BATCH_BYTES."""
    chunk: list[Row] = []
    weight = 0
    try:
        for row in rows:
            chunk.append(row)
            weight += row.size
            if len(chunk) >= size or weight >= BATCH_BYTES:
                yield chunk
                chunk, weight = [], 0
    except SourceError:
        # What was read before the source broke off is good.
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
