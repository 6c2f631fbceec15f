"""The dataset card: what an export holds, where it came from and how it was made, as the hub's README.md."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import app
from app import manifest
from app.index import Totals
from app.ledger import Ledger
from app.manifest import Manifest
from app.records import Kind
from producer.export.outputs import OutputFile
from producer.export.report import ExportReport, size_words
from producer.presets import PRESETS

_UNKNOWN_LICENCE = "not known to promptmill; look at its page"
_ROWS_TAGS = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_MOST_ROWS_TAG = "1M<n<10M"
_LOCAL = "a local file"


class _Answered(msgspec.Struct):
    model: str | None = None


def write_card(ledgers: Sequence[Ledger], report: ExportReport, *, title: str, folder: str = "") -> str:
    """Return the card of an export, in Markdown with the hub's header; `folder` is where its files lie beside it."""
    books = [(manifest.read(ledger), ledger.totals()) for ledger in ledgers]
    parts = [
        _header(report, folder),
        f"# {title}\n",
        _introduction(ledgers, books),
        "## Rows\n",
        *_rows(report),
        "## Columns\n",
        _table(("column", "what"), [(f"`{name}`", words) for name, words in report.columns.items()]),
        "## Outcomes\n",
        _outcomes(books),
        *_settings(books),
        *_sources(books),
        "The licences of the sources and of the model decide what the answers may be used for.\n",
    ]
    return "\n".join(parts)


def licence_of(source: str) -> str:
    """Return the licence of a source as its preset notes it."""
    found = (preset.licence for preset in PRESETS if preset.hub.lower() in source.lower())
    return next(found, _UNKNOWN_LICENCE if source.startswith("hf:") else _LOCAL)


def _header(report: ExportReport, folder: str) -> str:
    """Return the YAML that the hub reads: which files are which split."""
    tag = next((tag for most, tag in _ROWS_TAGS if report.exported < most), _MOST_ROWS_TAG)
    lines = ["---", "size_categories:", f"- {tag}", "tags:", "- promptmill", "- synthetic", "configs:"]
    lines += ["- config_name: default", "  data_files:"]
    for split, files in _by_split(report.files).items():
        lines += [f"  - split: {split or 'train'}", "    path:"]
        lines += [f"    - {json.dumps(folder + file.path.name)}" for file in files]
    return "\n".join([*lines, "---\n"])


def _by_split(files: Sequence[OutputFile]) -> Mapping[str, list[OutputFile]]:
    found: dict[str, list[OutputFile]] = {}
    for file in files:
        found.setdefault(file.split, []).append(file)
    return found


def _introduction(ledgers: Sequence[Ledger], books: Sequence[tuple[Manifest | None, Totals]]) -> str:
    names = ", ".join(
        kept.dataset if kept else ledger.folder.path.name for ledger, (kept, _) in zip(ledgers, books, strict=True)
    )
    begun = [kept.created_at for kept, _ in books if kept]
    since = f" from {_day(min(begun))} on" if begun else ""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return (
        f"Answers to the prompts of {names}, made by {_models(ledgers, books)}{since}, exported on {today} with "
        f"promptmill {app.__version__}.\n"
    )


def _models(ledgers: Sequence[Ledger], books: Sequence[tuple[Manifest | None, Totals]]) -> str:
    """Return the models that the settings name, or else those that the servers named in the first answers."""
    asked = {one.content.get("model") for kept, _ in books if kept for one in kept.settings} - {None}
    answered = {_first_model(ledger) for ledger in ledgers} - {None}
    return ", ".join(sorted(map(str, asked or answered))) or "an unnamed model"


def _first_model(ledger: Ledger) -> str | None:
    for id_, entry in ledger.entries(Kind.ACCEPTED):
        return msgspec.json.decode(ledger.read(entry, id_), type=_Answered).model
    return None


def _day(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).date().isoformat()


def _rows(report: ExportReport) -> Iterator[str]:
    rows = [
        (f"`{file.path.name}`", file.split or "all", f"{file.rows:,}", size_words(file.bytes)) for file in report.files
    ]
    yield _table(("file", "split", "rows", "size"), rows)
    yield f"Format: `{report.format}`.\n"
    if report.supervised_tokens is not None:
        yield f"{report.supervised_tokens:,} tokens are supervised.\n"
    if report.lost_reasoning:
        yield f"{report.lost_reasoning:,} of the answers had reasoning that these rows do not hold.\n"
    if report.lost_earlier_reasoning:
        yield (
            f"{report.lost_earlier_reasoning:,} of the conversations had reasoning in earlier turns that these rows do "
            "not hold.\n"
        )
    if report.lost_tools:
        yield f"{report.lost_tools:,} of the prompts had tools that these rows do not hold.\n"
    left = [(f"`{reason}`", reason.words, f"{count:,}") for reason, count in report.left_out.items() if count]
    if left:
        yield _table(("left out", "because", "records"), left)


def _outcomes(books: Sequence[tuple[Manifest | None, Totals]]) -> str:
    rows = list[tuple[str, ...]]()
    for kept, totals in books:
        name = kept.dataset if kept else ""
        for kind in (Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED, Kind.PENDING, Kind.REFUSED):
            reasons = {reason: n for (one, reason), n in totals.by_reason.items() if one is kind and n > 0}
            words = ", ".join(f"{reason} {n:,}" for reason, n in sorted(reasons.items(), key=lambda item: -item[1]))
            if totals.count(kind):
                rows.append((name, kind, f"{totals.count(kind):,}", words))
    return _table(("dataset", "outcome", "samples", "reasons"), rows)


def _settings(books: Sequence[tuple[Manifest | None, Totals]]) -> Iterator[str]:
    if any(kept and kept.settings for kept, _ in books):
        yield "## Settings\n"
    for kept, _ in books:
        for one in kept.settings if kept else ():
            since = _day(one.since)
            content = {name: value for name, value in one.content.items() if value not in (None, [], {})}
            yield f"`{kept.dataset if kept else ''}`, fingerprint `{one.fingerprint}`, since {since}:\n"
            yield f"```json\n{json.dumps(content, indent=2, ensure_ascii=False)}\n```\n"


def _sources(books: Sequence[tuple[Manifest | None, Totals]]) -> Iterator[str]:
    rows = [
        (_public(one.source), one.adapter, f"{one.read:,}", f"{one.refused:,}", licence_of(one.source))
        for kept, _ in books
        if kept
        for one in kept.sources
    ]
    if rows:
        yield "## Sources\n"
        yield _table(("source", "read as", "rows", "refused", "licence"), rows)


def _public(source: str) -> str:
    """Return a source as strangers may see it: of a local path its name alone."""
    return source if source.startswith("hf:") else Path(source).name


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
