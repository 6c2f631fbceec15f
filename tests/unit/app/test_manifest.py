"""The manifest: which settings a dataset was made with, and where its prompts came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import manifest, settings
from app.errors import DiskFullError, ManifestMismatchError, StoreError, UnwritableError
from app.ledger import Ledger, Pen
from app.manifest import SourceEntry
from app.places import DatasetFolder
from app.records import Kind
from app.settings import GenerationSettings
from tests.support.folders import largest_file, without_rights


@pytest.fixture
def ledger(open_folder: Path) -> Iterator[Ledger]:
    """Return an open ledger of the dataset `d`."""
    with Ledger.open(DatasetFolder(open_folder / "d")) as opened:
        yield opened


def _wanted(**values: Any) -> GenerationSettings:
    return settings.load(GenerationSettings, model="m", **values)


def _fix(ledger: Ledger, wanted: GenerationSettings, *, new: bool = False, copies: int = 1) -> manifest.SettingsEntry:
    return manifest.fix_settings(ledger, "d", wanted, {"samples_per_prompt": copies}, new=new)


def _take_a_sample(ledger: Ledger) -> None:
    ledger.commit([Pen(Kind.PENDING, "s", b'{"id": "s"}\n')])


def _source(name: str, at: float = 10.0, **values: Any) -> SourceEntry:
    return SourceEntry(source=name, adapter="auto", first_at=at, last_at=at, **values)


def test_no_manifest_yet(ledger: Ledger) -> None:
    """A new dataset has no manifest, which is no error."""
    assert manifest.read(ledger) is None


def test_the_first_settings_are_written(ledger: Ledger) -> None:
    """The first enqueue writes its settings, what it chose besides, and their fingerprint, readable for people."""
    entry = _fix(ledger, _wanted(temperature=0.5), copies=2)
    content = {
        "model": "m",
        "max_tokens": 8192,
        "temperature": 0.5,
        "min_completion_tokens": 0,
        "keep_truncated": False,
        "samples_per_prompt": 2,
    }
    assert entry.content == content
    assert entry.fingerprint == settings.fingerprint(content)
    text = ledger.folder.manifest.read_text()
    assert text.startswith('{\n  "dataset": "d"')
    assert json.loads(text)["settings"][0]["content"] == content


def test_the_same_settings_change_nothing(ledger: Ledger) -> None:
    """A resume with the same settings gets the entry of the first run and leaves the file alone."""
    first = _fix(ledger, _wanted(stop=("a", "b"), extra_body={"x": [1, {"y": None}]}))
    before = ledger.folder.manifest.read_bytes()
    assert _fix(ledger, _wanted(stop=["a", "b"], extra_body={"x": [1, {"y": None}]})) == first
    assert ledger.folder.manifest.read_bytes() == before


def test_other_settings_are_refused_by_name(ledger: Ledger) -> None:
    """Other settings are refused with each differing field, its old and its new value, and nothing is written."""
    _fix(ledger, _wanted(temperature=0.5, top_p=0.9))
    _take_a_sample(ledger)
    before = ledger.folder.manifest.read_bytes()
    with pytest.raises(ManifestMismatchError) as caught:
        _fix(ledger, _wanted(temperature=0.7), copies=3)
    message = str(caught.value)
    assert "temperature: 0.5 -> 0.7" in message
    assert "top_p: 0.9 -> null" in message
    assert "samples_per_prompt: 1 -> 3" in message
    assert "max_tokens" not in message
    assert "--new-settings" in message
    assert ledger.folder.manifest.read_bytes() == before


def test_new_settings_are_the_explicit_way_on(ledger: Ledger) -> None:
    """With --new-settings both sets are kept, the newer one is current, and going on with it needs no flag."""
    first = _fix(ledger, _wanted(temperature=0.5))
    _take_a_sample(ledger)
    second = _fix(ledger, _wanted(temperature=0.7), new=True)
    read = manifest.read(ledger)
    assert read is not None
    assert (read.settings, read.current) == ([first, second], second)
    assert _fix(ledger, _wanted(temperature=0.7)) == second
    with pytest.raises(ManifestMismatchError, match=r"temperature: 0\.7 -> 0\.5"):
        _fix(ledger, _wanted(temperature=0.5))


def test_settings_that_no_sample_has_bind_nobody(ledger: Ledger) -> None:
    """Until the dataset has a sample other settings are simply taken; refused rows are none."""
    _fix(ledger, _wanted(temperature=0.5))
    ledger.commit([Pen(Kind.REFUSED, "!r", b'{"id": "!r"}\n', reason="empty_prompt")])
    second = _fix(ledger, _wanted(temperature=0.7))
    read = manifest.read(ledger)
    assert read is not None
    assert read.current == second
    _take_a_sample(ledger)
    with pytest.raises(ManifestMismatchError, match=r"temperature: 0\.7 -> 0\.5"):
        _fix(ledger, _wanted(temperature=0.5))


def test_new_settings_that_are_the_same_add_nothing(ledger: Ledger) -> None:
    """--new-settings with the current settings adds no second entry."""
    first = _fix(ledger, _wanted())
    assert _fix(ledger, _wanted(), new=True) == first


def test_a_folder_of_another_dataset_is_refused(ledger: Ledger) -> None:
    """A folder that was moved under another dataset's name is not mixed with it."""
    _fix(ledger, _wanted())
    with pytest.raises(StoreError, match=r"belongs to the dataset 'd', not 'other'"):
        manifest.fix_settings(ledger, "other", _wanted(), {}, new=True)


def test_sources_are_noted(ledger: Ledger) -> None:
    """Each input has one entry with what its latest pass found and when it was first read."""
    _fix(ledger, _wanted())
    manifest.note_source(ledger, "d", _source("a.jsonl", 10, read=5))
    manifest.note_source(ledger, "d", _source("b.jsonl", 20, read=7, complete=True))
    manifest.note_source(ledger, "d", _source("a.jsonl", 30, read=9, refused=1, complete=True))
    read = manifest.read(ledger)
    assert read is not None
    assert [(one.source, one.first_at, one.last_at, one.read) for one in read.sources] == [
        ("a.jsonl", 10, 30, 9),
        ("b.jsonl", 20, 20, 7),
    ]
    assert read.sources[0].complete
    assert read.current is not None


def test_a_source_may_come_first(ledger: Ledger) -> None:
    """Noting a source makes the manifest where there is none, without settings."""
    manifest.note_source(ledger, "d", _source("a.jsonl"))
    read = manifest.read(ledger)
    assert read is not None
    assert (read.dataset, read.current) == ("d", None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"dataset": 1}', b"\xff\xfe{}"])
def test_a_manifest_that_cannot_be_understood(content: bytes, ledger: Ledger) -> None:
    """A damaged manifest is told with its path and never overwritten."""
    ledger.folder.manifest.write_bytes(content)
    for act in (lambda: manifest.read(ledger), lambda: _fix(ledger, _wanted(), new=True)):
        with pytest.raises(StoreError, match=r"manifest\.json cannot be understood"):
            act()
    assert ledger.folder.manifest.read_bytes() == content


def test_a_manifest_that_cannot_be_read(ledger: Ledger) -> None:
    """A manifest without the right to read it is told with its path."""
    _fix(ledger, _wanted())
    ledger.folder.manifest.chmod(0)
    with without_rights(), pytest.raises(UnwritableError, match=r"manifest\.json cannot be used: Permission denied"):
        manifest.read(ledger)


def test_a_manifest_is_replaced_whole(ledger: Ledger) -> None:
    """A write that does not fit leaves the old manifest and no other file."""
    _fix(ledger, _wanted())
    before, names = ledger.folder.manifest.read_bytes(), {path.name for path in ledger.folder.path.iterdir()}
    with largest_file(len(before) + 100), pytest.raises(DiskFullError):
        _fix(ledger, _wanted(system="s" * 5000), new=True)
    assert ledger.folder.manifest.read_bytes() == before
    assert {path.name for path in ledger.folder.path.iterdir()} == names
