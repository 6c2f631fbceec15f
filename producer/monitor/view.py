"""What a feed gives to the screen: a picture, how old it is, where it came from and what is wrong with the way."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from producer.monitor.picture import Picture, PictureTaker


@dataclasses.dataclass(frozen=True)
class View:
    """The newest that is known."""

    picture: Picture | None
    """None until the first one has come."""
    taken: float
    """The moment at which the picture was true, or the wait for it began, in monotonic seconds."""
    source: str = ""
    """Where it comes from, where that is not this machine's Redis."""
    trouble: str | None = None
    """What keeps newer ones from coming."""

    def age_s(self) -> float:
        """Return for how many seconds nothing newer has come."""
        return max(0.0, time.monotonic() - self.taken)


class Feed(Protocol):
    """Where views come from."""

    def take(self) -> View:
        """Return the newest view; it may take a while.

        Raises MillError when none will ever come.
        """

    def close(self) -> None:
        """Let go of everything."""


class LocalFeed:
    """Pictures that are taken here, each when it is asked for."""

    def __init__(self, taker: PictureTaker, *, source: str = "") -> None:
        self._taker = taker
        self._source = source

    def take(self) -> View:
        """Take a picture."""
        began = time.monotonic()
        return View(self._taker(), began, self._source)

    def close(self) -> None:
        """There is nothing to let go of."""
