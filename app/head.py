"""What the index takes from a line of any of a dataset's files, and whether its bytes are a whole record."""

from __future__ import annotations

from typing import Annotated

import msgspec

from app.records import LARGEST_COUNT


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Turn(msgspec.Struct):
    usage: _Usage | None = None


class Head(msgspec.Struct):
    """The fields that the index holds."""

    id: str
    round: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)] = 0
    reason: str | None = None
    usage: _Usage | None = None
    turns: list[_Turn] | None = None

    @property
    def tokens(self) -> int:
        """Completion tokens of all turns; 0 where unknown, and where a count is none that an answer can have."""
        usages = [turn.usage for turn in self.turns] if self.turns else [self.usage]
        tokens = sum((usage.completion_tokens or 0) if usage else 0 for usage in usages)
        return tokens if 0 <= tokens <= LARGEST_COUNT else 0


decode_head = msgspec.json.Decoder(Head).decode


def is_record(data: bytes) -> bool:
    """Tell whether a line's bytes are a whole record of any of the files."""
    try:
        decode_head(data)
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
