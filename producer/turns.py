"""Whether every earlier turn of the accepted conversations is still there, in the folder beside their records."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec

from app import manifest
from app.ledger import Ledger
from app.manifest import Manifest
from app.records import Kind
from producer.texts import counted, subject
from producer.turn_lines import TurnLines, WholeConversation

_PAGE = 500
_SHOWN = 5


_decode = msgspec.json.Decoder(WholeConversation).decode


@dataclasses.dataclass
class MissingTurns:
    """Turns that their conversations' records name and that no line holds as it was made."""

    turns: int = 0
    conversations: int = 0
    first: list[str] = dataclasses.field(default_factory=list)
    """The first of their ids."""
    mended: list[str] = dataclasses.field(default_factory=list)
    """What was mended while looking, a sentence each."""

    def sentence(self, ledger: Ledger) -> str:
        """Say what is missing of the ledger's conversations; call it only where something is."""
        first = ", ".join(self.first) + (", ..." if self.turns > len(self.first) else "")
        return (
            f"{subject(self.turns, 'earlier turn')} missing or damaged in {ledger.folder.all_turns} ({first}), of "
            f"{counted(self.conversations, 'accepted conversation')}; export --format tokens leaves them out, nothing "
            "else needs them."
        )


def _makes_all_turns(known: Manifest | None) -> bool:
    """Tell whether the dataset was ever asked to make all turns of its conversations anew."""
    return known is not None and any(entry.content.get("turns") == "all" for entry in known.settings)


def missing_turns(ledger: Ledger) -> MissingTurns:
    """Look for the earlier turns of every accepted conversation; the last one is in the record itself.

    Raises StoreError for a folder that cannot be used.
    """
    found = MissingTurns()
    if not _makes_all_turns(manifest.read(ledger)):
        return found
    entries = ledger.entries(Kind.ACCEPTED)
    with TurnLines(ledger) as turns:
        while page := list(itertools.islice(entries, _PAGE)):
            for id_, entry in page:
                gone = _gone(ledger.read(entry, id_), turns)
                found.turns += len(gone)
                found.conversations += bool(gone)
                found.first += gone[: _SHOWN - len(found.first)]
        found.mended += map(str, turns.mended)
    return found


def _gone(line: bytes, turns: TurnLines) -> list[str]:
    try:
        record = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []  # the line itself is told of elsewhere
    return [turn.id for turn, found in zip(record.turns[:-1], turns.read(record), strict=True) if found is None]
