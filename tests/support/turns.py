"""Conversations for tests in which every assistant turn is made anew, and the lines that remember single turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.records import Kind
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill


def talk(*texts: str, old: str = "old", **more: Any) -> dict[str, Any]:
    """Return a row with these user turns, and an old answer after each."""
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": old}]
    return {"messages": messages, **more}


def history(*texts: str) -> list[dict[str, Any]]:
    """Return user and assistant turns in turns, the user's first."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def turns_file(mill: Mill, dataset: str = "case") -> Path:
    """Return the file of the dataset's turns, of the one set of settings that it has."""
    (folder,) = mill.folder(dataset).all_turns.iterdir()
    return mill.folder(dataset).turns(folder.name).lines(Kind.ACCEPTED)


def turn_records(mill: Mill, dataset: str = "case") -> list[dict[str, Any]]:
    """Return the lines of single turns, read strictly, in file order."""
    check = check_jsonl(turns_file(mill, dataset))
    assert not check.problems, check.problems
    return list(check.records)
