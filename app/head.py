"""What the index takes from a line of any of a dataset's files, and whether its bytes are a whole record."""

from __future__ import annotations

import msgspec


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class Head(msgspec.Struct):
    """The fields that the index holds."""

    id: str
    round: int = 0
    reason: str | None = None
    usage: _Usage | None = None

    @property
    def tokens(self) -> int:
        """Completion tokens; 0 where unknown."""
        return (self.usage.completion_tokens or 0) if self.usage else 0


decode_head = msgspec.json.Decoder(Head).decode


def is_record(data: bytes) -> bool:
    """Tell whether a line's bytes are a whole record of any of the files."""
    try:
        decode_head(data)
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
