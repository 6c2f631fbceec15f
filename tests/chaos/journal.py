"""What the model servers have seen, written so that not even SIGKILL of a server loses a line, and read back."""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path


class Fate(enum.StrEnum):
    """How a request ended."""

    GOOD = "good"
    """A whole answer was sent."""
    BAD = "bad"
    """It was answered with a fault, or never, on purpose."""
    GONE = "gone"
    """The client went away before its answer."""
    LOST = "lost"
    """The server died before it answered."""


class Journal:
    """Appends a line for each request and each fate, one unbuffered write a line."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._number = 0

    def begin(self, prompt: str) -> int:
        """Note a request; return its number."""
        self._number += 1
        self._write(f"begin {self._number} {prompt}")
        return self._number

    def end(self, number: int, fate: Fate) -> None:
        """Note how a request ended."""
        self._write(f"end {number} {fate}")

    def _write(self, line: str) -> None:
        os.write(self._descriptor, f"{time.time():.3f} {line}".encode().replace(b"\n", b" ") + b"\n")


@dataclasses.dataclass
class Asked:
    """One request."""

    server: str
    at: float
    """Unix seconds."""
    fate: Fate = Fate.LOST
    ended_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Tally:
    """All requests of a run."""

    prompts: Counter[str]
    """How often each prompt was asked."""
    fates: Counter[Fate]
    excused: Counter[str]
    """How often each prompt got no good answer by the servers' own fault."""
    stories: dict[str, list[Asked]]
    """The requests for each prompt, in the order of the journals."""

    @property
    def requests(self) -> int:
        """How many there were."""
        return self.prompts.total()

    def repeats(self) -> Counter[str]:
        """Return how often each prompt was asked more than once although no server was at fault."""
        return Counter({prompt: n - 1 - self.excused[prompt] for prompt, n in self.prompts.items()}) + Counter()


def read_journals(paths: Iterable[Path]) -> Tally:
    """Add up the journals of all servers, one for each time that one was started; none of them may still run."""
    stories = defaultdict[str, list[Asked]](list)
    for path in paths:
        asked = dict[str, Asked]()
        for line in path.read_text(encoding="utf-8").splitlines():
            at, what, number, rest = line.split(" ", 3)
            if what == "begin":
                asked[number] = Asked(path.stem, float(at))
                stories[rest].append(asked[number])
            else:
                asked[number].fate, asked[number].ended_at = Fate(rest), float(at)
    prompts = Counter({prompt: len(story) for prompt, story in stories.items()})
    spoilt = {Fate.BAD, Fate.LOST}
    excused = +Counter({prompt: sum(one.fate in spoilt for one in story) for prompt, story in stories.items()})
    return Tally(prompts, Counter(one.fate for story in stories.values() for one in story), excused, dict(stories))
