"""Records keep every byte but their verdict, and workers' lines are judged by the rules in force."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app import manifest
from app.ledger import Ledger, Pen
from app.places import dataset_folder
from app.records import Kind, Record, Source, Usage, Verdict, encode_line
from app.rejudge import Revision, relabel, rules_since
from app.settings import GenerationSettings
from app.verdict import Rules


def pen(settings: str, *, tokens: int = 5, kind: Kind = Kind.ACCEPTED, reason: str | None = None) -> Pen:
    """Return a worker's line of an answer with so many tokens."""
    record = Record(
        id="s",
        dataset="d",
        verdict=kind,
        reason=reason,
        source=Source(row=1),
        messages=[{"role": "user", "content": "Hi"}],
        content="Hello." if kind is not Kind.FAILED else None,
        finish_reason="stop",
        usage=Usage(completion_tokens=tokens),
        sampling={},
        settings=settings,
    )
    return Pen(kind, "s", encode_line(record), reason or "", 0, tokens)


def test_another_verdict_leaves_every_other_byte() -> None:
    """Numbers, unknown fields, escapes and their order stay as they are."""
    line = rb'{"id":"s","verdict":"accepted","reason":null,"big":12345678901234567890123,"f":1.50,"t":"\u00e9\/"}'
    done = relabel(line, Verdict(Kind.REJECTED, "too_short"))
    assert done == line.replace(b'"accepted"', b'"rejected"').replace(b"null", b'"too_short"')
    assert relabel(done, Verdict(Kind.ACCEPTED)) == line


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Return a dataset folder with settings."""
    opened = Ledger.open(dataset_folder(tmp_path, "d"))
    manifest.fix_settings(opened, "d", GenerationSettings(), {"adapter": "auto"}, new=False)
    return opened


def change(ledger: Ledger, **rules: Any) -> manifest.SettingsEntry:
    """Change the rules as reclassify does."""
    known = manifest.read(ledger)
    assert known is not None
    changed = manifest.with_rules(known, rules, at=time.time())
    with ledger.locked():
        ledger.folder.manifest.write_bytes(manifest.encode(changed))
    return changed.settings[-1]


def test_rules_of_the_manifest_become_settings_that_enqueue_knows(ledger: Ledger) -> None:
    """The entry is what enqueue makes of the same options, other choices kept, so that it is accepted there."""
    entry = change(ledger, min_completion_tokens=9, allow_think_leak=True)
    wanted = GenerationSettings(min_completion_tokens=9, allow_think_leak=True)
    ledger.commit([Pen(Kind.PENDING, "s", b'{"id":"s"}\n')])
    assert manifest.fix_settings(ledger, "d", wanted, {"adapter": "auto"}, new=False) == entry
    with pytest.raises(manifest.ManifestMismatchError, match=r"min_completion_tokens: 9 -> 0"):
        manifest.fix_settings(ledger, "d", GenerationSettings(), {"adapter": "auto"}, new=False)


def test_a_manifest_says_rejudged_only_where_it_was() -> None:
    """Manifests of datasets that were never judged anew look as they always did."""
    entry = manifest.SettingsEntry(fingerprint="f", since=1.0, content={})
    assert "rejudged" not in msgspec.to_builtins(entry)


def entries(*words: str) -> manifest.Manifest:
    """Return a manifest with settings `name:tokens`, judged anew where a `!` follows."""
    made = []
    for word in words:
        name, _, tokens = word.rstrip("!").partition(":")
        content = GenerationSettings(min_completion_tokens=int(tokens)).content()
        made.append(manifest.SettingsEntry(fingerprint=name, since=1.0, content=content, rejudged=word.endswith("!")))
    return manifest.Manifest(dataset="d", created_at=1.0, settings=made)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["a:1"], None),
        (["a:1", "b:2"], None),
        (["a:1", "b:2!"], 2),
        (["a:1", "b:2!", "c:3"], 2),
        (["a:1", "b:2!", "c:3!"], 3),
        (["b:2!", "a:1"], None),
        (["a:1", "b:2!", "a:1"], None),
        (["a:1", "b:2!", "a:1!"], 1),
        (["a:1!"], 1),
    ],
)
def test_the_newest_reclassify_after_the_own_settings_counts(words: list[str], tokens: int | None) -> None:
    """A sample of the settings `a` is judged by the last reclassify since; enqueue's new settings are others' alone."""
    rules = rules_since(entries(*words), "a")
    assert rules == (None if tokens is None else Rules(min_completion_tokens=tokens))


def test_a_workers_line_is_judged_by_the_rules_in_force(ledger: Ledger) -> None:
    """A line that was judged before the rules changed is written as the new ones want it, also by an open recorder."""
    known = manifest.read(ledger)
    assert known is not None
    asked_with = known.settings[0].fingerprint
    revise, before = Revision(ledger), pen(asked_with)
    assert list(revise([before])) == [before]
    change(ledger, min_completion_tokens=9)
    committed = ledger.commit([before], revise=revise)
    assert [(one.kind, one.reason) for one in committed.pens] == [(Kind.REJECTED, "too_short")]
    assert committed.new == [True]
    line = json.loads(ledger.folder.lines(Kind.REJECTED).read_bytes())
    assert (line["verdict"], line["reason"], line["content"]) == ("rejected", "too_short", "Hello.")
    assert not ledger.folder.lines(Kind.ACCEPTED).exists()
    assert ledger.look_up(["s"])["s"].reason == "too_short"


def test_a_failure_and_an_answer_that_is_fine_are_left_alone(ledger: Ledger) -> None:
    """Only a verdict that differs changes a line."""
    entry = change(ledger, min_completion_tokens=3)
    revise = Revision(ledger)
    for one in (pen(entry.fingerprint), pen("unknown"), pen("x", kind=Kind.FAILED, reason="timeout")):
        assert list(revise([one])) == [one]


def test_without_a_manifest_nothing_is_judged_anew(ledger: Ledger) -> None:
    """A folder whose manifest is gone takes lines as they are."""
    change(ledger, min_completion_tokens=9)
    ledger.folder.manifest.unlink()
    one = pen("x")
    assert list(Revision(ledger)([one])) == [one]
