"""What `producer extract` reckons before it queues anything: the model's shape, layers, records, room on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import DiskFullError, UsageError
from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from producer.extract import Extraction, ModelFacts, Survey, choose_layers, read_model
from tests.support.exports import ledger_with, record
from tests.support.folders import fresh_picture, pen, picture
from tests.unit.app.test_extraction import plan


@pytest.mark.parametrize(("count", "layers"), [(32, [2, 16, 29]), (36, [2, 18, 33]), (61, [2, 30, 58]), (7, [2, 3, 4])])
def test_the_layers_are_those_of_eagle_3(count: int, layers: list[int]) -> None:
    """`auto` names the layers 2, n // 2 and n - 3."""
    assert choose_layers("auto", count) == layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("auto", "6 layers has no three different ones"),
        ("two", "cannot be read"),
        ("1,6", "6 is none of the model's layers 1 to 5"),
        ("0,3", "0 is none"),
        ("3,2", "has to rise"),
        ("2,2", "has to rise"),
    ],
)
def test_layers_that_no_trainer_could_use_are_refused(text: str, words: str) -> None:
    """Layers have to be there and in the model's order; the sentence says which is wrong."""
    with pytest.raises(UsageError, match=words):
        choose_layers(text, 6)
    assert choose_layers("1,2,5", 6) == [1, 2, 5]


def test_the_shape_is_read_from_the_models_config(tmp_path: Path) -> None:
    """Also of a model that sees, whose language part has a config of its own."""
    shape = {"num_hidden_layers": 8, "hidden_size": 32, "vocab_size": 99}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    assert read_model(tmp_path) == ModelFacts(8, 32, 99, 512)
    path.write_text(json.dumps({"hidden_size": 5, "text_config": shape}))
    assert read_model(tmp_path) == ModelFacts(8, 32, 99, None)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """A folder without a config, with a broken one, or with one of something else, is refused by name."""
    with pytest.raises(UsageError, match="is not the folder of a model"):
        read_model(tmp_path / "org" / "name")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be understood"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(UsageError, match="does not say num_hidden_layers, vocab_size"):
        read_model(tmp_path)


def test_only_what_can_be_made_is_counted(tmp_path: Path) -> None:
    """The survey counts tokens and bytes of the records that can be taken, and of no others."""
    records = [
        record("a", prompt_token_ids=[1] * 10, output_ids=[2, 3]),
        record("b", prompt_token_ids=[1] * 3, output_ids=[4, 5]),
        record("c", prompt_token_ids=None, output_ids=None),
        record("d", prompt_token_ids=[1], output_ids=[2, 99]),
        record("e", prompt_token_ids=[1] * 30, output_ids=[2, 3]),
    ]
    with ledger_with(tmp_path / "chat", records) as source, Ledger.open(DatasetFolder(tmp_path / "x")) as target:
        one = plan(max_length=20)
        found = Extraction(source, target, one).survey(lambda _words: None)
        assert (found.samples, found.tokens, found.unknown) == (2, 17, 0)
        assert found.bytes == one.bytes_of(12) + one.bytes_of(5)
        found = Extraction(source, target, plan(max_length=20, retokenize=True)).survey(lambda _words: None)
        assert (found.samples, found.tokens) == (3, 17 + 5), "the server counted 3 + 2 tokens"


def test_a_disk_that_is_too_small_is_told_of_before(tmp_path: Path) -> None:
    """With the numbers; --force goes on."""
    with Ledger.open(DatasetFolder(tmp_path / "x")) as target:
        one = Extraction(target, target, plan())
        much = Survey(samples=10**6, tokens=10**12, bytes=816 * 10**12)
        words = (
            r"1,000,000 samples of 1,000,000,000,000 tokens, at 816 bytes each, need about 816.0 TB in .* GB free; free"
        )
        with pytest.raises(DiskFullError, match=words):
            one.check_room(much, tmp_path / "states", force=False)
        assert "816.0 TB" in one.check_room(much, tmp_path / "states", force=True)
        assert "816.0 kB" in one.check_room(Survey(1, 1000, 816_000), tmp_path / "states", force=False)


def test_what_was_refused_may_be_taken_later(tmp_path: Path) -> None:
    """A record that other limits refused becomes a sample and is recorded; a new index says the same."""
    folder = DatasetFolder(tmp_path / "x")
    with Ledger.open(folder) as ledger:
        kinds = (Kind.REFUSED, Kind.REFUSED, Kind.PENDING, Kind.PENDING, Kind.FAILED, Kind.REFUSED)
        new = [ledger.commit([pen("a", kind, reason="timeout")]).new[0] for kind in kinds]
        assert new == [True, False, True, False, True, False]
        assert [path.read_bytes().count(b"\n") for path in sorted(tmp_path.glob("x/*.jsonl"))] == [1, 1, 1]
        assert ledger.look_up(["a"])["a"].kind is Kind.FAILED
        assert ledger.totals().count(Kind.REFUSED) == 0
        assert picture(ledger) == fresh_picture(folder)
