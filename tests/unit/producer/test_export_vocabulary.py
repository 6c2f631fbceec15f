"""Token counts and draft vocabularies, as EAGLE-3 trainers read them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Record, Usage
from producer.export.base import LeftOut
from producer.export.report import NothingExportedError
from producer.export.vocabulary import draft_vocabulary, export_vocabulary
from tests.support.exports import ledger_with, record

VOCAB = 12


def _answer(id_: str, *ids: int) -> Record:
    return record(id_, prompt_token_ids=[0, 11, 11, 11], output_ids=list(ids), usage=Usage(4, len(ids)))


ANSWERS = [_answer("a", 7, 7, 7, 9), _answer("b", 9, 3, 5), record("c", output_ids=None)]
"""Counts: 7 three times, 9 twice, 3 and 5 once; the prompt's tokens do not count."""


def _export(tmp_path: Path, name: str, **options: Any) -> Any:
    with ledger_with(tmp_path / "d", ANSWERS) as ledger:
        return export_vocabulary(ledger, output=tmp_path / name, **{"format": "vocab", "vocab_size": VOCAB, **options})


def _arrays(path: Path) -> dict[str, list[int]]:
    if path.suffix == ".npz":
        numpy = pytest.importorskip("numpy")
        loaded = numpy.load(path)
    else:
        loaded = pytest.importorskip("safetensors.numpy").load_file(path)
    assert {name: str(loaded[name].dtype) for name in loaded} == {
        name: "bool" if name == "t2d" else "int64" for name in loaded
    }
    return {name: loaded[name].tolist() for name in loaded}


@pytest.mark.parametrize("name", ["v.npz", "v.safetensors"])
def test_the_most_frequent_ids(tmp_path: Path, name: str) -> None:
    """The draft vocabulary holds the most frequent ids of the answers; of equals the smaller id."""
    pytest.importorskip("safetensors.numpy" if name.endswith("safetensors") else "numpy")
    report = _export(tmp_path, name, draft_vocab_size=3)
    arrays = _arrays(tmp_path / name)
    assert arrays["token_freq"] == [0, 0, 0, 1, 0, 1, 0, 3, 0, 2, 0, 0]
    assert arrays["d2t"] == [3 - 0, 7 - 1, 9 - 2]
    assert [id_ for id_, known in enumerate(arrays["t2d"]) if known] == [3, 7, 9]
    assert len(arrays["t2d"]) == VOCAB
    size = f"{(tmp_path / name).stat().st_size / 1000:,.1f} kB"
    assert report.sentences() == [
        f"7 output tokens of 2 records counted, 4 different ones; {tmp_path / name} written ({size}).",
        "3 of 12 ids cover 85.71 % of them.",
        "1 left out: the server gave no exact token ids of the answer (no_exact_ids).",
    ]


def test_few_ids_are_filled_up(tmp_path: Path) -> None:
    """Where the answers use fewer ids than asked for, the smallest others fill the vocabulary up."""
    _export(tmp_path, "v.npz", draft_vocab_size=6)
    arrays = _arrays(tmp_path / "v.npz")
    assert [place + offset for place, offset in enumerate(arrays["d2t"])] == [0, 1, 3, 5, 7, 9]


def test_counts_alone(tmp_path: Path) -> None:
    """token-freq writes the counts, with the vocabulary's size where it is given."""
    _export(tmp_path, "f.npz", format="token-freq")
    assert _arrays(tmp_path / "f.npz") == {"token_freq": [0, 0, 0, 1, 0, 1, 0, 3, 0, 2, 0, 0]}
    _export(tmp_path, "g.npz", format="token-freq", vocab_size=None)
    assert len(_arrays(tmp_path / "g.npz")["token_freq"]) == 10


def test_several_datasets_count_an_id_once(tmp_path: Path) -> None:
    """An answer that two datasets have is counted once."""
    with ledger_with(tmp_path / "d1", ANSWERS) as one, ledger_with(tmp_path / "d2", ANSWERS[:1]) as two:
        report = export_vocabulary(
            one, two, format="vocab", output=tmp_path / "v.npz", vocab_size=VOCAB, draft_vocab_size=2
        )
    assert (report.records, report.total) == (2, 7)
    assert report.left_out == {LeftOut.NO_EXACT_IDS: 1, LeftOut.IN_ANOTHER_DATASET: 1}


def test_a_selection_equals_sorting_all() -> None:
    """For random counts, the chosen ids are those that a full sort by count and id would choose."""
    random = pytest.importorskip("random").Random(3)
    counts = {id_: random.randrange(1, 9) for id_ in random.sample(range(500), 200)}
    found = draft_vocabulary(counts, draft_size=120, target_size=500)
    assert list(found.ids) == sorted(sorted(counts, key=lambda id_: (-counts[id_], id_))[:120])
    assert found.covered == sum(counts[id_] for id_ in found.ids)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_vocab_size": 13}, "at most --vocab-size 12"),
        ({"draft_vocab_size": 3, "vocab_size": 9}, "hold token id 9, which a vocabulary of 9 does not have"),
        ({"draft_vocab_size": 3, "vocab_size": None}, "needs --vocab-size"),
        ({}, "--draft-vocab-size"),
        ({"format": "token-freq", "draft_vocab_size": 3}, "token-freq has no --draft-vocab-size"),
        ({"format": "token-freq", "vocab_size": 9}, "hold token id 9"),
    ],
)
def test_sizes_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """Sizes that are missing, or contradict each other or the answers, are refused, and nothing is written."""
    with pytest.raises(UsageError, match=words):
        _export(tmp_path, "v.npz", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_endings_are_refused(tmp_path: Path) -> None:
    """An output that says no known file is refused with those that are known."""
    with pytest.raises(UsageError, match=r"\.safetensors, \.pt, \.npz"):
        _export(tmp_path, "v.jsonl", draft_vocab_size=3)


@pytest.mark.parametrize(("name", "module", "extra"), [("v.pt", "torch", "torch"), ("v.npz", "numpy", "train")])
def test_missing_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str) -> None:
    """Without its library an output is refused at once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"needs {module}.*promptmill\[{extra}\]"):
        _export(tmp_path, name, draft_vocab_size=3)


def test_no_exact_ids_at_all(tmp_path: Path) -> None:
    """Without any exact ids nothing is written, and the reason is said."""
    with (
        ledger_with(tmp_path / "d", ANSWERS[2:]) as ledger,
        pytest.raises(NothingExportedError, match="no exact token"),
    ):
        export_vocabulary(ledger, format="vocab", output=tmp_path / "v.npz", vocab_size=9, draft_vocab_size=3)
    assert not (tmp_path / "v.npz").exists()


@pytest.mark.slow
def test_what_the_trainers_own_scripts_write(tmp_path: Path) -> None:
    """The .pt files are a dict of counts, and a dict of the tensors d2t and t2d, and nothing else."""
    torch = pytest.importorskip("torch")
    _export(tmp_path, "v.pt", draft_vocab_size=3)
    _export(tmp_path, "f.pt", format="token-freq", vocab_size=None)
    assert torch.load(tmp_path / "f.pt", weights_only=True) == {7: 3, 9: 2, 3: 1, 5: 1}
    loaded = torch.load(tmp_path / "v.pt", weights_only=True)
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {"d2t": torch.int64, "t2d": torch.bool}
    assert loaded["d2t"].tolist() == [3, 6, 7]
    assert loaded["t2d"].nonzero().flatten().tolist() == [3, 7, 9]
