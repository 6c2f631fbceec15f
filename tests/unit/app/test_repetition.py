"""Loops are told from texts that repeat themselves for a reason."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import repetition
from app.repetition import is_repetitive

_ROOT = Path(__file__).resolve().parents[3]
_RANDOM = random.Random(5)
_WORDS = (_ROOT / "README.md").read_text(encoding="utf-8").split()
_MOST = 0.5


def prose(words: int) -> str:
    """Return so many words in a random order."""
    return " ".join(_RANDOM.choice(_WORDS) for _ in range(words))


PARAGRAPH = prose(150)
LOOPS = {
    "a sentence": prose(300) + " Wait, let me reconsider this step." * 300,
    "a paragraph": prose(300) + f"\n\n{PARAGRAPH}" * 12,
    "a loop behind a very long text": prose(8000) + " the same again and again" * 200,
    "a loop of pages": prose(200) + f"\n\n{prose(600)}" * 1 + f"\n\n{PARAGRAPH} {PARAGRAPH[::-1]}" * 10,
    "no spaces between words": "我们需要重新考虑这个问题。" * 300,
    "one syllable": "哈" * 4000,
    "code": "    if x:\n        return x\n" * 150,
}
SOUND = {
    "prose": prose(3000),
    "a table": "".join(f"| {n} | item {n} | {_RANDOM.random():.2f} | {n % 3 == 0} |\n" for n in range(300)),
    "rows of JSON": "".join(f'{{"id": {n}, "name": "user{n}", "active": {n % 2}}},\n' for n in range(300)),
    "a times table": "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 21) for b in range(1, 21)),
    "a list in HTML": "".join(f'<li><a href="/item/{n}">Item {n}</a></li>\n' for n in range(300)),
    "tests": "".join(f"def test_add_{n}():\n    assert add({n}, {2 * n}) == {3 * n}\n\n" for n in range(200)),
    "a short refrain": "ha " * 200,
    "nothing": "",
    **{path.name: path.read_text(encoding="utf-8") for path in sorted((_ROOT / "app").glob("*.py"))},
    **{path.name: path.read_text(encoding="utf-8") for path in sorted((_ROOT / "docs").glob("*.md"))},
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_found(name: str) -> None:
    """A text that ends in a loop is one, whatever stands before it and however long a turn is."""
    assert is_repetitive(LOOPS[name], _MOST)


@pytest.mark.parametrize("name", SOUND)
def test_tables_code_and_prose_are_no_loops(name: str) -> None:
    """Texts that people write, which repeat words and forms, are none; nor is a short one."""
    assert not is_repetitive(SOUND[name], _MOST)


def test_a_text_that_loops_and_goes_on_counts_by_its_share() -> None:
    """A loop in the middle of a text is measured by its share of the end that is looked at."""
    text = prose(1000) + " once more" * 1000 + prose(3000)
    assert is_repetitive(text, 0.2)
    assert not is_repetitive(text, 0.7)


@given(
    st.lists(st.sampled_from(["a", "b", "c d e", "loop " * 30, "x y z " * 80]), max_size=30),
    st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)
def test_no_end_is_left_out(pieces: list[str], most: float) -> None:
    """The verdict is that of the most repetitive end, although ends that cannot matter are not looked at."""
    words = repetition._WORD.findall(" ".join(pieces))
    ends, end = [words], words
    while len(end) > repetition._SMALLEST:
        end = end[-max(repetition._SMALLEST, len(end) // 2) :]
        ends.append(end)
    highest = max(map(repetition.repetition, ends))
    assert is_repetitive(" ".join(pieces), most) == (len(words) >= repetition._FEWEST and highest > most)
