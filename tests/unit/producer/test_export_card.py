"""The dataset card: counts, outcomes, settings, sources and columns, in the hub's form."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import app
from app import manifest
from app.ledger import Ledger, Pen
from app.manifest import SourceEntry
from app.places import DatasetFolder
from app.records import Kind, encode_line
from app.settings import GenerationSettings
from producer.export.base import LeftOut
from producer.export.card import licence_of, write_card
from producer.export.outputs import ShardSize
from producer.export.run import export
from producer.export.split import parse_split
from producer.presets import PRESETS
from tests.support.exports import ledger_with, many, record

HUB_SOURCE = "hf:HuggingFaceH4/ultrachat_200k/train_sft"
PRIVATE_PATH = "/home/somebody/secret/prompts.jsonl"


def _licence(hub: str) -> str:
    """Return the licence that the preset of a set on the hub notes."""
    return next(preset.licence for preset in PRESETS if preset.hub == hub)


def _prepare(ledger: Ledger) -> None:
    """Give the dataset settings, sources and one rejected sample."""
    manifest.fix_settings(ledger, "chat", GenerationSettings(model="my-model", temperature=0.6), {}, new=False)
    for source, adapter in ((HUB_SOURCE, "messages"), (PRIVATE_PATH, "prompt")):
        entry = SourceEntry(
            source=source, adapter=adapter, first_at=1.0, last_at=2.0, read=25, refused=1, complete=True
        )
        manifest.note_source(ledger, "chat", entry)
    cut = record("cut", verdict=Kind.REJECTED, reason="truncated")
    ledger.commit([Pen(Kind.REJECTED, "cut", encode_line(cut), reason="truncated")])


def _card(tmp_path: Path) -> str:
    with ledger_with(tmp_path / "d", [*many(2000), record("z", output_ids=None)]) as ledger:
        _prepare(ledger)
        report = export(
            ledger,
            format="tokens",
            output=tmp_path / "x.jsonl",
            split=parse_split("train=0.9,validation=0.1"),
            shard=ShardSize(rows=1500),
        )
        assert report.left_out == {LeftOut.NO_EXACT_IDS: 1}
        return write_card([ledger], report, title="my-org/chat", folder="data/")


def test_the_card_says_what_is_in_the_files(tmp_path: Path) -> None:
    """Counts, outcomes by reason, columns, settings with fingerprint, sources with licences, and provenance."""
    card = _card(tmp_path)
    with Ledger.open(DatasetFolder(tmp_path / "d")) as ledger:
        kept = manifest.read(ledger)
    assert kept is not None
    assert kept.current is not None
    for words in [
        "# my-org/chat",
        "Answers to the prompts of chat, made by my-model from 20",
        f" with promptmill {app.__version__}.",
        "4,000 tokens are supervised.",
        "| `no_exact_ids` | the server gave no exact token ids of the answer | 1 |",
        "| `loss_mask` | 1 where the model wrote the token",
        "| chat | accepted | 2,001 |  |",
        "| chat | rejected | 1 | truncated 1 |",
        f"fingerprint `{kept.current.fingerprint}`",
        '"temperature": 0.6',
        f"| {HUB_SOURCE} | messages | 25 | 1 | {_licence('HuggingFaceH4/ultrachat_200k')} |",
        "| prompts.jsonl | prompt | 25 | 1 | a local file |",
    ]:
        assert words in card, words
    assert "/home/somebody" not in card


def test_the_header_is_what_the_hub_reads(tmp_path: Path) -> None:
    """The YAML header names the files of each split, so that load_dataset(ORG/NAME) finds them."""
    header = yaml.safe_load(_card(tmp_path).split("---\n")[1])
    assert header["size_categories"] == ["1K<n<10K"]
    (config,) = header["configs"]
    assert [one["split"] for one in config["data_files"]] == ["train", "validation"]
    assert config["data_files"][0]["path"] == ["data/x-train-00000-of-00002.jsonl", "data/x-train-00001-of-00002.jsonl"]
    assert config["data_files"][1]["path"] == ["data/x-validation-00000-of-00001.jsonl"]


def test_a_card_leads_to_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face datasets load a folder with the card by its header, with its splits."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    with ledger_with(tmp_path / "d", many(60)) as ledger:
        report = export(
            ledger, format="tokens", output=folder / "x.parquet", split=parse_split("train=0.5,validation=0.5")
        )
        (folder / "README.md").write_text(write_card([ledger], report, title="x"), encoding="utf-8")
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {name: part.num_rows for name, part in loaded.items()} == {file.split: file.rows for file in report.files}


def test_licences() -> None:
    """A preset's licence is named; that of another set on the hub is not guessed."""
    assert licence_of("hf:openai/gsm8k:main/train@abc") == _licence("openai/gsm8k")
    assert licence_of("hf:somebody/else") == "not known to promptmill; look at its page"


def test_a_card_without_a_manifest(tmp_path: Path) -> None:
    """Where no settings name the model, the card names the one that answered; empty sections are left out."""
    with ledger_with(tmp_path / "mine", [record("a", model="served-model")]) as ledger:
        report = export(ledger, format="openai", output=tmp_path / "x.jsonl")
        card = write_card([ledger], report, title="x")
    assert "Answers to the prompts of mine, made by served-model, exported on 20" in card
    assert "## Settings" not in card
    assert "## Sources" not in card
