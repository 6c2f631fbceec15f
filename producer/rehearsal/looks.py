"""How a rehearsal goes: looks at it, and the stretch between two looks in which the server could have been full."""

from __future__ import annotations

import dataclasses
import json
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from producer.processes import Process

_FULL = 0.98
"""Share of the most requests in flight from which on the run has come up to speed."""
_STATS_S = 10.0


@dataclasses.dataclass(frozen=True)
class Look:
    """The run at one moment."""

    at: float
    """The simulated server's clock, in real seconds."""
    in_flight: int
    busy_s: float
    """Time integral of the requests in flight."""
    generated: float
    """Tokens so far, of unfinished answers too."""
    queued: int
    """Samples that no worker has taken yet."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """What happened between two looks; times are real seconds."""

    seconds: float
    in_flight: float
    """Requests in flight on average."""
    tokens_per_s: float
    """Tokens that were generated in a real second."""


def look(url: str, queued: int) -> Look:
    """Ask the simulated server. Raises OSError."""
    with urllib.request.urlopen(f"{url}/__stats", timeout=_STATS_S) as answer:  # noqa: S310  http, on this machine
        stats: dict[str, Any] = json.load(answer)
    return Look(stats["now_s"], stats["in_flight"], stats["busy_s"], stats["generated_tokens"], queued)


def steady(looks: Sequence[Look]) -> Stretch | None:
    """Return the stretch in which samples were always queued and the run had come up to speed; None where none was.

    It begins when nearly as many requests are in flight as there ever were.
    """
    waiting = [one for one in looks if one.queued]
    peak = max((one.in_flight for one in waiting), default=0)
    begun = next((one for one in waiting if one.in_flight >= _FULL * peak), None)
    if begun is None or not peak or waiting[-1].at <= begun.at:
        return None
    return between(begun, waiting[-1])


def between(begin: Look, end: Look) -> Stretch:
    """Return what happened between two looks, of which the second is later."""
    seconds = end.at - begin.at
    return Stretch(seconds, (end.busy_s - begin.busy_s) / seconds, (end.generated - begin.generated) / seconds)


def cpu_s(process: Process) -> float:
    """Return the CPU seconds that a living process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(process: Process) -> int:
    """Return the most memory that a living process has had, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
