"""Which split a row belongs to: decided by its id alone, so that no row changes sides when the dataset grows."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence

from app.errors import UsageError

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_COPY = re.compile(r"(?<=[0-9a-f]{12})\.[0-9]+$")
"""What `--samples-per-prompt` adds to an id."""
_SUM_TOLERANCE = 1e-6
_HASH_BITS = 64


@dataclasses.dataclass(frozen=True)
class Split:
    """Named shares of the rows."""

    names: tuple[str, ...]
    bounds: tuple[float, ...]
    """Where each share ends, between 0 and 1."""

    def of(self, id_: str) -> str:
        """Return the name of the id's split; all answers to one prompt are in the same."""
        digest = hashlib.sha256(_COPY.sub("", id_).encode()).digest()
        place = int.from_bytes(digest[: _HASH_BITS // 8], "big") / 2**_HASH_BITS
        return next(
            (name for name, bound in zip(self.names, self.bounds, strict=True) if place < bound), self.names[-1]
        )


def parse_split(text: str) -> Split:
    """Read `train=0.98,validation=0.02`.

    Raises UsageError unless there are at least two names with shares above 0 that add up to 1.
    """
    names, shares = list[str](), list[float]()
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not _NAME.fullmatch(name) or name in names or not 0 < number < 1:
            raise _wrong(text)
        names.append(name)
        shares.append(number)
    if abs(math.fsum(shares) - 1) > _SUM_TOLERANCE:
        raise _wrong(text)
    return Split(tuple(names), _bounds(shares))


def _bounds(shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.fsum(shares[: count + 1]) for count in range(len(shares)))


def _wrong(text: str) -> UsageError:
    return UsageError(
        f"--split {text!r} cannot be used; give names with shares that add up to 1, such as train=0.98,validation=0.02."
    )
