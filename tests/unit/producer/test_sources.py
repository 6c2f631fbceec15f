"""Sources: every form is read in order, and every bad line or file says what is wrong with it."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc

import msgspec
import pytest
import zstandard

from app.errors import SourceError
from producer.adapters.registry import choose
from producer.formats import hub
from producer.formats.rows import Row, table_row
from producer.formats.text import reading
from producer.refusals import Reason
from producer.samples import Pass
from producer.sources import open_source
from tests.support.hub_folder import write_hub_dataset
from tests.support.processes import PROJECT_ROOT, run_command

MIB = 1024 * 1024
LIMIT = MIB

needs_parquet = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="needs the data extra")
needs_datasets = pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="needs the data extra")


def read(source: object, *, limit: int | None = None, max_row_bytes: int = LIMIT) -> list[Row]:
    """Read all rows of a source."""
    return list(open_source(str(source), max_row_bytes=max_row_bytes, limit=limit).rows())


def values(rows: list[Row]) -> list[object]:
    """Return the rows' values, with the reason in the place of an unreadable one."""
    return [row.problem.reason if row.problem else row.value for row in rows]


def numbers(rows: list[Row]) -> list[int]:
    """Return the rows' numbers."""
    return [row.number for row in rows]


def refused(source: object, **options: int) -> str:
    """Return the words with which a source is refused."""
    with pytest.raises(SourceError) as caught:
        read(source, **options)
    words = str(caught.value)
    assert "\n" not in words
    assert words.endswith(".")
    return words


def test_only_a_newline_byte_ends_a_line(tmp_path: pathlib.Path) -> None:
    """Unicode's other line ends inside texts, raw or escaped, neither split rows nor change texts."""
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "v\x0bf\x0cx\x1cx\x1ex", "real\r\nnewline\rhere"]
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"".join(json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n" for text in texts))

    assert [row.value for row in read(file)] == [{"prompt": text} for text in texts]


def test_bom_crlf_and_blank_lines(tmp_path: pathlib.Path) -> None:
    """A byte order mark and CRLF leave no trace; blank lines are no rows but count as physical lines."""
    file = tmp_path / "dos.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id":"b1"}\r\n\r\n{"id":"b2"}\r\n   \r\n{"id":"b3"}')

    rows = read(file)

    assert values(rows) == [{"id": "b1"}, {"id": "b2"}, {"id": "b3"}]
    assert numbers(rows) == [1, 3, 5]


def test_crlf_does_not_change_what_a_bad_row_is(tmp_path: pathlib.Path) -> None:
    """The same unreadable line has the same content with either line end."""
    (tmp_path / "a.jsonl").write_bytes(b"{torn\n")
    (tmp_path / "b.jsonl").write_bytes(b"{torn\r\n")

    assert read(tmp_path / "a.jsonl")[0].content() == read(tmp_path / "b.jsonl")[0].content()


@pytest.mark.parametrize(
    ("line", "reason", "words"),
    [
        (b'{"a":NaN}', Reason.NON_FINITE, "NaN"),
        (b'{"a":-Infinity}', Reason.NON_FINITE, "-Infinity"),
        (b'{"a":[1e999]}', Reason.NON_FINITE, "1e999"),
        (b'{"a":"\\ud800"}', Reason.LONE_SURROGATE, "surrogate"),
        (b'{"\\udc00":1}', Reason.LONE_SURROGATE, "surrogate"),
        (b'{"a":"\xff"}', Reason.NOT_UTF8, "byte 7"),
        (b'{"a":1', Reason.NOT_JSON, "character 7"),
        (b'{"a":1} {"a":2}', Reason.NOT_JSON, "Extra data"),
        (b"[" * 100_000, Reason.NOT_JSON, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", Reason.NOT_JSON, "digits"),
        (b"[1,2]", Reason.NOT_AN_OBJECT, "a list"),
        (b"null", Reason.NOT_AN_OBJECT, "null"),
        (b'"text"', Reason.NOT_AN_OBJECT, "text"),
        (b"3", Reason.NOT_AN_OBJECT, "a number"),
    ],
)
def test_a_bad_line_is_one_problem_row(tmp_path: pathlib.Path, line: bytes, reason: Reason, words: str) -> None:
    """A line that cannot be a row says why, in its place, and the rows around it are read."""
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"id":1}\n' + line + b'\n{"id":3}\n')

    rows = read(file)

    assert values(rows) == [{"id": 1}, reason, {"id": 3}]
    assert numbers(rows) == [1, 2, 3]
    assert rows[1].problem is not None
    assert words in rows[1].problem.detail


def test_paired_surrogate_escapes_are_one_character(tmp_path: pathlib.Path) -> None:
    """An emoji written as two escapes is a sound text."""
    file = tmp_path / "emoji.jsonl"
    file.write_bytes(b'{"prompt":"\\ud83d\\ude00"}\n')

    assert values(read(file)) == [{"prompt": "\U0001f600"}]


def test_a_row_above_the_limit_is_a_problem_that_names_it(tmp_path: pathlib.Path) -> None:
    """Rows up to the limit are read; one byte more is too_large, and the next row is found again."""
    frame = len('{"p":""}')
    file = tmp_path / "big.jsonl"
    lines = ['{"p":"' + "x" * (1000 - frame + extra) + '"}' for extra in (0, 1, 5000)]
    for ending in ("\n", "\r\n"):
        file.write_text(ending.join([*lines, '{"p":"small"}']), newline="")
        rows = read(file, max_row_bytes=1000)

        assert [row.problem and row.problem.reason for row in rows] == [None, "too_large", "too_large", None]
        assert [row.size for row in rows[:3]] == [1000, 1001, 6000]
        assert rows[2].problem is not None
        assert "6,000 bytes" in rows[2].problem.detail
        assert "1,000" in rows[2].problem.detail


@pytest.mark.parametrize("name", ["huge.jsonl", "huge.json"])
def test_a_huge_row_is_never_held_in_memory(tmp_path: pathlib.Path, name: str) -> None:
    """Memory stays near the limit when a row is many times larger."""
    row = b'{"p":"' + b'word \\" ' * (5 * MIB) + b'"}'
    small = b'{"p":"after"}'
    (tmp_path / name).write_bytes(row + b"\n" + small if name.endswith("l") else b"[" + row + b"," + small + b"]")
    del row
    tracemalloc.start()
    rows = read(tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert values(rows) == [Reason.TOO_LARGE, {"p": "after"}]
    assert rows[0].size == 40 * MIB + 8
    assert peak < 12 * MIB


def test_the_start_of_a_row_is_short_and_visible(tmp_path: pathlib.Path) -> None:
    """What is shown of a bad row stays on one line, escaped and bounded."""
    file = tmp_path / "odd.jsonl"
    file.write_bytes(b"a\x1b[31m\t\xc3\xa9\xff\xe2\x80\xa8" + b"x" * 1000 + b"\n")

    start = read(file)[0].start

    assert start.startswith("a\\x1b[31m\\té\\xff\\u2028xxx")
    assert len(start) < 300


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["wide.jsonl", "wide.csv", "wide.json", "wide.jsonl.gz"])
def test_a_file_of_another_encoding_is_refused_as_a_whole(tmp_path: pathlib.Path, encoding: str, name: str) -> None:
    """UTF-16 and UTF-32 files are refused in one sentence before any row, with or without a mark."""
    data = '{"id": "w1", "prompt": "hi"}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    with pytest.raises(SourceError, match="not UTF-8"):
        open_source(str(tmp_path / name), max_row_bytes=LIMIT)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("compress", [gzip.compress, _zstd])
def test_compressed_files_of_several_parts(tmp_path: pathlib.Path, compress) -> None:
    """A .gz or .zst file gives its rows, also when it is several compressed parts one after the other."""
    suffix = ".gz" if compress is gzip.compress else ".zst"
    file = tmp_path / f"rows.jsonl{suffix}"
    lines = [b'{"n":%d,"t":"%s"}\n' % (number, b"x" * 3000) for number in range(300)]
    file.write_bytes(compress(b"".join(lines[:100])) + compress(b"".join(lines[100:])))

    assert [row.value["n"] for row in read(file) if row.value] == list(range(300))


@pytest.mark.parametrize("compress", [gzip.compress, _zstd])
def test_a_truncated_archive_gives_its_good_rows_first(tmp_path: pathlib.Path, compress) -> None:
    """Rows before the cut are read, then one sentence says that the file is cut short."""
    file = tmp_path / ("rows.jsonl.gz" if compress is gzip.compress else "rows.jsonl.zst")
    lines = [json.dumps({"n": number, "t": os.urandom(500).hex()}).encode() + b"\n" for number in range(1000)]
    whole = compress(b"".join(lines))
    file.write_bytes(whole[: len(whole) * 2 // 3])
    count = 0

    with pytest.raises(SourceError, match="cut short"):  # noqa: PT012 - reading on is what raises
        for row in open_source(str(file), max_row_bytes=LIMIT).rows():
            assert row.value == json.loads(lines[count])
            count += 1

    assert count > 100


@pytest.mark.parametrize(("name", "words"), [("x.jsonl.gz", "gzip"), ("x.jsonl.zst", "Zstandard")])
def test_an_archive_that_is_none_is_refused(tmp_path: pathlib.Path, name: str, words: str) -> None:
    """A file that only calls itself compressed is refused in one sentence."""
    (tmp_path / name).write_bytes(b'{"prompt":"plain"}\n')

    assert words in refused(tmp_path / name)


def test_compressed_data_under_a_plain_name_is_told(tmp_path: pathlib.Path) -> None:
    """A gzip file named .jsonl is refused with the remedy."""
    (tmp_path / "x.jsonl").write_bytes(gzip.compress(b'{"prompt":"plain"}\n'))

    assert "gzip" in refused(tmp_path / "x.jsonl")


def test_json_array(tmp_path: pathlib.Path) -> None:
    """An array's elements are its rows, whatever brackets, quotes and escapes its texts hold."""
    rows = [{"p": 'a "quoted\\" ], [ } { , text\n'}, {"p": [1, {"q": []}]}, {}, {"p": "\u2028é"}]
    for text in (json.dumps(rows), json.dumps(rows, indent=2, ensure_ascii=False), "\ufeff " + json.dumps(rows)):
        (tmp_path / "rows.json").write_text(text, encoding="utf-8")
        assert values(read(tmp_path / "rows.json")) == rows
    assert numbers(read(tmp_path / "rows.json")) == [1, 2, 3, 4]


def test_json_array_is_cut_the_same_at_every_chunk_size(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a chunk ends, inside a string, an escape or a number, makes no difference."""
    rows = [{"p": 'x\\"]' * number, "n": number} for number in range(12)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for size in range(1, 40):
        monkeypatch.setattr("producer.formats.json_array.CHUNK_BYTES", size)
        assert values(read(tmp_path / "rows.json")) == rows


def test_json_array_with_bad_elements(tmp_path: pathlib.Path) -> None:
    """An element that is no row is a problem in its place."""
    (tmp_path / "rows.json").write_text('[{"a":1}, 7, {"a":NaN}, {"a" 1}, {"a":5}]')

    found = values(read(tmp_path / "rows.json"))

    assert found == [{"a": 1}, Reason.NOT_AN_OBJECT, Reason.NON_FINITE, Reason.NOT_JSON, {"a": 5}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a":1}, {"a":', "ends too early at row 2"),
        ('[{"a":1},]', "an element is missing at row 2"),
        ('[{"a":1}] {"a":2}', "follows the closing bracket"),
        ('[{"a":1}}]', "brace is out of place"),
    ],
)
def test_broken_json_arrays_are_refused(tmp_path: pathlib.Path, text: str, words: str) -> None:
    """An array that is cut short or followed by more is refused with the place."""
    (tmp_path / "rows.json").write_text(text)

    assert words in refused(tmp_path / "rows.json")


@pytest.mark.parametrize("text", ["[]", "", " \n", "[ ]\n"])
def test_empty_json_files_have_no_rows(tmp_path: pathlib.Path, text: str) -> None:
    """Nothing in, nothing out, and no error."""
    (tmp_path / "rows.json").write_text(text)

    assert read(tmp_path / "rows.json") == []


@pytest.mark.parametrize("indent", [None, 2])
def test_json_object_around_a_list(tmp_path: pathlib.Path, indent: int | None) -> None:
    """An object with one list of objects gives the list's rows."""
    document = {"version": [1, 2], "note": None, "data": [{"a": 1}, {"a": 2}]}
    (tmp_path / "rows.json").write_text(json.dumps(document, indent=indent))

    assert values(read(tmp_path / "rows.json")) == [{"a": 1}, {"a": 2}]


def test_json_one_object_a_line(tmp_path: pathlib.Path) -> None:
    """A .json file of one object a line is read as JSON Lines."""
    (tmp_path / "rows.json").write_text('{"a":1}\n\n{"data":[{"b":2}]}\nbroken\n')

    rows = read(tmp_path / "rows.json")

    assert values(rows) == [{"a": 1}, {"data": [{"b": 2}]}, Reason.NOT_JSON]
    assert numbers(rows) == [1, 3, 4]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_that_is_one_row(tmp_path: pathlib.Path, indent: int | None) -> None:
    """A single conversation is a row, not a document around a list."""
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "row.json").write_text(json.dumps(row, indent=indent))

    assert values(read(tmp_path / "row.json")) == [row]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"train": [{"a":1}],\n"test": [{"a":2}]}', "test, train"),
        ("prompts:\n  - hi", "neither a JSON array"),
        ('{\n"a": 1', "neither a JSON array"),
    ],
)
def test_other_json_documents_are_refused(tmp_path: pathlib.Path, text: str, words: str) -> None:
    """A document that is none of the three forms is refused in one sentence."""
    (tmp_path / "rows.json").write_text(text)

    assert words in refused(tmp_path / "rows.json")


def test_csv(tmp_path: pathlib.Path) -> None:
    """Quotes, commas and line breaks inside fields are kept; a row's number is the line that it begins on."""
    stream = io.StringIO()
    rows = [["1", 'say "hi", twice'], ["2", "two\nlines\u2028"], ["3", " spaces "], ["4", "x" * 200_000]]
    csv.writer(stream).writerows([["id", "prompt"], *rows[:2], [], *rows[2:]])
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbf" + stream.getvalue().encode())

    found = read(tmp_path / "rows.csv")

    assert values(found) == [{"id": id_, "prompt": prompt} for id_, prompt in rows]
    assert numbers(found) == [2, 3, 6, 7]


def test_tsv_and_compressed_csv(tmp_path: pathlib.Path) -> None:
    """A .tsv file is split at tabs, also inside an archive."""
    (tmp_path / "rows.tsv.gz").write_bytes(gzip.compress(b"id\tprompt\n1\ta, b\n"))
    (tmp_path / "rows.csv.zst").write_bytes(_zstd(b"id,prompt\n1,a\tb\n"))

    assert values(read(tmp_path / "rows.tsv.gz")) == [{"id": "1", "prompt": "a, b"}]
    assert values(read(tmp_path / "rows.csv.zst")) == [{"id": "1", "prompt": "a\tb"}]


def test_bad_csv_rows(tmp_path: pathlib.Path) -> None:
    """A row with another number of fields, or not in UTF-8, is a problem row."""
    (tmp_path / "rows.csv").write_bytes(b"id,prompt\n1,a,b\n2\n3,\xff\n4,ok\n")

    found = read(tmp_path / "rows.csv")

    assert values(found) == [Reason.BAD_COLUMNS, Reason.BAD_COLUMNS, Reason.NOT_UTF8, {"id": "4", "prompt": "ok"}]
    assert found[2].start == "3,\\xff"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'id,prompt\n1,a\n2,"never closed\n' + b"x\n" * 1000, "line 3"),
        (b"id,id\n1,2\n", "twice"),
        (b"id,pr\xffompt\n1,2\n", "header"),
        (b"id,prompt\r1,a\r", "line 1"),
    ],
)
def test_broken_csv_files_are_refused(tmp_path: pathlib.Path, data: bytes, words: str) -> None:
    """A table without a sound header or with a quote that never ends is refused with the line."""
    (tmp_path / "rows.csv").write_bytes(data)

    assert words in refused(tmp_path / "rows.csv", max_row_bytes=1000)


def test_a_folder_is_read_file_by_file_in_sorted_order(tmp_path: pathlib.Path) -> None:
    """All known files below a folder are read by name; hidden and unknown ones are left out."""
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b" / "1.jsonl").write_text('{"n":2}\n')
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\n{"n":3}\n{"n":4}\n'))
    for hidden in (".hidden.jsonl", ".cache/x.jsonl", "README.md"):
        (tmp_path / hidden).write_text('{"n":99}\n')

    rows = read(tmp_path)

    assert [(row.name, row.number) for row in rows] == [
        ("a.csv", 2),
        ("b/1.jsonl", 1),
        ("c.jsonl.gz", 2),
        ("c.jsonl.gz", 3),
    ]
    assert [int(row.value["n"]) for row in rows if row.value] == [1, 2, 3, 4]


def test_one_wide_file_in_a_folder_is_found_before_any_row(tmp_path: pathlib.Path) -> None:
    """The whole folder is checked when it is opened."""
    (tmp_path / "a.jsonl").write_text('{"n":1}\n')
    (tmp_path / "b.jsonl").write_bytes('{"n":1}\n'.encode("utf-16"))

    with pytest.raises(SourceError, match=r"b\.jsonl"):
        open_source(str(tmp_path), max_row_bytes=LIMIT)


def test_sources_that_cannot_be_opened(tmp_path: pathlib.Path) -> None:
    """Each says in one sentence what is wrong with it."""
    (tmp_path / "notes.txt").write_text("hi")
    (tmp_path / "x.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.jsonl").mkdir()

    assert "There is no file" in refused(tmp_path / "missing.jsonl")
    assert "There is no file" in refused(tmp_path / "missing")
    assert ".jsonl" in refused(tmp_path / "notes.txt")
    assert "holds no file" in refused(tmp_path / "empty")
    assert "holds no file" in refused(tmp_path / "folder.jsonl")
    assert "no ending" in refused(tmp_path / "x.parquet.gz")
    assert "empty" in refused(" ")
    words = refused("https://me:secret@example.org/x.jsonl")
    assert "URL" in words
    assert "secret" not in words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied"), "permissions"),
        (IsADirectoryError(21, "Is a directory"), "is a folder"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_the_systems_own_refusals_are_one_sentence(error: OSError, words: str) -> None:
    """What the operating system says while a file is read becomes one sentence with the path."""
    with pytest.raises(SourceError, match=words) as caught, reading(pathlib.Path("/data/x.jsonl")):
        raise error

    assert str(caught.value).startswith("/data/x.jsonl ")


def test_limit_and_description(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit bounds the rows read, rows can be read twice, and a file is described by its absolute path."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("x.jsonl").write_text('{"n":1}\nbad\n{"n":3}\n')
    source = open_source("x.jsonl", max_row_bytes=LIMIT, limit=2)

    assert values(list(source.rows())) == values(list(source.rows())) == [{"n": 1}, Reason.NOT_JSON]
    assert source.description == str((tmp_path / "x.jsonl").resolve())


@needs_parquet
def test_parquet(tmp_path: pathlib.Path) -> None:
    """Parquet rows come in order; a NaN column is null, and a huge or nested non-finite row is a problem."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    rows = [{"n": number, "score": float("nan"), "m": [{"role": "user", "content": "hi"}]} for number in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    pq.write_table(
        pa.table({"t": ["x" * 2000, "ok", "ok"], "f": [[0.5], [float("nan")], [1.0]]}), tmp_path / "odd.parquet"
    )

    found = read(tmp_path / "rows.parquet")

    assert values(found) == [{**row, "score": None} for row in rows]
    assert numbers(found) == list(range(1, 301))
    assert json.loads(found[0].start) == {"m": [{"content": "hi", "role": "user"}], "n": 0, "score": None}
    odd = values(read(tmp_path / "odd.parquet", max_row_bytes=1000))
    assert odd == [Reason.TOO_LARGE, Reason.NON_FINITE, {"t": "ok", "f": [1.0]}]


@needs_parquet
def test_parquet_text_that_is_not_utf8(tmp_path: pathlib.Path) -> None:
    """One bad text is one problem row."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    column = pa.array([b"ok", b"\xff", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"t": column}), tmp_path / "rows.parquet")

    assert values(read(tmp_path / "rows.parquet")) == [{"t": "ok"}, Reason.NOT_UTF8, {"t": "fine"}]


@needs_parquet
def test_a_file_that_is_no_parquet_is_refused(tmp_path: pathlib.Path) -> None:
    """A broken Parquet file is refused before any row."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing more")

    assert "not a sound Parquet file" in refused(tmp_path / "x.parquet")


@pytest.mark.parametrize(("library", "source"), [("pyarrow", "x.parquet"), ("datasets", "hf:org/name")])
def test_a_missing_extra_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str
) -> None:
    """Without the data extra the user learns how to install it."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("x.parquet").write_bytes(b"PAR1")

    assert "pip install 'promptmill[data]'" in refused(source)


def test_a_table_row_with_a_lone_surrogate_is_a_problem() -> None:
    """Tables cannot smuggle in what no UTF-8 can carry; foreign values count as null."""
    row = table_row({"t": "\ud800"}, number=1, name=None, limit=LIMIT)
    foreign = table_row({"image": object(), "t": "x"}, number=1, name=None, limit=LIMIT)

    assert row.problem is not None
    assert row.problem.reason == Reason.LONE_SURROGATE
    assert msgspec.json.decode(foreign.content()) == {"image": None, "t": "x"}


@pytest.mark.parametrize(
    ("text", "reference", "description"),
    [
        ("hf:squad", hub.HubReference("squad"), "hf:squad/train"),
        ("hf:org/name", hub.HubReference("org/name"), "hf:org/name/train"),
        ("hf:org/name:main", hub.HubReference("org/name", "main"), "hf:org/name:main/train"),
        ("hf:org/name/test", hub.HubReference("org/name", None, "test"), "hf:org/name/test"),
        (
            "hf:o.rg/na-me_1:a.b/test_sft@refs/pr/1",
            hub.HubReference("o.rg/na-me_1", "a.b", "test_sft", "refs/pr/1"),
            "hf:o.rg/na-me_1:a.b/test_sft@refs/pr/1",
        ),
    ],
)
def test_hub_references(text: str, reference: hub.HubReference, description: str) -> None:
    """Config, split and revision are each optional."""
    assert hub.parse(text) == reference
    assert reference.description == description


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c/d", "hf:a b", "hf:org/name:", "hf:org/name@", "hf:/no/such/folder"])
def test_bad_hub_references_are_refused(text: str) -> None:
    """What names no dataset is told so."""
    assert "hf:" in refused(text)


@needs_datasets
@pytest.mark.filterwarnings("default")
def test_local_dataset_folders(tmp_path: pathlib.Path) -> None:
    """A folder of data files and a saved dataset are read through hf:, each with its splits."""
    import datasets  # noqa: PLC0415

    datasets.disable_progress_bars()
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "tests"))

    for folder in ("files", "saved", "splits"):
        found = read(f"hf:{tmp_path / folder}")
        assert values(found) == rows
        assert [(row.number, row.name) for row in found] == [(1, None), (2, None)]
    assert values(read(f"hf:{tmp_path / 'splits' / 'test'}")) == rows[1:]
    assert open_source(f"hf:{tmp_path}/saved", max_row_bytes=9).description == f"hf:{tmp_path.resolve()}/saved"
    assert "no split 'train', only test" in refused(f"hf:{tmp_path / 'tests'}")
    assert f"hf:{tmp_path.resolve()}/saved" in refused(tmp_path / "saved")
    (tmp_path / "files" / "train.jsonl").rename(tmp_path / "files" / "test.jsonl")
    assert "no split 'train', only test" in refused(f"hf:{tmp_path / 'files'}")
    (tmp_path / "none").mkdir()
    assert "cannot be read" in refused(f"hf:{tmp_path / 'none'}")


@needs_datasets
def test_an_unreachable_hub_is_one_sentence(tmp_path: pathlib.Path) -> None:
    """Offline, a hub dataset is refused at once, with what to do."""
    script = (
        "from producer.sources import open_source\n"
        "from app.errors import SourceError\n"
        "try:\n    open_source('hf:no/such', max_row_bytes=9)\n"
        "except SourceError as error:\n    print(error)\n"
    )
    # Whatever else the machine has cached, this folder has nothing.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}  # noqa: TID251 - for a child
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=pathlib.Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert done.stdout.count("\n") == 1
    assert "The Hugging Face Hub cannot be reached for hf:no/such/train" in done.stdout


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("Bad split: x. Available splits: ['train', 'test']"), "no split 'train', only train, test"),
        (ValueError("BuilderConfig 'y' not found. Available: ['main', 'b']"), "no config 'c', only main, b"),
        (
            ValueError("Config name is missing.\nPlease pick one among the available configs: ['main', 'b']"),
            "needs a config (main, b); write it as hf:org/name:CONFIG",
        ),
        (FileNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."), "gated"),
        (FileNotFoundError("Dataset 'org/name' doesn't exist on the Hub or cannot be accessed."), "doesn't exist"),
        (ConnectionError("Couldn't reach 'org/name' on the Hub (TimeoutException)"), "cannot be reached"),
        (OSError("GET https://user:secret@hub/x failed"), "GET https://hub/x failed"),
        (RuntimeError(""), "RuntimeError"),
    ],
)
def test_hub_errors_are_one_sentence(error: Exception, words: str) -> None:
    """What the hub's client raises becomes one sentence that says what to do, without secrets."""
    sentence = str(hub._explain(hub.HubReference("org/name", "c"), error))

    assert words in sentence
    assert sentence.endswith(".")
    assert "secret" not in sentence


def test_a_stream_that_breaks_gives_its_rows_first() -> None:
    """Rows before a lost connection are read, then one sentence names the row."""

    def stream():
        yield {"prompt": "a"}
        raise TimeoutError("read timed out")

    rows = hub.read(hub.HubReference("org/name"), stream(), limit=LIMIT)

    assert next(rows).value == {"prompt": "a"}
    with pytest.raises(SourceError, match="at row 2: read timed out"):
        next(rows)


class _Flaky:
    """A stream of ten rows that breaks at every fourth row that is read, and can be begun again behind any row."""

    def __init__(self, start: int = 0, *, breaks: int = 100) -> None:
        self.start = start
        self.breaks = breaks

    def __iter__(self):
        for number in range(self.start, 10):
            if number - self.start == 4 and self.breaks:
                raise TimeoutError("read timed out")
            yield {"n": number}

    def skip(self, count: int) -> _Flaky:
        """Return the stream behind its first `count` rows."""
        return _Flaky(count, breaks=self.breaks)


def test_a_broken_stream_is_taken_up_behind_its_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is lost now and then costs no row and repeats none."""
    monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
    rows = list(hub.read(hub.HubReference("org/name"), _Flaky(), limit=LIMIT))

    assert [row.value for row in rows] == [{"n": number} for number in range(10)]
    assert [row.number for row in rows] == list(range(1, 11))


def test_a_stream_that_stays_broken_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three new beginnings without a row, the error names the row."""
    monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
    begun = []

    class Dead(_Flaky):
        def __iter__(self):
            yield from ()
            raise TimeoutError("read timed out")

        def skip(self, count: int) -> Dead:
            begun.append(count)
            return self

    with pytest.raises(SourceError, match="at row 1: read timed out"):
        list(hub.read(hub.HubReference("org/name"), Dead(), limit=LIMIT))
    assert begun == [0, 0, 0]


@needs_datasets
@pytest.mark.filterwarnings("default")
def test_several_configs_are_read_one_after_another(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs with commas between them give the rows of each, named with config and split."""
    monkeypatch.chdir(tmp_path)
    write_hub_dataset(tmp_path / "org" / "name", {"a": [{"q": 1}, {"q": 2}], "b": [{"q": 3}], "c": [{"q": 4}]})
    source = open_source("hf:org/name:b,a", max_row_bytes=LIMIT)

    assert [(row.name, row.number, row.value) for row in source.rows()] == [
        ("b/train", 1, {"q": 3}),
        ("a/train", 1, {"q": 1}),
        ("a/train", 2, {"q": 2}),
    ]
    assert source.description == "hf:org/name:b,a/train"
    assert "no config 'x', only a, b, c" in refused("hf:org/name:a,x")


def test_a_folder_of_a_hundred_files(tmp_path: pathlib.Path) -> None:
    """Files of all formats are read one after another with few open and few rows held, and names change no id."""
    for number in range(100):
        rows = [{"id": f"{number}-{n}", "prompt": f"p{number} {n} " + "x" * 200} for n in range(100)]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        data, ending = [(text, "jsonl"), (gzip.compress(text), "jsonl.gz"), (_zstd(text), "ndjson.zst")][number % 3]
        if number % 10 == 9:
            data, ending = json.dumps(rows).encode(), "json"
        (tmp_path / f"{number:03}.{ending}").write_bytes(data)

    def ids() -> set[str]:
        made = Pass(open_source(str(tmp_path), max_row_bytes=LIMIT), adapter=choose("auto"))
        found = {sample.id for batch in made.batches() for sample in batch.samples}
        assert (made.read, made.refused) == (10_000, 0)
        return found

    tracemalloc.start()
    few = sum(1 for _ in open_source(str(tmp_path), max_row_bytes=LIMIT).rows())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    before = ids()
    for path in sorted(tmp_path.iterdir()):
        path.rename(path.with_name(f"{999 - int(path.name[:3])}{path.name[3:]}"))

    assert few == len(before) == 10_000
    assert peak < 6 * MIB
    assert ids() == before


@pytest.mark.slow
def test_a_million_rows_in_bounded_memory(tmp_path: pathlib.Path) -> None:
    """The resident memory of a pass over a million rows does not grow after its first quarter."""
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        for number in range(1_000_000):
            file.write(f'{{"id": {number}, "prompt": "question {number}"}}\n')
    script = (
        "import os, sys\n"
        "from producer.reading import Reading, open_reading\n"
        "opened = open_reading(Reading(source=sys.argv[1]), max_row_bytes=1 << 20)\n"
        "early = late = 0\n"
        "for batch in opened.batches:\n"
        "    with open('/proc/self/statm') as file:\n"
        "        late = max(late, int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))\n"
        "    early = late if opened.rows.read <= 250_000 else early\n"
        "print(opened.rows.read, opened.rows.refused, early, late)\n"
    )
    done = run_command([sys.executable, "-c", script, str(path)], env={}, cwd=PROJECT_ROOT, timeout_s=170)
    read, refused, early, late = map(int, done.stdout.split())

    assert (read, refused) == (1_000_000, 0)
    assert late < 150_000_000
    assert late - early < 20_000_000
