"""Tells when there is nothing left to wait for."""

from __future__ import annotations

from app.snapshot import Snapshot, State

_OVER = frozenset({State.DONE, State.EMPTY})


class Over:
    """Told of each snapshot in turn; says whether the view ends with it."""

    def __init__(self, *, until_done: bool) -> None:
        self._until_done = until_done
        self._last: Snapshot | None = None
        self._lost_before = False
        self._answer = False

    def __call__(self, snapshot: Snapshot) -> bool:
        """Tell whether it is over; one that was seen before changes nothing."""
        if snapshot is self._last:
            return self._answer
        # While enqueue writes, samples can look lost for a moment: that has to be seen twice.
        state = snapshot.totals.state
        lost, before = state is State.INCOMPLETE, self._lost_before
        self._last, self._lost_before = snapshot, lost
        self._answer = self._until_done and (state in _OVER or (lost and before))
        return self._answer
