"""`manifest.json`: where a dataset's prompts came from, and every setting that changes what a record holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from app import jsonl, settings
from app.errors import ManifestMismatchError, StoreError
from app.ledger import Ledger
from app.settings import GenerationSettings

SCHEMA_VERSION = 1


class SourceEntry(msgspec.Struct, kw_only=True):
    """One input as it was last read."""

    source: str
    adapter: str
    first_at: float
    """Unix seconds."""
    last_at: float
    read: int = 0
    """Rows read by the newest pass."""
    refused: int = 0
    complete: bool = False
    """Whether the newest pass reached the input's end."""


class SettingsEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One set of generation settings that records of this dataset were made with."""

    fingerprint: str
    since: float
    content: dict[str, Any]
    rejudged: bool = False
    """Whether `reclassify` judged all that was recorded by its rules; what was waiting then is judged by them too."""


class Manifest(msgspec.Struct, kw_only=True):
    """The whole file."""

    dataset: str
    created_at: float
    settings: list[SettingsEntry] = []
    """Oldest first; the last one is current."""
    sources: list[SourceEntry] = []
    schema: int = SCHEMA_VERSION

    @property
    def current(self) -> SettingsEntry | None:
        """The settings that new samples get."""
        return self.settings[-1] if self.settings else None


_decode = msgspec.json.Decoder(Manifest).decode


def read(ledger: Ledger) -> Manifest | None:
    """Return the dataset's manifest; None where there is none yet.

    Raises StoreError when the file cannot be understood.
    """
    path = ledger.folder.manifest
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"{path} cannot be understood ({error}); restore it, or move it away to start a new one."
        raise StoreError(message) from error
    except OSError as error:
        raise jsonl.translate(error, path) from error


def fix_settings(
    ledger: Ledger, dataset: str, wanted: GenerationSettings, extra: Mapping[str, Any], *, new: bool
) -> SettingsEntry:
    """Write the settings into the manifest, or prove that they are those already there.

    `extra` holds content-changing choices that are no generation settings (such as samples per prompt).
    `new` is the explicit way on to other settings; while the dataset has no sample none is needed.
    Raises ManifestMismatchError naming each field that differs.
    """
    return fix_content(ledger, dataset, {**wanted.content(), **extra}, new=new)


def fix_content(ledger: Ledger, dataset: str, content: dict[str, Any], *, new: bool) -> SettingsEntry:
    """Do the same for settings of any kind."""
    binding = not new and ledger.totals().samples > 0
    with ledger.locked():
        manifest = read(ledger) or Manifest(dataset=dataset, created_at=time.time())
        if manifest.dataset != dataset:
            raise StoreError(f"{ledger.folder.manifest} belongs to the dataset {manifest.dataset!r}, not {dataset!r}.")
        current = manifest.current
        if current is not None and current.content == content:
            return current
        if current is not None and binding:
            differences = "; ".join(settings.compare(current.content, content))
            raise ManifestMismatchError(
                f"The dataset {dataset!r} was started with other settings ({differences}); use the same ones, another "
                "--dataset, or --new-settings to go on with these for every sample that "
                "is not asked yet."
            )
        entry = SettingsEntry(fingerprint=settings.fingerprint(content), since=time.time(), content=content)
        manifest.settings.append(entry)
        _write(ledger, manifest)
        return entry


def with_rules(manifest: Manifest, rules: Mapping[str, Any], *, at: float) -> Manifest:
    """Return the manifest of a dataset that is judged by other rules from now on: its newest settings with these.

    Raises StoreError where it has no settings yet, SettingError where they fit no version.
    """
    current = manifest.current
    if current is None:
        raise StoreError(f"The dataset {manifest.dataset!r} has no settings yet; run producer enqueue first.")
    known = settings.generation_from_content({**current.content, **rules})
    others = {name: value for name, value in current.content.items() if name not in GenerationSettings.model_fields}
    content = {**known.content(), **others}
    since, older = at, manifest.settings
    if content == current.content:
        since, older = current.since, manifest.settings[:-1]
    entry = SettingsEntry(fingerprint=settings.fingerprint(content), since=since, content=content, rejudged=True)
    return msgspec.structs.replace(manifest, settings=[*older, entry])


def encode(manifest: Manifest) -> bytes:
    """Return the file's bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def begin_source(ledger: Ledger, dataset: str, source: str, adapter: str) -> None:
    """Write down that an input is being read, so that a killed pass is not taken for a whole one."""
    now = time.time()
    with ledger.locked():
        manifest = read(ledger) or Manifest(dataset=dataset, created_at=now)
        before = next((entry for entry in manifest.sources if entry.source == source), None)
        if before is None:
            manifest.sources.append(SourceEntry(source=source, adapter=adapter, first_at=now, last_at=now))
        else:
            before.complete = False
        _write(ledger, manifest)


def unread_inputs(manifest: Manifest) -> list[str]:
    """Return one sentence for each input that enqueue has not read to its end."""
    return [
        f"{entry.source} was not read to its end ({entry.read:,} rows were); unless an enqueue is reading it now, run "
        "producer enqueue with it again."
        for entry in manifest.sources
        if not entry.complete
    ]


def note_source(ledger: Ledger, dataset: str, entry: SourceEntry) -> None:
    """Write what a pass over an input found; a later pass over the same input replaces it."""
    with ledger.locked():
        manifest = read(ledger) or Manifest(dataset=dataset, created_at=time.time())
        for place, before in enumerate(manifest.sources):
            if before.source == entry.source:
                entry.first_at = before.first_at
                manifest.sources[place] = entry
                break
        else:
            manifest.sources.append(entry)
        _write(ledger, manifest)


def _write(ledger: Ledger, manifest: Manifest) -> None:
    jsonl.replace_file(ledger.folder.manifest, encode(manifest))
