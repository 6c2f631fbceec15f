"""Several files from one export: splits, shards, orders, several datasets, and rejected records on request."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import UsageError
from app.ledger import Ledger, Pen
from app.records import Kind, Record, encode_line
from producer.export.base import LeftOut
from producer.export.outputs import ShardSize, parse_shard_size
from producer.export.report import NothingExportedError
from producer.export.run import export
from producer.export.selection import Selection
from producer.export.split import parse_split
from tests.support.exports import ids_of, ledger_with, many, record
from tests.support.processes import subprocess_env

SPLIT = "train=0.9,validation=0.1"
BY_ID = Selection(order="id")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _reject(ledger: Ledger, id_: str, reason: str) -> None:
    one = record(id_, verdict=Kind.REJECTED, reason=reason)
    ledger.commit([Pen(Kind.REJECTED, id_, encode_line(one), reason=reason)])


# Splits


def test_a_split_is_a_file_for_each_share(tmp_path: Path) -> None:
    """Each row is in exactly one split, about as many as its share says, in order."""
    records = many(1000)
    with ledger_with(tmp_path / "d", records) as ledger:
        report = export(ledger, format="tokens", output=tmp_path / "x.jsonl", split=parse_split(SPLIT))
    assert _names(tmp_path) == ["x-train.jsonl", "x-validation.jsonl"]
    train, validation = ids_of(tmp_path / "x-train.jsonl"), ids_of(tmp_path / "x-validation.jsonl")
    assert sorted(train + validation) == [one.id for one in records]
    assert train == sorted(train)
    assert 60 <= len(validation) <= 140
    assert [(file.split, file.rows) for file in report.files] == [
        ("train", len(train)),
        ("validation", len(validation)),
    ]
    assert f"  {tmp_path / 'x-train.jsonl'}: {len(train):,} rows" in "\n".join(report.sentences())


def test_a_split_does_not_change_when_the_dataset_grows(tmp_path: Path) -> None:
    """What was in validation stays there, whatever is added and in whatever order it came."""
    records = many(300)
    random.Random(1).shuffle(records)
    for folder, part in (("small", records[:100]), ("large", records)):
        with ledger_with(tmp_path / folder / "d", part) as ledger:
            export(ledger, format="tokens", output=tmp_path / folder / "x.jsonl", split=parse_split(SPLIT))
    early = {one.id for one in records[:100]}
    for name in ("x-train.jsonl", "x-validation.jsonl"):
        assert set(ids_of(tmp_path / "small" / name)) == set(ids_of(tmp_path / "large" / name)) & early


def test_answers_to_one_prompt_stay_together() -> None:
    """Copies of a sample, which differ in the number after the id, are in the same split."""
    split = parse_split("a=0.5,b=0.5")
    ids = [f"{number:024x}" for number in range(200)]
    assert {split.of(id_) for id_ in ids} == {"a", "b"}
    assert all(split.of(id_) == split.of(f"{id_}.2") == split.of(f"{id_}.17") for id_ in ids)


def test_a_split_without_rows_has_no_file(tmp_path: Path) -> None:
    """A share that no row falls into gives no empty file, which loaders would refuse."""
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        report = export(ledger, format="tokens", output=tmp_path / "x.parquet", split=parse_split(SPLIT))
    assert _names(tmp_path) == [file.path.name for file in report.files]
    assert len(report.files) == 1


@pytest.mark.parametrize("text", ["", "train", "train=1", "a=0.5,a=0.5", "a=0.5,b=0.6", "a=x,b=0.5", "a/b=0.5,c=0.5"])
def test_splits_are_refused_by_name(text: str) -> None:
    """Shares that do not add up to one, and names that are no names, are refused with an example."""
    with pytest.raises(UsageError, match=r"such as train=0\.98,validation=0\.02"):
        parse_split(text)


# Shards


def test_shards_of_rows(tmp_path: Path) -> None:
    """Shards hold so many rows each, and are named as the hub names them."""
    with ledger_with(tmp_path / "d", many(25)) as ledger:
        report = export(ledger, format="tokens", output=tmp_path / "x.jsonl", shard=parse_shard_size("10"))
    names = [f"x-0000{number}-of-00003.jsonl" for number in range(3)]
    assert _names(tmp_path) == names
    assert [file.rows for file in report.files] == [10, 10, 5]
    assert [id_ for name in names for id_ in ids_of(tmp_path / name)] == [one.id for one in many(25)]


def test_shards_of_bytes_and_splits(tmp_path: Path) -> None:
    """Each split has shards of its own, and a shard ends soon after it has reached its size."""
    with ledger_with(tmp_path / "d", many(60, chars=300_000)) as ledger:
        report = export(
            ledger,
            format="sharegpt",
            output=tmp_path / "x.jsonl",
            split=parse_split("a=0.5,b=0.5"),
            shard=parse_shard_size("3MB"),
        )
    assert report.exported == 60
    for name in "ab":
        files = [file for file in report.files if file.split == name]
        assert len(files) > 1
        assert [file.path.name for file in files] == [
            f"x-{name}-{n:05d}-of-{len(files):05d}.jsonl" for n in range(len(files))
        ]
        assert all(3_000_000 <= file.bytes < 8_500_000 for file in files[:-1])


@pytest.mark.parametrize(
    ("text", "size"),
    [("50000", ShardSize(rows=50_000)), ("500MB", ShardSize(bytes=500_000_000)), ("2 GiB", ShardSize(bytes=2**31))],
)
def test_shard_sizes(text: str, size: ShardSize) -> None:
    """A bare number counts rows, one with a unit bytes."""
    assert parse_shard_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "5 parsecs", "MB", "1.5GB"])
def test_shard_sizes_are_refused(text: str) -> None:
    """What is no size is refused with both ways to write one."""
    with pytest.raises(UsageError, match="give rows"):
        parse_shard_size(text)


def test_new_shards_replace_all_old_ones(tmp_path: Path) -> None:
    """An export with fewer shards than before leaves none of the old ones, and asks for --overwrite first."""
    with ledger_with(tmp_path / "d", many(25)) as ledger:
        export(ledger, format="tokens", output=tmp_path / "x.jsonl", shard=ShardSize(rows=5))
        (tmp_path / "x-notes.jsonl").write_text("mine\n")
        with pytest.raises(UsageError, match="exists already"):
            export(ledger, format="tokens", output=tmp_path / "x.jsonl", shard=ShardSize(rows=20))
        export(ledger, format="tokens", output=tmp_path / "x.jsonl", shard=ShardSize(rows=20), overwrite=True)
    assert _names(tmp_path) == ["x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl", "x-notes.jsonl"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from app.ledger import Ledger
from app.places import DatasetFolder
from producer.export.outputs import ShardSize
from producer.export.run import export

def die(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

with Ledger.open(DatasetFolder(Path(sys.argv[1]))) as ledger:
    output = Path(sys.argv[2])
    export(ledger, format="sharegpt", output=output, shard=ShardSize(rows=4), overwrite=True, on_progress=die)
"""


@pytest.mark.fault
def test_killed_shards_leave_the_old_ones(tmp_path: Path) -> None:
    """SIGKILL amid shards leaves the old shards whole, and the next export removes what the dead one left."""
    output = tmp_path / "x.jsonl"
    with ledger_with(tmp_path / "d", many(40, chars=300_000)) as ledger:
        export(ledger, format="sharegpt", output=output, shard=ShardSize(rows=25))
        before = {path: path.read_bytes() for path in tmp_path.glob("x-*")}
        command = [sys.executable, "-c", _KILLED, str(tmp_path / "d"), str(output)]
        assert subprocess.run(command, env=subprocess_env(), check=False).returncode == -signal.SIGKILL
        assert {path: path.read_bytes() for path in tmp_path.glob("x-*")} == before
        assert len(list(tmp_path.glob(".x-*.tmp"))) > 3
        export(ledger, format="sharegpt", output=output, shard=ShardSize(rows=30), overwrite=True)
    assert not list(tmp_path.glob(".x*"))
    assert [path.name for path in sorted(tmp_path.glob("x-*"))] == ["x-00000-of-00002.jsonl", "x-00001-of-00002.jsonl"]


# Order, several datasets, rejected records


def test_id_order_is_the_same_whatever_came_first(tmp_path: Path) -> None:
    """In id order, two runs that finished in different orders give equal files, byte for byte."""
    records, files = many(6000), []
    for seed in (1, 2):
        random.Random(seed).shuffle(records)
        output = tmp_path / f"{seed}.jsonl"
        with ledger_with(tmp_path / f"d{seed}", records) as ledger:
            report = export(ledger, format="tokens", output=output, selection=BY_ID)
        assert report.exported == 6000
        files.append(output.read_bytes())
    assert files[0] == files[1]
    assert ids_of(tmp_path / "1.jsonl") == [one.id for one in many(6000)]


def test_id_order_counts_what_file_order_counts(tmp_path: Path) -> None:
    """Repeated and unreadable lines are counted in either order."""
    with ledger_with(tmp_path / "d", [record("b"), record("a", output_ids=None), record("c")]) as ledger:
        with ledger.folder.lines(Kind.ACCEPTED).open("ab") as file:
            file.write(encode_line(record("b", content="again")) + b"{broken\n")
        for name, selection in (("1", None), ("2", BY_ID)):
            report = export(ledger, format="tokens", output=tmp_path / f"{name}.jsonl", selection=selection)
            assert report.left_out == {LeftOut.REPEATED: 1, LeftOut.UNREADABLE: 1, LeftOut.NO_EXACT_IDS: 1}
    assert ids_of(tmp_path / "2.jsonl") == ["b", "c"]


@pytest.mark.parametrize("selection", [Selection(), BY_ID])
def test_several_datasets_share_an_output(tmp_path: Path, selection: Selection) -> None:
    """Datasets follow each other; an id is written for the first that can say it, and the others are counted."""
    output = tmp_path / "x.jsonl"
    first = [record("m"), record("k", output_ids=None)]
    second = [record("k", content="second"), record("m", content="second"), record("z")]
    with ledger_with(tmp_path / "d1", first) as one, ledger_with(tmp_path / "d2", second) as two:
        report = export(one, two, format="tokens", output=output, selection=selection)
    assert ids_of(output) == (["k", "m", "z"] if selection is BY_ID else ["m", "k", "z"])
    assert report.left_out == {LeftOut.NO_EXACT_IDS: 1, LeftOut.IN_ANOTHER_DATASET: 1}


def test_progress_counts_all_datasets(tmp_path: Path) -> None:
    """Over several datasets progress grows to the sum of their sizes."""
    seen = list[tuple[int, int]]()
    with (
        ledger_with(tmp_path / "d1", many(20, chars=400_000)) as one,
        ledger_with(tmp_path / "d2", [record("z")]) as two,
    ):
        export(one, two, format="sharegpt", output=tmp_path / "x.jsonl", on_progress=lambda *now: seen.append(now))
        total = sum(ledger.folder.lines(Kind.ACCEPTED).stat().st_size for ledger in (one, two))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("order", ["completion", "id"])
def test_rejected_records_on_request(tmp_path: Path, order: str) -> None:
    """--include takes rejected records of the named reasons, and never those that were accepted later."""
    output = tmp_path / "x.jsonl"
    with ledger_with(tmp_path / "d", []) as ledger:
        _reject(ledger, "cut", "truncated")
        _reject(ledger, "short", "too_short")
        _reject(ledger, "retried", "truncated")
        ledger.commit([Pen(Kind.ACCEPTED, "retried", encode_line(record("retried", round=1)), round=1)])
        for include, expected in [
            ((), {"retried"}),
            (("rejected:truncated",), {"retried", "cut"}),
            (("rejected:truncated", "rejected:too_short"), {"retried", "cut", "short"}),
            (("rejected",), {"retried", "cut", "short"}),
        ]:
            selection = Selection.parse(order, include)
            report = export(ledger, format="tokens", output=output, selection=selection, overwrite=True)
            assert set(ids_of(output)) == expected
            assert not report.left_out


@pytest.mark.parametrize("word", ["failed", "accepted", "rejected:", "truncated", ""])
def test_what_cannot_be_included(word: str) -> None:
    """Only rejected records can be added, all or by reason."""
    with pytest.raises(UsageError, match="rejected:truncated"):
        Selection.parse("id", [word])


def test_unknown_orders_are_refused() -> None:
    """An order that does not exist is refused with those that do."""
    with pytest.raises(UsageError, match="choose one of completion, id"):
        Selection.parse("random", [])


def test_nothing_in_several_datasets(tmp_path: Path) -> None:
    """Without any row the error names every dataset."""
    empty = list[Record]()
    words = r"d1, .*d2 could be exported.*they have no accepted records yet"
    with (
        ledger_with(tmp_path / "d1", empty) as one,
        ledger_with(tmp_path / "d2", empty) as two,
        pytest.raises(NothingExportedError, match=words),
    ):
        export(one, two, format="tokens", output=tmp_path / "x.jsonl")
    assert _names(tmp_path) == []
