"""What a request costs the worker's client: an answer of 8 kB and 2,000 token ids, whole and streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.settings import ServerSettings
from benchmarks.figures import Figure, Options
from benchmarks.rig import workplace
from tests.support.processes import PROJECT_ROOT, ManagedProcess
from workers.clients.base import Client, Request
from workers.clients.make import make_client
from workers.mill import spare_the_collector
from workers.rendering import Tokenizers

_TOKENS = 2000
_CHUNKS = 500
_AT_ONCE = 64
_WARM_UP, _REQUESTS = 64, 256
_ANSWER_S = 5.0
"""Seconds of a streamed answer: tokens come one after the other, and the client must not be spared by haste."""


def measure(options: Options) -> Iterator[Figure]:
    """Ask in turn for whole answers and for streams."""
    whole, streamed = list[float](), list[float]()
    with workplace() as folder, _server(folder) as url:
        for _ in range(options.repeat):
            whole.append(asyncio.run(_cpu_ms(url, stream=False)))
            streamed.append(asyncio.run(_cpu_ms(url, stream=True)))
    yield Figure("client: CPU per request", whole, "ms", at_most=1.5)
    yield Figure(f"client: CPU per request, {_CHUNKS} chunks", streamed, "ms", at_most=6)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """Run a fake vLLM whose tokens are characters of four bytes, so that 2,000 of them make 8 kB."""
    rule = {
        "content": "\U0001f305",
        "repeat": _TOKENS,
        "finish_reason": "stop",
        "chunk_tokens": _TOKENS // _CHUNKS,
        "chunk_delay_s": _ANSWER_S / _CHUNKS,
    }
    path = folder / "rules.json"
    path.write_text(json.dumps({"default": rule}), encoding="utf-8")
    command = [sys.executable, "-m", "producer.simulator.server", "--port", "0", "--rules", str(path)]
    with ManagedProcess(command, log_dir=folder / "logs", name="model", cwd=PROJECT_ROOT) as process:
        yield str(json.loads(process.wait_for_output("listening"))["listening"])


async def _cpu_ms(url: str, *, stream: bool) -> float:
    """Return this process's CPU milliseconds per request, once all connections are open."""
    servers = ServerSettings(model_urls=(url,), stream=stream)
    client = make_client(url, servers, Tokenizers(None), max_connections=_AT_ONCE)
    try:
        await client.identify()
        await _ask_all(client, _WARM_UP)
        spare_the_collector()  # as a worker does
        started = time.process_time()
        await _ask_all(client, _REQUESTS)
        return 1000 * (time.process_time() - started) / _REQUESTS
    finally:
        await client.close()


async def _ask_all(client: Client, count: int) -> None:
    numbers = iter(range(count))

    async def ask_on() -> None:
        for number in numbers:
            answer = await client.complete(_request(number))
            if len(answer.completion.output_ids or ()) != _TOKENS + 1:
                raise ValueError("the fake server did not answer as it was told")

    await asyncio.gather(*(ask_on() for _ in range(_AT_ONCE)))


def _request(number: int) -> Request:
    fields: dict[str, Any] = {"max_tokens": 4096}
    messages: Any = [{"role": "user", "content": "All work and no play makes Jack a dull boy."}]
    return Request(messages=messages, model="toy-model", sampling=fields, request_id=f"{number}-a1")
