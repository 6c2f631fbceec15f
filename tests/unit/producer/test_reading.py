"""Opening an input: presets by name, local files before them, and what is told of the choice."""

from __future__ import annotations

import json
import pathlib

import pytest

from app.errors import SourceError, UsageError
from producer import presets
from producer.adapters.registry import names
from producer.dedupe import Dedupe
from producer.presets import PRESETS
from producer.reading import Reading, open_reading, preset_of
from tests.support.hub_folder import write_hub_dataset

MIB = 1024 * 1024


def test_every_preset_can_be_named() -> None:
    """Names are unique, lie within what a source may be called, and name real adapters, places and licences."""
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        choice = presets.find(preset.name)
        assert choice is not None
        assert choice.preset is preset
        assert preset.adapter in names()
        assert preset.hub.count("/") == 1
        assert preset.licence
        assert preset.description


@pytest.mark.parametrize(
    ("source", "description"),
    [
        ("gsm8k", "hf:openai/gsm8k:main/train"),
        ("GSM8K/test", "hf:openai/gsm8k:main/test"),
        ("ultrachat_200k", "hf:HuggingFaceH4/ultrachat_200k/train_sft"),
        ("math:algebra/test@abc123", "hf:EleutherAI/hendrycks_math:algebra/test@abc123"),
        ("llama-nemotron/math", "hf:nvidia/Llama-Nemotron-Post-Training-Dataset:SFT/math"),
        ("opencode-instruct@main", "hf:nvidia/OpenCodeInstruct:train/train@main"),
    ],
)
def test_parts_and_versions_of_a_preset(source: str, description: str) -> None:
    """Config, split and revision can stand behind a preset's name; case and underscores make no difference."""
    choice = presets.find(source)

    assert choice is not None
    assert choice.reference.description == description


@pytest.mark.parametrize("source", ["", "no-such", "gsm8k.jsonl", "hf:openai/gsm8k", "./gsm8k", "gsm8k/a/b", "gsm8k:"])
def test_other_sources_name_no_preset(source: str) -> None:
    """What only looks like a preset's name is read as before."""
    assert presets.find(source) is None


def test_a_local_file_goes_before_a_preset(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a preset's name is read, and the remark says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "x.jsonl").write_text('{"prompt": "local"}\n')
    opened = open_reading(Reading(source="gsm8k"), max_row_bytes=MIB)

    assert preset_of("gsm8k") is None
    assert opened.description == str(tmp_path.resolve() / "gsm8k")
    assert opened.remarks() == [
        f"reads {tmp_path.resolve() / 'gsm8k'}, not the preset gsm8k; that one is hf:openai/gsm8k:main/train.",
        "adapter auto reads the first rows as prompt.",
    ]


def test_a_misspelt_preset_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name near a preset's gets a hint; a path is looked for as a file alone."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match=r"no file or preset 'glaive-v3' \(did you mean glaive-v2\?\)"):
        open_reading(Reading(source="glaive-v3"), max_row_bytes=MIB)
    with pytest.raises(SourceError, match="There is no file"):
        open_reading(Reading(source="data/glaive-v3"), max_row_bytes=MIB)


@pytest.mark.filterwarnings("default")
def test_a_preset_with_several_configs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All configs of a preset are read by its adapter, and the remark names place and licence."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (preset,) = (one for one in PRESETS if one.name == "math")
    rows = {config: [{"problem": f"a {config} problem", "solution": "s"}] for config in preset.configs}
    write_hub_dataset(tmp_path / "EleutherAI" / "hendrycks_math", rows)
    opened = open_reading(Reading(source="math"), max_row_bytes=MIB)
    (batch,) = opened.batches

    assert [sample.messages[0]["content"] for sample in batch.samples] == [f"a {one} problem" for one in preset.configs]
    assert batch.samples[0].source.name == "algebra/train"
    assert opened.adapter == "problem"
    assert opened.remarks() == [
        f"preset math: hf:EleutherAI/hendrycks_math:{','.join(preset.configs)}/train, licence MIT."
    ]


def test_auto_says_what_it_chose(tmp_path: pathlib.Path) -> None:
    """Rows of several shapes are counted by shape."""
    rows = [{"prompt": "a"}, {"question": "b"}, {"prompt": "c"}, {"other": 1}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert open_reading(Reading(source=str(tmp_path / "x.jsonl")), max_row_bytes=MIB).remarks() == [
        "adapter auto reads the first rows as prompt (2), question (1)."
    ]


def test_what_of_a_reading_changes_a_sample() -> None:
    """Only what changes content is compared with the manifest; a plain reading is what it always was."""
    plain = Reading(source="x")
    choosing = Reading(source="y", filters=("a=b",), shuffle=1, limit=5, dedupe=Dedupe.NONE)

    assert plain.content() == choosing.content() == {"adapter": "auto", "samples_per_prompt": 1}
    assert Reading(source="x", columns="id=a", drop_system=True, adapter="prompt").content() == {
        "adapter": "prompt",
        "samples_per_prompt": 1,
        "columns": "id=a",
        "drop_system": True,
    }


def test_rows_without_their_own_system_prompts(tmp_path: pathlib.Path) -> None:
    """System turns and columns are left out, and the run's own system prompt takes their place."""
    rows = [
        {"system": "long", "prompt": "a"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / "x.jsonl")
    (batch,) = open_reading(Reading(source=source, drop_system=True), max_row_bytes=MIB).batches
    (other,) = open_reading(Reading(source=source, drop_system=True, system="mine"), max_row_bytes=MIB).batches

    assert [sample.messages for sample in batch.samples] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
    ]
    assert [sample.messages[0] for sample in other.samples] == [{"role": "system", "content": "mine"}] * 2


def test_an_unknown_adapter_is_refused() -> None:
    """The sentence lists the adapters and names the form of one's own."""
    with pytest.raises(UsageError, match=r"did you mean sharegpt.*or your own module:function"):
        open_reading(Reading(source="x", adapter="sharegtp"), max_row_bytes=MIB)
