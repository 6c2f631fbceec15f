"""Short chaos runs, and the promises of their plan."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.chaos.journal import Fate, Journal, read_journals
from tests.chaos.plan import LASTS_S, Fault, make_plan
from tests.chaos.run import run
from tests.chaos.watch import status_problems, verify_problems
from tests.chaos.world import Options

_FIXED_SEED = 20_240_607
_SECONDS = 90.0


def test_a_seed_makes_one_plan() -> None:
    """The same seed gives the same faults at the same times, another seed other ones."""
    assert make_plan(7, 600) == make_plan(7, 600)
    assert make_plan(7, 600) != make_plan(8, 600)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_fault_and_ends_in_time(seed: int) -> None:
    """Ten minutes hold every fault several times, in order, each within its bounds and over before the run is."""
    steps = make_plan(seed, 600)
    assert {fault: sum(step.fault is fault for step in steps) >= 2 for fault in Fault} == dict.fromkeys(Fault, True)
    assert [step.at_s for step in steps] == sorted(step.at_s for step in steps)
    assert all(step.at_s + step.lasts_s < 600.02 for step in steps)
    for step in steps:
        shortest, longest = LASTS_S[step.fault]
        assert shortest <= step.lasts_s <= longest
        assert 0 <= step.choose(3) < 3


def test_a_journal_tells_how_each_request_ended(tmp_path: Path) -> None:
    """Requests without an end are those that the server's death cost, and every prompt is counted."""
    for number in range(2):
        journal = Journal(tmp_path / f"{number}.journal")
        journal.end(journal.begin("the same"), Fate.GOOD)
        journal.end(journal.begin("two\nlines"), Fate.GONE)
        journal.begin("the same")
    tally = read_journals(sorted(tmp_path.glob("*.journal")))
    assert tally.prompts == {"the same": 4, "two lines": 2}
    assert tally.fates == {Fate.GOOD: 2, Fate.GONE: 2, Fate.LOST: 2}
    assert tally.requests == 6
    assert tally.excused == {"the same": 2}
    assert [(one.server, one.fate) for one in tally.stories["two lines"]] == [("0", Fate.GONE), ("1", Fate.GONE)]
    assert tally.repeats() == {"the same": 1, "two lines": 1}


def test_books_that_do_not_balance_are_seen() -> None:
    """A status or a verify whose counts do not add up is told, with the counts."""
    counts = dict.fromkeys(("refused", "rejected", "failed", "missing", "in_flight", "without_ticket"), 0)
    counts |= {"read": 3, "samples": 3, "accepted": 1, "queued": 1, "left": 2}
    part = {"counts": counts}
    assert len(status_problems({"datasets": {"tide": part}, "totals": part})) == 2
    report = {"counts": counts, "duplicates": ["a"], "bad_lines": [], "problems": ["1 id is on two lines."]}
    assert len(verify_problems({"tide": report})) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [_FIXED_SEED, random.randrange(2**31)], ids=["fixed", "random"])
def test_everything_holds_under_random_faults(seed: int, tmp_path: Path, redis_binary: Path) -> None:
    """After faults of all kinds at once every sample is recorded once, the books balance, and nothing was burned."""
    result = run(Options(seed=seed, seconds=_SECONDS), tmp_path, lambda line: print(line, file=sys.stderr))  # noqa: T201  pytest shows it
    assert not result.problems, f"seed {seed}: {result.problems}"
