"""Presets: each public dataset's rows become exactly the messages, tools and ids that they should."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import pytest

from producer import presets
from producer.presets import PRESETS
from producer.reading import Reading, open_reading

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures" / "datasets"
MIB = 1024 * 1024

each = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)


def outcome(name: str, adapter: str) -> list[dict[str, Any]]:
    """Return for each row of a fixture its prompt, or why it was refused, in the rows' order."""
    opened = open_reading(Reading(source=str(FIXTURES / f"{name}.jsonl"), adapter=adapter), max_row_bytes=MIB)
    by_row: dict[int, dict[str, Any]] = {}
    for batch in opened.batches:
        for sample in batch.samples:
            by_row[sample.source.row or 0] = {
                "messages": sample.messages,
                "tools": sample.tools,
                "id": sample.source.id,
                "reference": sample.reference,
            }
        for row in batch.refused:
            by_row[row.row] = {"refused": row.reason}
    return [by_row[row] for row in sorted(by_row)]


@each
@pytest.mark.parametrize("adapter", ["preset", "auto"])
def test_the_rows_of_a_preset(preset: presets.Preset, adapter: str) -> None:
    """Both the preset's adapter and auto read its rows as they are meant, and refuse what is no prompt by reason."""
    lines = (FIXTURES / f"{preset.name}.expected.jsonl").read_bytes().splitlines()
    expected = [msgspec.json.decode(line) for line in lines]
    found = outcome(preset.name, preset.adapter if adapter == "preset" else "auto")

    assert len(expected) >= 11
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        assert one == other, f"row {number}"


def test_the_page_of_datasets_lists_every_preset() -> None:
    """docs/datasets.md has one line for each preset, with place, licence and description."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "datasets.md").read_text(encoding="utf-8")
    lines = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}

    assert list(lines) == [preset.name for preset in PRESETS]
    for preset in PRESETS:
        place = preset.reference().description.removeprefix("hf:")
        for words in (f"`{place}`", preset.licence, preset.description, *preset.splits):
            assert words in lines[preset.name], preset.name


def test_every_preset_has_a_fixture() -> None:
    """No preset is without rows in its layout and what they become, and no such file is without its preset."""
    names = {preset.name for preset in PRESETS}

    assert {path.name.removesuffix(".jsonl") for path in FIXTURES.glob("*.jsonl")} == names | {
        f"{name}.expected" for name in names
    }
