"""The recorded turns of a dataset's conversations, for whoever reads what their records leave out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from app.jsonl import Mending
from app.ledger import Ledger
from app.records import Message


class TurnPlace(msgspec.Struct):
    """A turn as its conversation's record tells of it."""

    id: str
    messages: int = 0
    """How many messages stand before it."""


class WholeConversation(msgspec.Struct):
    """What a record says of a conversation whose turns were all made anew."""

    settings: str = ""
    messages: list[Message] = []
    """All before the last turn."""
    turns: list[TurnPlace] = []


class _Line(msgspec.Struct):
    id: str
    messages: list[Message]
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Message] | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


class TurnLines:
    """Reads the turns beside one dataset's records, by settings and id. Use it as a context manager."""

    def __init__(self, ledger: Ledger) -> None:
        self._folder = ledger.folder
        self._ledgers = dict[str, Ledger | None]()
        self.mended = list[Mending]()
        """Torn tails that were mended when a file was opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ledger in self._ledgers.values():
            if ledger is not None:
                ledger.close()

    def read(self, conversation: WholeConversation, turn: TurnPlace | None = None) -> list[bytes | None]:
        r"""Return the line of each turn but the last, or of one, without its `\n`; None where none is of that turn.

        Raises StoreError for a folder that cannot be used.
        """
        turns = conversation.turns[:-1] if turn is None else [turn]
        ledger = self._ledger(conversation.settings) if turns else None
        if ledger is None:
            return [None] * len(turns)
        entries = ledger.look_up([one.id for one in turns])
        lines = [ledger.read(entries[one.id], one.id) if one.id in entries else None for one in turns]
        return [
            line if line is not None and _is_of(line, one, conversation.messages) else None
            for line, one in zip(lines, turns, strict=True)
        ]

    def _ledger(self, settings: str) -> Ledger | None:
        if settings not in self._ledgers:
            folder = self._folder.turns(settings)
            found = Ledger(folder) if folder.path.is_dir() else None
            if found is not None:
                self.mended += found.catch_up()
            self._ledgers[settings] = found
        return self._ledgers[settings]


def _is_of(line: bytes, turn: TurnPlace, messages: Sequence[Message]) -> bool:
    """Tell whether a line is the turn that the messages hold at its place, made on the same history."""
    try:
        found = _decode_line(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if found.id != turn.id or turn.messages >= len(messages) or found.messages != messages[: turn.messages]:
        return False
    said = messages[turn.messages]
    return (found.content, found.reasoning or None, found.tool_calls or None) == (
        said.get("content"),
        said.get("reasoning_content"),
        said.get("tool_calls"),
    )
