"""A fake vLLM server on a real socket, in a thread of the tests or as a program of its own.

In a test:       with ModelServer(rules=[Rule(match="slow", delay_s=2)]) as server: ... server.url, server.requests
As a program:    python -m producer.simulator.server --port 8000 --latency 2 --sigma 0.5

Besides the chat endpoint it serves /health, /v1/models, /version, /metrics and /inference/v1/generate as vLLM does, or
/generate, /abort_request and /server_info as SGLang does (by its dialect), `GET /__stats` (the
tallies as JSON) and `GET /__counts` (requests by last user text). One core answers several thousand requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from producer.simulator.engine import Engine, SeenRequest
from producer.simulator.ports import bound_socket
from producer.simulator.rules import Rule, RuleBook, ServerOptions, load_rules
from producer.simulator.wire import Connection

_BACKLOG = 4096
_START_TIMEOUT_S = 30.0

_OnPort = Callable[[int], None]


async def serve(engine: Engine, port: int, *, stop: asyncio.Event, on_port: _OnPort, on_listen: _OnPort) -> None:
    """Serve until `stop` is set; a start-up pause refuses connections while the port is already ours.

    `on_port(port)` is called once the port is bound, `on_listen(port)` once connections are accepted.
    """
    sock = bound_socket(port)
    with contextlib.closing(sock):
        port = sock.getsockname()[1]
        on_port(port)
        pause_s = engine.take_start_pause()
        if pause_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)
        if stop.is_set():
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(engine), sock=sock, backlog=_BACKLOG)
        on_listen(port)
        await stop.wait()
        server.close()
        for connection in engine.connections:
            connection.transport.abort()
        await asyncio.sleep(0)


class ModelServer:
    """The fake server in a thread; it can be stopped and started again on its port, and keeps its tallies."""

    def __init__(
        self,
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        *,
        default: Rule | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        """Take rules, what to do without one, a port (0: a free one), and the fields of ServerOptions."""
        self._engine = Engine(RuleBook(rules, default), ServerOptions(**options))
        self.port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Listen, on the same port as before."""
        ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(ready),), name="model-server", daemon=True)
        self._thread.start()
        if not ready.wait(_START_TIMEOUT_S):
            raise RuntimeError(f"The fake model server could not listen on port {self.port}.")
        return self

    def stop(self) -> None:
        """Refuse connections from now on and cut the open ones; safe to call twice."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_TIMEOUT_S)
        self._thread = None

    async def _main(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        starts_late = self._engine.options.start_down_s > 0

        def on_port(port: int) -> None:
            self.port = port
            if starts_late:
                ready.set()

        def on_listen(_port: int) -> None:
            ready.set()

        await serve(self._engine, self.port, stop=self._stop, on_port=on_port, on_listen=on_listen)

    @property
    def url(self) -> str:
        """The base URL, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> tuple[SeenRequest, ...]:
        """The chat requests so far, oldest first, refused ones included."""
        return tuple(self._engine.seen)

    @property
    def counts(self) -> Counter[str]:
        """Chat requests by their last user text."""
        return Counter(request.key for request in self.requests)

    def count(self, key: str) -> int:
        """Return how many chat requests had exactly this last user text."""
        return self.counts[key]

    @property
    def stats(self) -> dict[str, Any]:
        """The tallies that `GET /__stats` shows."""
        return self._engine.stats()

    @property
    def in_flight(self) -> int:
        """Chat requests that wait for their answer now."""
        return self._engine.in_flight

    @property
    def peak_in_flight(self) -> int:
        """The most chat requests that ever waited at once, refused ones included."""
        return self._engine.peak_in_flight

    @property
    def aborted(self) -> int:
        """Chat requests whose client went away before the answer."""
        return self._engine.aborted

    @property
    def aborts(self) -> tuple[str, ...]:
        """The request ids that `/abort_request` named, oldest first."""
        return tuple(self._engine.aborts)

    @property
    def accepted_connections(self) -> int:
        """TCP connections accepted so far."""
        return self._engine.accepted

    def set_rules(self, rules: Iterable[Rule | Mapping[str, Any]] = (), *, default: Rule | None = None) -> None:
        """Replace the rules for requests that arrive from now on."""
        self._engine.rules = RuleBook(rules, default)

    def set_options(self, **changes: Any) -> None:
        """Change fields of ServerOptions for requests that arrive from now on."""
        self._engine.options = dataclasses.replace(self._engine.options, **changes)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m producer.simulator.server", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--rules", type=Path, help="JSON file with rules, default and server")
    parser.add_argument("--latency", type=float, help="mean seconds of an answer")
    parser.add_argument("--sigma", type=float, help="sigma of the lognormal spread around the mean")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-in-flight", type=int)
    parser.add_argument("--model")
    parser.add_argument("--content-chars", type=int, help="answer with about this many characters")
    return parser.parse_args(arguments)


def _engine_of(options: argparse.Namespace) -> Engine:
    rules, server = load_rules(options.rules) if options.rules else (RuleBook(), ServerOptions())
    given = {
        "latency_s": options.latency,
        "latency_sigma": options.sigma,
        "seed": options.seed,
        "max_in_flight": options.max_in_flight,
        "model": options.model,
    }
    server = dataclasses.replace(server, **{name: value for name, value in given.items() if value is not None})
    if options.content_chars:
        text = "All work and no play. "
        rules = RuleBook((), Rule(content=text, repeat=max(2, options.content_chars // len(text))))
    return Engine(rules, server, keep_requests=False)


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def announce(port: int) -> None:
        sys.stdout.write(json.dumps({"listening": f"http://127.0.0.1:{port}"}) + "\n")
        sys.stdout.flush()

    await serve(_engine_of(options), options.port, stop=stop, on_port=lambda _port: None, on_listen=announce)


if __name__ == "__main__":
    asyncio.run(_run(_parse(sys.argv[1:])))
