"""The strict reader finds every kind of damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jsonl_check import assert_strict, check_jsonl


def test_good_file(tmp_path: Path) -> None:
    """Lines end at 0x0A only, so Unicode line separators and escaped NULs inside strings are no damage."""
    path = tmp_path / "good.jsonl"
    text = '{"id":"a","content":"x\u2028y\u0085z \\u0000"}\n{"id":"b","n":1.5}\n'
    path.write_bytes(text.encode())
    check = assert_strict(path, count=2, ids=["b", "a"])
    assert check.ids == ("a", "b")
    assert check.records[0]["content"] == "x\u2028y\u0085z \0"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"id":"a"}', "no final newline"),
        (b'\xef\xbb\xbf{"id":"a"}\n', "byte order mark"),
        (b'{"id":"a"}\n\n', "blank line"),
        (b'{"id":"a"}\r\n', "carriage return"),
        (b'\0\0{"id":"a"}\n', "NUL byte"),
        (b'{"id":"a","x":NaN}\n', "NaN is not JSON"),
        (b'{"id":"a","x":-Infinity}\n', "-Infinity is not JSON"),
        (b'{"id":"a","x":1e999}\n', "too large"),
        (b'{"id":"a","x":"\\ud800"}\n', "lone surrogate"),
        (b'{"id":"a","x":"\xff"}\n', "utf-8"),
        (b'{"id":"a","id":"b"}\n', "repeats a key"),
        (b'["a"]\n', "not an object"),
        (b'{"id":"a"}{"id":"b"}\n', "Extra data"),
        (b'{"id":"a"', "no final newline"),
    ],
)
def test_damage_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    """Every kind of damage is a problem with its line and a reason."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    assert words in "; ".join(check_jsonl(path).problems)
    with pytest.raises(AssertionError, match=r"bad\.jsonl"):
        assert_strict(path)


def test_ids_are_compared(tmp_path: Path) -> None:
    """Repeated, missing, unexpected and absent ids fail, and a missing file is right for a count of 0 alone."""
    path = tmp_path / "ids.jsonl"
    path.write_bytes(b'{"id":"a"}\n{"id":"a"}\n')
    assert check_jsonl(path).duplicates == ("a",)
    with pytest.raises(AssertionError, match="repeated"):
        assert_strict(path)
    with pytest.raises(AssertionError, match="1 distinct ids, not 2"):
        assert_strict(path, count=2, allow_duplicates=True)
    with pytest.raises(AssertionError, match="missing"):
        assert_strict(path, ids=["a", "b"], allow_duplicates=True)
    path.write_bytes(b'{"id":"a"}\n{}\n')
    with pytest.raises(AssertionError, match="1 lines have no id"):
        assert_strict(path)
    assert assert_strict(tmp_path / "none.jsonl", count=0).records == ()
