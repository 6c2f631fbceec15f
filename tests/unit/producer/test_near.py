"""Repeated prompts: nearly equal ones are found by a kept library, and repeated ones can be asked again."""

from __future__ import annotations

import json
import random
import sys

import pytest

from app.errors import UsageError
from producer.adapters.registry import choose
from producer.dedupe import Dedupe
from producer.formats.rows import json_row
from producer.refusals import Reason
from producer.samples import Batch, Pass
from producer.sources import RowSource

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "ru", "te") for b in ("n", "s", "vo", "xa", "py", "do")]


def run(rows: list[dict[str, object]], dedupe: Dedupe, **options: int) -> tuple[Batch, Pass]:
    """Make one pass and return its one batch."""
    lines = [json_row(json.dumps(row).encode(), number=n) for n, row in enumerate(rows, start=1)]
    made = Pass(RowSource("test", lambda: iter(lines)), adapter=choose("auto"), dedupe=dedupe, **options)
    (batch,) = made.batches()
    return batch, made


def text(seed: int, words: int = 60) -> str:
    """Return a text of its own."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


def test_nearly_equal_prompts_are_refused_and_named() -> None:
    """One changed word, other spacing or case is the same prompt, under any id; another text is not."""
    pytest.importorskip("rensa")
    one = text(1)
    rows = [
        {"id": "a", "prompt": one},
        {"id": "b", "prompt": one.replace(" ", "  ").upper()},
        {"id": "c", "prompt": one + " indeed"},
        {"id": "d", "prompt": text(2)},
        {"id": "a", "prompt": one},
        {"messages": [{"role": "system", "content": text(3)}, {"role": "user", "content": one}]},
    ]
    batch, made = run(rows, Dedupe.NEAR)

    assert [sample.source.id for sample in batch.samples] == ["a", "d"]
    assert [(row.row, row.reason) for row in batch.refused] == [
        (2, Reason.NEAR_DUPLICATE),
        (3, Reason.NEAR_DUPLICATE),
        (5, Reason.DUPLICATE),
        (6, Reason.NEAR_DUPLICATE),
    ]
    assert batch.refused[0].detail == "nearly the same prompt as row 1 (similarity 1.00)"
    assert (made.read, made.refused, made.duplicates, made.near_duplicates) == (6, 4, 1, 3)


def test_other_tools_make_another_prompt() -> None:
    """The same question with other tools is no repetition."""
    pytest.importorskip("rensa")
    rows = [{"prompt": text(1), "tools": [{"name": name, "parameters": {}}]} for name in ("f", "g", "f")]
    batch, _ = run(rows, Dedupe.NEAR)

    assert [sample.source.row for sample in batch.samples] == [1, 2]


def test_texts_that_share_half_are_kept_apart() -> None:
    """Prompts well below the threshold stay, those well above it go, over many of them."""
    pytest.importorskip("rensa")
    rows: list[dict[str, object]] = []
    for seed in range(100):
        whole = text(seed, 80).split()
        rows.append({"prompt": " ".join(whole)})
        rows.append({"prompt": " ".join(whole[:40] + text(1000 + seed, 40).split())})
        rows.append({"prompt": " ".join([*whole[:39], "changed", *whole[40:]])})
    batch, _ = run(rows, Dedupe.NEAR)

    kept = {(sample.source.row or 0) % 3 for sample in batch.samples}
    assert kept == {1, 2}
    assert len(batch.samples) == 200


def test_repeated_prompts_can_be_asked_again() -> None:
    """Without a search for duplicates each repetition is one more sample, with ids that no order changes."""
    rows: list[dict[str, object]] = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a"}]
    batch, made = run(rows, Dedupe.NONE)
    twice, _ = run(rows, Dedupe.NONE, samples_per_prompt=2)
    other, _ = run(rows[::-1], Dedupe.NONE)
    once = batch.samples[0].id

    assert [sample.id.removeprefix(once) for sample in batch.samples if sample.id.startswith(once)] == ["", ".2", ".3"]
    assert len({sample.id for sample in twice.samples}) == 8
    assert {sample.id for sample in other.samples} == {sample.id for sample in batch.samples}
    assert (made.read, made.refused, made.duplicates) == (4, 0, 0)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the sentence says what to install."""
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UsageError, match=r"pip install 'promptmill\[dedupe\]'"):
        run([{"prompt": "a"}], Dedupe.NEAR)
