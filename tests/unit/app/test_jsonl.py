"""Durable lines: append, mend, read back."""

from __future__ import annotations

import base64
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import jsonl
from app.errors import DiskFullError, StoreError, UnwritableError
from app.head import is_record
from tests.support.folders import largest_file, mounted, pen, without_rights

INSIDE = "a\u2028b\u2029c\x85d\x0be\x0cf\rg\r\nh\x1ci\x1dj\x1ek\0l\ufeff"
"""Everything that some reader takes for the end of a line, raw where JSON lets it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a path where no file is yet."""
    return tmp_path / "lines.jsonl"


def _mend(path: Path, torn: Path) -> jsonl.Mending:
    *_, tail = jsonl.read_lines(path)
    return jsonl.mend_tail(path, torn, tail, is_record=is_record)


def test_append_returns_offsets(path: Path) -> None:
    """Lines are appended behind each other and their offsets returned."""
    assert [jsonl.append(path, line).offset for line in (b"one\n", b"two\n", b"\n")] == [0, 4, 8]
    assert path.read_bytes() == b"one\ntwo\n\n"


def test_append_is_all_or_nothing(path: Path) -> None:
    """A write that the disk stops halfway is taken back, so that the file ends where it did."""
    jsonl.append(path, b"x" * 1000 + b"\n")
    with largest_file(3000), pytest.raises(DiskFullError) as caught:
        jsonl.append(path, b"y" * 5000 + b"\n")
    assert path.read_bytes() == b"x" * 1000 + b"\n"
    assert str(caught.value).startswith(f"{path} cannot grow: ")
    assert jsonl.append(path, b"again\n").offset == 1001


def test_append_on_a_full_disk(tmp_path: Path) -> None:
    """On a disk without space nothing is left of a line that did not fit, and it fits once there is space."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=64k", "none") as done:
        if not done:
            pytest.skip("Mounting a small disk needs root.")
        path, ballast = tmp_path / "lines.jsonl", tmp_path / "ballast"
        jsonl.append(path, b"one\n")
        ballast.write_bytes(b"b" * 40_000)
        with pytest.raises(DiskFullError, match="No space left on device"):
            jsonl.append(path, b"z" * 50_000 + b"\n")
        assert path.read_bytes() == b"one\n"
        ballast.unlink()
        assert jsonl.append(path, b"z" * 50_000 + b"\n").offset == 4


@pytest.mark.parametrize(
    ("number", "cls"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EACCES, UnwritableError),
        (errno.EROFS, UnwritableError),
        (errno.EEXIST, UnwritableError),
        (errno.EIO, StoreError),
    ],
)
def test_errors_of_the_system_become_one_sentence(number: int, cls: type[StoreError]) -> None:
    """What the system says of a file becomes one sentence with its path."""
    error = jsonl.translate(OSError(number, os.strerror(number)), Path("out/x.jsonl"))
    assert type(error) is cls
    assert str(error).startswith("out/x.jsonl cannot ")
    assert os.strerror(number) in str(error)


def test_only_newlines_end_lines(path: Path) -> None:
    r"""A line holds whatever separators other readers see in it; only `\n` ends it."""
    line = json.dumps({"id": "a", "text": INSIDE.replace("\n", "")}, ensure_ascii=False).encode() + b"\r\x0b\x0c\x85"
    path.write_bytes(line + b"\n" + line + b"\n")
    lines = list(jsonl.read_lines(path))
    assert [(one.offset, one.data, one.whole) for one in lines] == [(0, line, True), (len(line) + 1, line, True)]


def test_lines_larger_than_a_block(path: Path) -> None:
    """Lines longer than what is read at once come out whole, between short ones, from any start."""
    block = jsonl._BLOCK
    expected = [b"short", b"x" * (2 * block + 17), b"", b"y" * (block - 1), b"z" * block, b"end without newline"]
    path.write_bytes(b"\n".join(expected))
    lines = list(jsonl.read_lines(path))
    assert [line.data for line in lines] == expected
    assert [line.whole for line in lines] == [True] * 5 + [False]
    assert [line.data for line in jsonl.read_lines(path, lines[2].offset)] == expected[2:]
    for line in lines:
        assert jsonl.read_span(path, line.offset, len(line.data)) == line.data


@given(data=st.binary(max_size=200), start=st.integers(0, 250))
def test_any_bytes_read_back(data: bytes, start: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Joined with newlines, the lines from any byte on are the file from that byte on."""
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    lines = list(jsonl.read_lines(path, start))
    assert b"".join(line.data + b"\n" * line.whole for line in lines) == data[start:]
    assert all(line.whole for line in lines[:-1])
    assert [line.offset for line in lines] == [
        start + data[start:].find(line.data, line.offset - start) for line in lines
    ]


def test_missing_file_has_no_lines(path: Path) -> None:
    """A file that does not exist yet is one without lines."""
    assert list(jsonl.read_lines(path)) == []


def test_read_span_ends_with_the_file(path: Path) -> None:
    """A span beyond the end gives what there is; a missing file is an error with its path."""
    path.write_bytes(b"abc")
    assert jsonl.read_span(path, 1, 100) == b"bc"
    with pytest.raises(UnwritableError, match="nowhere"):
        jsonl.read_span(path.with_name("nowhere"), 0, 1)


def test_replace_file_is_atomic(path: Path) -> None:
    """Whoever opens the file while it is replaced sees the old or the new content, and no other file stays behind."""
    jsonl.replace_file(path, b"old")
    with path.open("rb") as before:
        jsonl.replace_file(path, b"new content")
        assert before.read() == b"old"
    assert path.read_bytes() == b"new content"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_replace_file_that_fails_leaves_the_old_one(path: Path) -> None:
    """A replacement that does not fit on the disk leaves the old file and nothing else."""
    jsonl.replace_file(path, b"old")
    with largest_file(100), pytest.raises(DiskFullError, match=r"lines\.jsonl"):
        jsonl.replace_file(path, b"n" * 1000)
    assert path.read_bytes() == b"old"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_replace_file_over_a_folder(path: Path) -> None:
    """A folder in the file's place is named, and the temporary file is gone."""
    path.mkdir()
    with pytest.raises(UnwritableError, match=r"lines\.jsonl"):
        jsonl.replace_file(path, b"new")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_append_without_rights(open_folder: Path) -> None:
    """A file that may only be read is refused with its path and the system's reason."""
    path = open_folder / "lines.jsonl"
    path.write_bytes(b"one\n")
    path.chmod(0o444)
    with without_rights(), pytest.raises(UnwritableError, match=r"lines\.jsonl cannot be used: Permission denied"):
        jsonl.append(path, b"two\n")
    assert path.read_bytes() == b"one\n"


def test_reading_what_is_no_file(path: Path) -> None:
    """A folder in the place of a file is told with its path and the system's reason, as for writing."""
    path.mkdir()
    with pytest.raises(StoreError, match=r"lines\.jsonl cannot be used: Is a directory"):
        list(jsonl.read_lines(path))


def test_mending_a_torn_line(path: Path, tmp_path: Path) -> None:
    """A torn last line is cut off and kept, byte by byte, with its place and a sentence about it."""
    whole, torn_bytes = pen("a").line, pen("b").line[:57] + b"\xff\xfe"
    path.write_bytes(whole + torn_bytes)
    mending = _mend(path, tmp_path / "torn.jsonl")
    assert path.read_bytes() == whole
    kept = json.loads((tmp_path / "torn.jsonl").read_bytes())
    assert base64.b64decode(kept["base64"]) == torn_bytes
    assert (kept["file"], kept["offset"], kept["length"]) == ("lines.jsonl", len(whole), len(torn_bytes))
    assert str(path) in str(mending)
    assert f"{len(torn_bytes)} bytes from byte {len(whole)} on" in str(mending)


def test_mending_a_lost_newline(path: Path, tmp_path: Path) -> None:
    """A whole record that lost only its newline gets it back and counts."""
    path.write_bytes(pen("a").line + pen("b").line[:-1])
    mending = _mend(path, tmp_path / "torn.jsonl")
    assert path.read_bytes() == pen("a").line + pen("b").line
    assert not (tmp_path / "torn.jsonl").exists()
    assert mending.cut == 0
    assert "whole and counts" in str(mending)


@pytest.mark.parametrize("length", [1, 4096, jsonl._BLOCK + 5])
def test_mending_nul_tails(length: int, path: Path, tmp_path: Path) -> None:
    """NULs that a crashed node left are cut, however many, and only their number is kept."""
    path.write_bytes(pen("a").line + b"\0" * length)
    assert _mend(path, tmp_path / "torn.jsonl").cut == length
    assert path.read_bytes() == pen("a").line
    kept = json.loads((tmp_path / "torn.jsonl").read_bytes())
    assert (kept["length"], kept["base64"]) == (length, None)


def test_mending_nuls_behind_a_whole_record(path: Path, tmp_path: Path) -> None:
    """A whole record followed by NULs counts, and the NULs are gone."""
    path.write_bytes(pen("a").line[:-1] + b"\0" * 4096)
    assert _mend(path, tmp_path / "torn.jsonl").cut == 0
    assert path.read_bytes() == pen("a").line


@settings(deadline=None)
@given(contents=st.lists(st.text(max_size=20), max_size=4), nuls=st.integers(0, 20), data=st.data())
def test_any_cut_mends_to_the_whole_records(
    contents: list[str], nuls: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut at any byte and followed by any number of NULs, a file of records mends to exactly its whole records."""
    path, torn = tmp_path_factory.getbasetemp() / "cut.jsonl", tmp_path_factory.getbasetemp() / "cut-torn.jsonl"
    torn.unlink(missing_ok=True)
    lines = [pen(f"id{number}", content=text).line for number, text in enumerate(contents)]
    full = b"".join(lines)
    cut = data.draw(st.integers(0, len(full)))
    path.write_bytes(full[:cut] + b"\0" * nuls)
    # A record without its newline is whole.
    ends = [sum(map(len, lines[: number + 1])) for number in range(len(lines))]
    whole = full[: max((end for end in ends if end - 1 <= cut), default=0)]
    if tail := [line for line in jsonl.read_lines(path) if not line.whole]:
        jsonl.mend_tail(path, torn, tail[0], is_record=is_record)
    assert path.read_bytes() == whole
    left = full[len(whole) : cut]
    if left:
        assert base64.b64decode(json.loads(torn.read_bytes())["base64"]) == left + b"\0" * nuls


@settings(deadline=None)
@given(garbage=st.binary(min_size=1, max_size=60).filter(lambda data: b"\n" not in data))
def test_any_garbage_tail_is_cut(garbage: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes that are no record are cut from the end of a file and kept exactly."""
    path, torn = tmp_path_factory.getbasetemp() / "bad.jsonl", tmp_path_factory.getbasetemp() / "bad-torn.jsonl"
    torn.unlink(missing_ok=True)
    path.write_bytes(pen("a").line + garbage)
    assert _mend(path, torn).cut == len(garbage)
    assert path.read_bytes() == pen("a").line
    kept = json.loads(torn.read_bytes())
    assert kept["length"] == len(garbage)
    if garbage.strip(b"\0"):
        assert base64.b64decode(kept["base64"]) == garbage
