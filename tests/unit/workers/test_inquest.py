"""Whether a server died: one look for all calls that end together, and who was in flight when it happened."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fake_client import FakeClient
from workers.clients.base import PROBE_TIMEOUT_S, Probe
from workers.endpoint import Endpoint
from workers.faults import FaultKind, make_fault
from workers.inquest import Finding, Inquest

_MAY_BE = (FaultKind.CONNECTION_LOST, FaultKind.ENGINE_DEAD)
_SOON = 1e12
"""Monotonic seconds that no test reaches."""


class _Answering(FakeClient):
    """A client whose look finds what it is told to find."""

    def __init__(self, found: Probe) -> None:
        super().__init__()
        self.found = found

    async def probe(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Return what it is told."""
        assert timeout_s < PROBE_TIMEOUT_S
        self.probes += 1
        return self.found


_GONE = Probe(alive=False, words="nobody there")


def _look(
    inquest: Inquest, client: FakeClient, kind: FaultKind, *, started: float = 0.0, back_at: float = 0.0
) -> Finding:
    endpoint = Endpoint(url="http://server", client=client)
    return asyncio.run(inquest.look_into(endpoint, make_fault(kind, "x"), started=started, back_at=back_at))


@pytest.mark.parametrize("kind", _MAY_BE)
def test_a_server_that_is_gone_has_died(kind: FaultKind) -> None:
    """A call that began before anybody knew of the server's end was in flight as it died."""
    assert _look(Inquest(), _Answering(_GONE), kind) is Finding.DIED


@pytest.mark.parametrize(
    "found",
    [
        Probe(alive=True, words="ok"),
        Probe(alive=False, words="HTTP 401", refuses=True),
        Probe(alive=False, words="no answer", timed_out=True),
    ],
    ids=["alive", "refuses", "silent"],
)
def test_a_server_that_is_there_has_not_died(found: Probe) -> None:
    """A server that answers, refuses us or lets us wait is there."""
    assert _look(Inquest(), _Answering(found), FaultKind.CONNECTION_LOST) is Finding.ALIVE


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind not in _MAY_BE])
def test_other_faults_need_no_look(kind: FaultKind) -> None:
    """A fault that says nothing of a death costs the server no look."""
    client = _Answering(_GONE)
    assert (_look(Inquest(), client, kind), client.probes) == (Finding.ALIVE, 0)


def test_each_life_has_its_own_death() -> None:
    """Who begins after a death was heard of found the server dead; once it has been back, it can die again."""
    inquest, client = Inquest(), _Answering(_GONE)
    kind = FaultKind.CONNECTION_LOST
    assert _look(inquest, client, kind, started=1.0) is Finding.DIED
    assert _look(inquest, client, kind, started=_SOON) is Finding.GONE
    assert _look(inquest, client, kind, started=2.0) is Finding.DIED
    assert _look(inquest, client, kind, started=3.0, back_at=2.5) is Finding.DIED
