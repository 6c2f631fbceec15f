"""Judges records that are written already, or just about to be, by rules that came after they were asked."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from app import jsonl, manifest, settings
from app.errors import UnwritableError
from app.ledger import Ledger, Pen
from app.records import Completion, Kind, Turn, Verdict
from app.verdict import Rules, earlier_tokens, judge

JUDGED = (Kind.ACCEPTED, Kind.REJECTED)
"""The kinds of record that hold an answer."""


class Answered(Completion, frozen=True, kw_only=True):
    """What a record line of an answered sample says, as far as it is judged by it."""

    id: str
    verdict: Kind
    dataset: str = ""
    reason: str | None = None
    round: int = 0
    settings: str = ""
    """Fingerprint of the settings that it was asked with."""
    finished_at: float | None = None
    turns: tuple[Turn, ...] = ()
    """Of a conversation whose turns were all made anew: each of them."""


decode = msgspec.json.Decoder(Answered).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def judge_again(answered: Answered, rules: Rules) -> Verdict:
    """Return the verdict by other rules: of a conversation on its last turn, and as short on all of them."""
    return judge(answered, rules, earlier_tokens=earlier_tokens(answered.turns[:-1]))


def relabel(data: bytes, verdict: Verdict) -> bytes:
    r"""Return a record's line (without `\n`) with another verdict; every other value stays byte for byte."""
    fields = _decode_fields(data)
    fields["verdict"] = msgspec.Raw(msgspec.json.encode(verdict.kind))
    fields["reason"] = msgspec.Raw(msgspec.json.encode(verdict.reason))
    return msgspec.json.encode(fields)


class Revision:
    """Judges a worker's lines anew, when `producer reclassify` gave their dataset other rules since they were asked."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stamp: tuple[int, int, int] | None = None
        self._manifest: manifest.Manifest | None = None
        self._rules = dict[str, Rules | None]()

    def __call__(self, pens: Sequence[Pen]) -> Sequence[Pen]:
        """Return the lines as the rules in force want them, one for one; the folder's lock is held.

        Raises StoreError when the manifest cannot be read.
        """
        self._refresh()
        if self._manifest is None or not any(entry.rejudged for entry in self._manifest.settings):
            return pens
        return [self._revise(pen) for pen in pens]

    def _refresh(self) -> None:
        """Read the manifest, if it is another than last time."""
        path = self._ledger.folder.manifest
        try:
            with jsonl.translated(path):
                descriptor = os.open(
                    path, os.O_RDONLY | os.O_CLOEXEC
                )  # a network disk tells the truth at an open alone
                try:
                    now = os.fstat(descriptor)
                finally:
                    os.close(descriptor)
        except UnwritableError:
            self._manifest = self._stamp = None
            return
        stamp = (now.st_ino, now.st_mtime_ns, now.st_size)
        if stamp != self._stamp:
            self._manifest, self._rules = manifest.read(self._ledger), {}
            self._stamp = stamp

    def _revise(self, pen: Pen) -> Pen:
        if pen.kind not in JUDGED or self._manifest is None:
            return pen
        answered = decode(pen.line)
        if answered.settings not in self._rules:
            self._rules[answered.settings] = rules_since(self._manifest, answered.settings)
        rules = self._rules[answered.settings]
        if rules is None:
            return pen
        verdict = judge_again(answered, rules)
        if (verdict.kind, verdict.reason or "") == (pen.kind, pen.reason):
            return pen
        line = relabel(pen.line, verdict) + b"\n"
        return pen._replace(kind=verdict.kind, line=line, reason=verdict.reason or "")


def rules_since(known: manifest.Manifest, fingerprint: str) -> Rules | None:
    """Return the rules that a later `reclassify` gave samples of those settings; None: they have those of their own."""
    rules = None
    for entry in known.settings:
        if entry.fingerprint == fingerprint:
            rules = None
        if entry.rejudged:
            rules = rules_of(entry)
    return rules


def rules_of(entry: manifest.SettingsEntry) -> Rules:
    """Return what a set of generation settings asks of its answers. Raises SettingError where it fits no version."""
    return settings.generation_from_content(entry.content).rules()
