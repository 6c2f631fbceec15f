"""Which sequences are run through the model together."""

from __future__ import annotations

from app.extraction import Layout
from tests.unit.app.test_extraction import plan
from workers.extract.engine import Job, choose_batch

PLAN = plan()


def jobs(*lengths: int) -> list[Job]:
    """Return jobs of those lengths, the oldest first."""
    return [Job(PLAN, [0] * length) for length in lengths]


def lengths(batch: list[Job]) -> list[int]:
    """Return the lengths of a batch."""
    return [len(job.ids) for job in batch]


def test_a_batch_costs_its_longest_times_their_number() -> None:
    """As many fit as the longest one allows, so that padding never exceeds the bound."""
    assert lengths(choose_batch(jobs(10, 10, 10, 10), 30)) == [10, 10, 10]
    assert lengths(choose_batch(jobs(10, 2, 2, 2), 30)) == [2, 2, 10]


def test_the_oldest_is_always_in_it() -> None:
    """Whatever its length, nothing waits for ever; those of like length go with it."""
    assert lengths(choose_batch(jobs(100, 1, 1, 99, 2), 200)) == [99, 100]
    assert lengths(choose_batch(jobs(1, 100, 99, 2, 1), 10)) == [1, 1, 2]


def test_a_sequence_beyond_the_bound_is_a_batch_of_its_own() -> None:
    """The bound is on what is put together, not on a single sequence."""
    assert lengths(choose_batch(jobs(500, 3), 100)) == [500]


def test_plans_are_not_mixed() -> None:
    """A batch is of one plan; the other one's turn comes when its sample is the oldest."""
    other = Job(plan(layout=Layout.MODELOPT), [0] * 3)
    assert choose_batch([*jobs(3, 3), other], 100)[-1].plan == PLAN
    assert choose_batch([other, *jobs(3, 3)], 100) == [other]
