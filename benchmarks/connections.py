"""Whether requests are lost to connecting: a thousand first ones at once, and reuse as the server closes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from app.settings import ServerSettings
from benchmarks.figures import Figure, Options
from benchmarks.rig import workplace
from tests.support.processes import PROJECT_ROOT, ManagedProcess
from workers.clients import link, transport
from workers.clients.base import CallFailed, Client, Request
from workers.clients.make import make_client
from workers.rendering import Tokenizers

_FIRST = 1000
_LANES = 500
_REQUESTS = 10_000
_IDLE_S = 5.0
"""Seconds after which vLLM, SGLang and uvicorn close an idle connection."""
_AROUND_S = 0.03
_ANSWER_S = 3.0
"""Longer than connecting takes, so that each first request needs a connection of its own."""


def measure(options: Options) -> Iterator[Figure]:
    """Connect a thousand times at once, then use connections again at the moment that the server closes them.

    At last with a client that keeps them longer, which no setting allows: its own limit is raised for that.
    """
    with workplace() as folder, _server(folder, delay_s=_ANSWER_S) as url:
        failed = [asyncio.run(_first_requests(url)) for _ in range(options.repeat)]
    yield Figure(f"{_FIRST:,} first requests at once: failed", failed, at_most=0, digits=0)
    with workplace() as folder, _server(folder, delay_s=0) as url:
        lost, again = _reused(url)
        yield Figure(f"{_REQUESTS:,} requests around the close: lost", [lost], at_most=0, digits=0)
        yield Figure("sent again at once, for the connection had closed", [again], digits=0)
        usual = transport.KEEPALIVE_EXPIRY_S
        transport.KEEPALIVE_EXPIRY_S = 10 * _IDLE_S
        try:
            lost, again = _reused(url)
        finally:
            transport.KEEPALIVE_EXPIRY_S = usual
        yield Figure("the same, with a client that closes later: lost", [lost], at_most=0, digits=0)
        yield Figure("sent again at once, for the connection had closed", [again], digits=0)


@contextlib.contextmanager
def _server(folder: Path, *, delay_s: float) -> Iterator[str]:
    path = folder / "rules.json"
    path.write_text(
        json.dumps({"default": {"delay_s": delay_s}, "server": {"keep_alive_s": _IDLE_S}}), encoding="utf-8"
    )
    command = [sys.executable, "-m", "producer.simulator.server", "--port", "0", "--rules", str(path)]
    with ManagedProcess(command, log_dir=folder / "logs", name="model", cwd=PROJECT_ROOT) as process:
        yield str(json.loads(process.wait_for_output("listening"))["listening"])


async def _first_requests(url: str) -> int:
    """Return how many of a thousand first requests failed."""
    client = make_client(url, ServerSettings(), Tokenizers(None), max_connections=_FIRST)
    try:
        outcomes = await asyncio.gather(*(_outcome(client, number) for number in range(_FIRST)))
    finally:
        await client.close()
    return _failed(outcomes)


def _reused(url: str) -> tuple[int, int]:
    """Return how many requests were lost, and how often one was sent again at once, which its caller does not see."""
    told = _Count()
    log = logging.getLogger(link.__name__)
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(told)
    try:
        return asyncio.run(_reuse(url)), told.count
    finally:
        log.removeHandler(told)
        log.setLevel(level)


class _Count(logging.Handler):
    """Counts the log's lines on connections that had gone stale."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "stale" in record.getMessage()


async def _reuse(url: str) -> int:
    """Return how many requests failed that were sent over connections idle for as long as the server allows."""
    client = make_client(url, ServerSettings(), Tokenizers(None), max_connections=_LANES)

    async def reuse(lane: int) -> list[str]:
        pauses = random.Random(lane)
        outcomes = []
        for number in range(_REQUESTS // _LANES):
            outcomes.append(await _outcome(client, lane * _REQUESTS + number))
            await asyncio.sleep(_IDLE_S + pauses.uniform(-_AROUND_S, _AROUND_S))
        return outcomes

    try:
        lanes = await asyncio.gather(*map(reuse, range(_LANES)))
    finally:
        await client.close()
    return _failed([outcome for lane in lanes for outcome in lane])


async def _outcome(client: Client, number: int) -> str:
    request = Request(
        messages=[{"role": "user", "content": "hi"}],
        model="toy-model",
        sampling={"max_tokens": 9},
        request_id=f"{number}-a1",
    )
    try:
        await client.complete(request)
    except CallFailed as failure:
        return f"{failure.fault.kind}: {failure.fault.message}"
    return "ok"


def _failed(outcomes: list[str]) -> int:
    failures = Counter(outcome for outcome in outcomes if outcome != "ok")
    for words, count in failures.items():
        print(f"{count} x {words}", file=sys.stderr)
    return failures.total()
