"""Which rows are asked: filters, a shuffle, a limit and repeated prompts, and that a second command changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.books import balanced
from tests.support.hub_folder import write_hub_dataset
from tests.support.mill import Mill


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Return rows with a prompt, an id, a language and a score as text."""
    return [
        {"q": f"question {n}", "uid": f"u{n}", "lang": ("en", "de", "fr")[n % 3], "score": f"{n / count:.2f}"}
        for n in range(count)
    ]


CHOICE = ("--columns", "prompt=q,id=uid", "--filter", "lang!=fr", "--filter", "score>=0.1", "--shuffle", "7")


def known(mill: Mill, dataset: str = "case") -> set[str]:
    """Return the ids that the dataset knows of."""
    path = mill.folder(dataset).path / "samples.jsonl"
    return {json.loads(line)["id"] for line in path.read_text().splitlines()}


def test_the_same_command_chooses_the_same_rows(mill: Mill) -> None:
    """A shuffled, filtered and limited choice is queued once; the same words again, or moved rows, add nothing."""
    first = mill.enqueue(rows(), *CHOICE, "--limit", "10")
    chosen = known(mill)
    again = mill.enqueue(rows()[::-1], *CHOICE, "--limit", "10")

    assert "read 10, refused 0 (duplicates 0), already recorded 0, already queued 0, queued 10" in first.stdout
    assert "--filter left out 24 rows (lang!=fr: 20; score>=0.1: 4)." in first.stderr
    assert "already queued 10, queued 0" in again.stdout
    assert len(chosen) == 10
    assert known(mill) == chosen

    more = mill.enqueue(rows(), *CHOICE, "--limit", "15")
    assert "already queued 10, queued 5" in more.stdout
    balanced(mill, queued=15, read=15, refused=0)


def test_rows_that_a_filter_leaves_out_are_in_no_book(mill: Mill) -> None:
    """Read rows are refused or samples; what --filter leaves out is told apart, and never stands in refused.jsonl."""
    told = mill.enqueue([*rows(9), {"q": " ", "lang": "en"}], "--columns", "prompt=q", "--filter", "lang=en")

    assert "read 4, refused 1 (duplicates 0)" in told.stdout
    assert "--filter left out 6 rows (lang=en: 6)." in told.stderr
    balanced(mill, queued=3, read=4, refused=1)
    assert len((mill.folder().path / "refused.jsonl").read_text().splitlines()) == 1
    nothing = mill.enqueue(rows(9), "--columns", "prompt=q", "--filter", "lang=xx", dataset="none", expect=1)
    assert "no row of the 0 is a sample" in nothing.stderr


def test_repeated_prompts_by_choice(mill: Mill) -> None:
    """Repeated prompts are refused, or each is asked once more, and then the same number again."""
    same = [{"prompt": "again"}] * 3 + [{"prompt": "other"}]
    exact = mill.enqueue(same, dataset="exact")
    none = mill.enqueue(same, "--dedupe", "none", dataset="none")
    twice = mill.enqueue(same, "--dedupe", "none", dataset="none")

    assert "refused 2 (duplicates 2), already recorded 0, already queued 0, queued 2" in exact.stdout
    assert "refused 0 (duplicates 0), already recorded 0, already queued 0, queued 4" in none.stdout
    assert "already queued 4, queued 0" in twice.stdout


def test_nearly_equal_prompts_by_choice(mill: Mill) -> None:
    """--dedupe near refuses a prompt that changes one word, and says so apart from exact duplicates."""
    pytest.importorskip("rensa")
    text = " ".join(f"word{n}" for n in range(60))
    told = mill.enqueue([text, text + " more", text], "--dedupe", "near")

    assert "refused 2 (duplicates 1, near duplicates 1), already recorded 0, already queued 0, queued 1" in told.stdout


def test_other_columns_are_other_samples(mill: Mill) -> None:
    """What changes a sample's content is fixed by the first command; what only chooses rows is not."""
    mill.enqueue(rows(9), "--columns", "prompt=q,id=uid", "--filter", "lang=en")
    mill.enqueue(rows(9), "--columns", "prompt=q,id=uid", "--limit", "5")
    told = mill.enqueue(rows(9), "--columns", "prompt=q", expect=2)

    assert "columns" in told.stderr
    assert "--new-settings" in told.stderr


def test_a_preset_is_enough(mill: Mill) -> None:
    """A preset's name as SOURCE queues its rows, two presets fit into one dataset, and the licence is told."""
    pytest.importorskip("datasets")
    write_hub_dataset(mill.path / "openai" / "gsm8k", {"main": [{"question": "2+2?", "answer": "#### 4"}]})
    write_hub_dataset(
        mill.path / "glaiveai" / "glaive-function-calling-v2",
        {"default": [{"system": "SYSTEM: You are kind.", "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"}]},
    )
    first = mill.run("enqueue", "gsm8k", "--dataset", "mix")
    mill.run("enqueue", "glaive-v2", "--dataset", "mix")
    sources = json.loads((mill.folder("mix").path / "manifest.json").read_text())["sources"]

    assert "preset gsm8k: hf:openai/gsm8k:main/train, licence MIT." in first.stderr
    assert [(entry["source"], entry["adapter"], entry["read"]) for entry in sources] == [
        ("hf:openai/gsm8k:main/train", "question", 1),
        ("hf:glaiveai/glaive-function-calling-v2/train", "glaive-v2", 1),
    ]
    balanced(mill, "mix", queued=2, read=2)
