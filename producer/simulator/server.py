"""A simulated model server on a real socket, in a thread of the tests or as a program of its own.

In a test:       with ModelServer(rules=[Rule(match="slow", delay_s=2)]) as server: ... server.url, server.requests
As a program:    python -m producer.simulator.server --port 8000 --mean-tokens 800

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
import math
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from producer.ports import bound_socket
from producer.simulator.engine import Engine, SeenRequest
from producer.simulator.realistic import RealisticEngine, Traits
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


_DESCRIPTION = """A model server that needs no GPU: it speaks vLLM's chat completions on 127.0.0.1 and makes answers up.

Without options it echoes the prompt at once. With --mean-tokens it answers as a real one would: lognormal lengths that
max_tokens cuts, a first token after --first-token-s, and tokens at --tokens-per-second, or slower where
--server-tokens-per-second has to be shared by all requests in flight; an answer is sent when it is whole, also where a
stream was asked for. `producer rehearse` runs it in this way.
"""
_EPILOG = """Examples:
  python -m producer.simulator.server --mean-tokens 800 --sigma 0.9
  python -m producer.simulator.server --mean-tokens 2000 --server-tokens-per-second 10000 --speedup 20
  python -m producer.simulator.server --latency 2 --sigma 0.5 --port 8001

GET /__stats tells what it has done. One core answers several thousand requests a second.
"""


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m producer.simulator.server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--model", help="the name of its one model (default: toy-model)")
    parser.add_argument("--max-in-flight", type=int, help="answer 503 to requests above this many at once")
    parser.add_argument("--seed", type=int, help="seed of what is drawn (default: 0)")
    parser.add_argument("--sigma", type=_at_least_0, help="sigma of the lognormal spread around either mean")
    parser.add_argument("--rules", type=Path, help="JSON file with rules, default and server")
    plain = parser.add_argument_group("answers after a given time")
    plain.add_argument("--latency", type=_at_least_0, help="mean seconds of an answer (default: 0)")
    plain.add_argument("--content-chars", type=int, help="answer with about this many characters")
    real = parser.add_argument_group("answers as of a real model")
    real.add_argument("--mean-tokens", type=_above_0, help="tokens of an answer on average")
    real.add_argument("--tokens-per-second", type=_above_0, help="speed of one answer (default: 40)")
    real.add_argument("--server-tokens-per-second", type=_above_0, help="of all answers together (default: 4000)")
    real.add_argument("--first-token-s", type=_at_least_0, help="seconds to an answer's first token (default: 0.5)")
    real.add_argument("--failure-share", type=_share, help="share of requests that are answered 500 (default: 0)")
    real.add_argument("--speedup", type=_above_0, help="let the time run so many times faster (default: 1)")
    options = parser.parse_args(arguments)
    if options.mean_tokens is None and (unused := sorted(name for name in _TRAITS if vars(options)[name] is not None)):
        parser.error(f"--{unused[0].replace('_', '-')} needs --mean-tokens")
    return options


def _above_0(text: str) -> float:
    return _number(text, lambda number: number > 0, "above 0")


def _at_least_0(text: str) -> float:
    return _number(text, lambda number: number >= 0, "of at least 0")


def _share(text: str) -> float:
    return _number(text, lambda number: 0 <= number <= 1, "from 0 to 1")


def _number(text: str, fits: Callable[[float], bool], words: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not fits(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")
    return number


_TRAITS = ("tokens_per_second", "server_tokens_per_second", "first_token_s", "failure_share", "speedup")
"""Options that make sense with --mean-tokens alone, by the names of the fields of Traits."""
_LONGEST_CONTEXT = 2**24
"""Prompts of a rehearsal are never too long for the server."""


def _engine_of(options: argparse.Namespace) -> Engine:
    rules, server = load_rules(options.rules) if options.rules else (RuleBook(), ServerOptions())
    given = {"model": options.model, "max_in_flight": options.max_in_flight, "seed": options.seed}
    if options.mean_tokens is not None:
        given["max_model_len"] = _LONGEST_CONTEXT
        traits = _given(options, *_TRAITS, "sigma", "seed")
        return RealisticEngine(
            Traits(mean_tokens=options.mean_tokens, **traits), rules, dataclasses.replace(server, **_set(given))
        )
    given.update(latency_s=options.latency, latency_sigma=options.sigma)
    if options.content_chars:
        text = "All work and no play. "
        rules = RuleBook((), Rule(content=text, repeat=max(2, options.content_chars // len(text))))
    return Engine(rules, dataclasses.replace(server, **_set(given)), keep_requests=False)


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return _set({name: vars(options)[name] for name in names})


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
