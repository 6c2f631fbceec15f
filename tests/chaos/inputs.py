"""The inputs of a chaos run: rows of two datasets that grow while it runs, in ever new orders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

DATASETS = ("tide", "ebb")
"""The first one's rows have ids of their own."""
POISON = "POISON"
"""Begins the prompts whose requests kill a server."""
_BLANK_EVERY = 40
"""One row of so many is blank, and is refused."""


class Input:
    """One dataset's rows."""

    def __init__(self, dataset: str, count: int, *, folder: Path, seed: int) -> None:
        self.dataset = dataset
        self.prompts = [f"{dataset} {number}: how much is {number} times {number}?" for number in range(count)]
        self.poisons: list[str] = []
        """Prompts that kill each server that is asked them; they end as failed."""
        self._folder = folder
        self._dice = random.Random(f"{seed}:{dataset}")

    def write(self, share: float) -> Path:
        """Write the first `share` of the rows into the input's file, shuffled anew."""
        rows = self._rows(0, max(1, round(share * len(self.prompts))))
        self._dice.shuffle(rows)
        return self._write(rows, self.dataset)

    def write_part(self, share: float) -> Path:
        """Write a run of rows, as long as half of the first `share`, from somewhere within it, into a second file."""
        length = max(2, round(share * len(self.prompts)))
        begin = self._dice.randrange(length // 2)
        return self._write(self._rows(begin, begin + length // 2), f"{self.dataset}-part")

    def poison(self) -> str:
        """Let one more prompt that kills servers join the rows; return it."""
        self.poisons.append(f"{POISON} {self.dataset} {len(self.poisons)}")
        return self.poisons[-1]

    @property
    def blanks(self) -> int:
        """Rows that are refused."""
        return len(range(0, len(self.prompts), _BLANK_EVERY))

    def _write(self, rows: list[dict[str, Any]], name: str) -> Path:
        """Put the rows into the place of what was there; whoever is reading that reads on in it."""
        path, temporary = self._folder / f"{name}.jsonl", self._folder / f"{name}.new"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(path)
        return path

    def _rows(self, begin: int, end: int) -> list[dict[str, Any]]:
        rows = [self._row(number) for number in range(begin, end)]
        rows += [{"prompt": prompt} for prompt in self.poisons]
        return rows + [self._blank(number) for number in range(begin, end) if number % _BLANK_EVERY == 0]

    def _blank(self, number: int) -> dict[str, Any]:
        return {"prompt": " ", "note": f"blank {number}"}

    def _row(self, number: int) -> dict[str, Any]:
        if self.dataset != DATASETS[0]:
            return {"messages": [{"role": "user", "content": self.prompts[number]}]}
        return {"id": f"{self.dataset}-{number:06}", "prompt": self.prompts[number]}
