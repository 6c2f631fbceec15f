"""One finding of the doctor: how bad it is, what it is about, and a sentence that says what to do."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Not looked at, or not known; nothing follows from it."""
    WARN = "warn"
    """The run goes through, with less than one could have."""
    FAIL = "fail"
    """The run would be wasted, or would not begin."""


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    level: Level
    name: str
    """What was looked at: area and thing, as in `redis.eviction`."""
    sentence: str
    server: str | None = None
    """The model server's URL, where it is about one."""
