"""Result files that a crash has damaged: what is whole stays, what is cut is kept aside and asked again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import ModelServerFactory
from tests.support.books import all_balanced, balanced
from tests.support.mill import Mill

PROMPTS = ["Say one.", "Say two.", "Écris « trois ».", "说四", "Say five."]


def cut_in_the_middle(path: Path) -> None:
    """Leave half of the last line."""
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[: len(last) // 2])


def cut_near_the_end(path: Path) -> None:
    """Leave all of the last line but its last brace and the newline."""
    path.write_bytes(path.read_bytes()[:-2])


def lose_the_newline(path: Path) -> None:
    """Leave the last record whole, without its newline."""
    path.write_bytes(path.read_bytes()[:-1])


def fill_with_nuls(path: Path) -> None:
    """Append a block that a file system allocated and never wrote."""
    path.write_bytes(path.read_bytes() + bytes(4096))


DAMAGES: dict[str, tuple[Callable[[Path], None], int]] = {
    "half": (cut_in_the_middle, 1),
    "brace": (cut_near_the_end, 1),
    "newline": (lose_the_newline, 0),
    "nuls": (fill_with_nuls, 0),
}
"""Dataset -> what happens to its file, and how many samples that costs."""


def test_a_torn_tail_costs_one_sample(mill: Mill, model_server: ModelServerFactory) -> None:
    """A resume after a torn tail keeps the whole lines byte for byte, asks for what was cut alone, and tells of it."""
    server = model_server()
    for name in DAMAGES:
        mill.enqueue(PROMPTS[:4], dataset=name)
    worker = mill.worker()
    for name in DAMAGES:
        mill.wait_recorded(4, name)
    assert worker.stop() == 0
    whole = {}
    for name, (damage, _lost) in DAMAGES.items():
        whole[name] = mill.out(name).read_bytes().splitlines(keepends=True)[:3]
        damage(mill.out(name))
    asked = len(server.requests)
    for name, (_damage, lost) in DAMAGES.items():
        told = mill.enqueue(PROMPTS, dataset=name)
        assert f"resuming: {4 - lost} of 5" in told.stdout
        warnings = [line for line in told.stderr.splitlines() if "raw_responses.jsonl" in line]
        assert len(warnings) == 1, told.stderr
        assert "byte" in warnings[0]
        assert mill.folder(name).torn.exists() == (name != "newline")
    mill.worker()
    for name in DAMAGES:
        mill.wait_recorded(5, name)
        assert mill.out(name).read_bytes().splitlines(keepends=True)[:3] == whole[name]
    all_balanced(mill, {name: {"accepted": 5, "left": 0} for name in DAMAGES})
    mill.run("verify")
    new = len(server.requests) - asked
    assert new == sum(lost + 1 for _damage, lost in DAMAGES.values())


def test_lines_that_vanish_are_asked_again(mill: Mill, model_server: ModelServerFactory) -> None:
    """Under a running worker too, lines in another order cost nothing and one that is gone costs one request."""
    server = model_server()
    rows = [{"id": f"row{number}", "prompt": f"Count to {number}."} for number in range(8)]
    mill.enqueue(rows)
    mill.worker()
    mill.wait_recorded(8)
    lines = mill.out().read_bytes().splitlines(keepends=True)
    mill.out().write_bytes(b"".join(lines[:3] + lines[:3:-1]))
    told = mill.enqueue(rows)
    assert "queued 1\n" in told.stdout
    balanced(mill, accepted=8, left=0)
    assert len(server.requests) == 9
