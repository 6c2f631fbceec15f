"""A model client without a network: it keeps the promise of `workers.clients.base.Client` and answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from app.records import Completion, Usage
from workers.clients.backends import UNKNOWN, Backend
from workers.clients.base import PROBE_TIMEOUT_S, Answer, CallFailed, Probe, Request
from workers.faults import Fault, FaultKind, make_fault

Reply = Completion | Fault | FaultKind | Exception
"""An answer, a fault that the call fails with, or an exception that no client should raise: a bug."""
Step = Reply | Callable[[Request], Reply]
"""A reply, or what works it out at the moment of the call."""


def completion(content: str = "An answer.", *, tokens: int = 3, model: str | None = "toy") -> Completion:
    """Return a whole answer."""
    return Completion(content=content, finish_reason="stop", usage=Usage(completion_tokens=tokens), model=model)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait in the loop until the condition holds; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nothing in the product tells tests of such moments
            await asyncio.sleep(0.001)


class FakeClient:
    """Replies with the steps of its script, then with whole answers."""

    name = "fake"

    def __init__(
        self, *script: Step, alive: bool = True, models: Sequence[str] = ("toy",), latency_s: float = 0.0
    ) -> None:
        """Take the first replies, what a probe shall find, and the seconds that each answer takes."""
        self.script = list(script)
        self.alive = alive
        self.models = tuple(models)
        self.latency_s = latency_s
        self.gate: asyncio.Event | None = None
        """Holds back every reply until it is set."""
        self.look_gate: asyncio.Event | None = None
        """Holds back what every look finds until it is set."""
        self.silent = False
        """Whether it answers no look."""
        self.metrics: bytes | None = b""
        """Its /metrics page; empty: it has none."""
        self.readings = 0
        self.requests: list[Request] = []
        self.probes = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.closed = False
        self.backend = UNKNOWN
        self.refused: str | None = None
        """What it would not act on."""
        self.identified = 0

    async def identify(self, *, again: bool = False) -> Backend:
        """Return the backend that a test has set."""
        self.identified += again
        return self.backend

    def refusal(self, request: Request) -> str | None:
        """Refuse what a test has set."""
        assert request.model
        return self.refused

    async def complete(self, request: Request) -> Answer:
        """Reply with the script's next step."""
        self.requests.append(request)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.latency_s)
            if self.gate is not None:
                await self.gate.wait()
            return Answer(self._reply(request), 0.25)
        finally:
            self.in_flight -= 1

    def _reply(self, request: Request) -> Completion:
        step = self.script.pop(0) if self.script else completion()
        reply = step(request) if callable(step) else step
        if isinstance(reply, FaultKind):
            reply = make_fault(reply, f"fake {reply}")
        if isinstance(reply, Fault):
            raise CallFailed(reply)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def probe(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Tell whether it is alive; one that is silent lets every look time out, at once."""
        self.probes += 1
        if self.look_gate is not None:
            await self.look_gate.wait()
        if self.silent:
            return Probe(alive=False, words=f"no answer within {timeout_s:g} s", timed_out=True)
        if not self.alive:
            return Probe(alive=False, words="nobody there")
        return Probe(alive=True, words="ok", models=self.models)

    async def read_metrics(self, *, timeout_s: float) -> bytes | None:
        """Return the page that a test has set."""
        assert timeout_s > 0
        self.readings += 1
        return self.metrics

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True
