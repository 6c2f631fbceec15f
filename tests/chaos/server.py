"""A fake model server that keeps a journal of its requests and spoils a share of its answers while a file says so.

python -m tests.chaos.server --port 8000 --latency 0.3 --sigma 0.8 --seed 1 --journal FILE --mood FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.simulator.engine import CHAT_PATH, Engine
from producer.simulator.messages import HttpReply, HttpRequest
from producer.simulator.rules import Rule, RuleBook, ServerOptions
from producer.simulator.server import serve
from producer.simulator.shapes import last_user_text
from tests.chaos.inputs import POISON
from tests.chaos.journal import Fate, Journal

_POISON = Rule(match=POISON, kill=True)


class Mood:
    """The file with the rule that spoils answers, and the share of them; no file is a good mood."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0
        self._rule: Rule | None = None
        self._share = 0.0

    def write(self, share: float, rule: Mapping[str, Any]) -> None:
        """Spoil that share of the answers from now on."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({"share": share, "rule": rule}), encoding="utf-8")
        temporary.replace(self._path)

    def clear(self) -> None:
        """Spoil nothing from now on."""
        self._path.unlink(missing_ok=True)

    def rule(self, dice: random.Random) -> Rule | None:
        """Return the rule for a request that has just come, if its answer is to be spoilt."""
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                document = json.loads(self._path.read_text(encoding="utf-8"))
                self._rule, self._share, self._seen = Rule(**document["rule"]), document["share"], changed
        except FileNotFoundError:
            return None
        return self._rule if dice.random() < self._share else None


class JournalEngine(Engine):
    """The fake server's mind with a journal and moods."""

    def __init__(self, options: ServerOptions, journal: Journal, mood: Mood) -> None:
        super().__init__(RuleBook(), options, keep_requests=False)
        self._journal = journal
        self._mood = mood
        self._dice = random.Random(options.seed)
        self._journaled: dict[int, tuple[int, bool]] = {}
        """Number in the journal, and whether its answer is spoilt, by the request's identity."""

    def begin(self, request: HttpRequest) -> HttpReply:
        """Note the request and decide its reply."""
        if request.path != CHAT_PATH or request.method != "POST":
            return super().begin(request)
        number = self._journal.begin(last_user_text(json.loads(request.body)["messages"]))
        spoilt = self._mood.rule(self._dice)
        self.rules = RuleBook((_POISON,), spoilt)
        reply = super().begin(request)
        self._journaled[id(request)] = number, spoilt is not None or reply.status != 200
        return reply

    def finish(self, request: HttpRequest, reply: HttpReply, *, sent: bool) -> None:
        """Note how the request ended."""
        super().finish(request, reply, sent=sent)
        if request.path == CHAT_PATH and request.method == "POST":
            number, spoilt = self._journaled.pop(id(request))
            self._journal.end(number, Fate.BAD if spoilt else Fate.GOOD if sent else Fate.GONE)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency", type=float, required=True, help="mean seconds of an answer")
    parser.add_argument("--sigma", type=float, required=True, help="sigma of the lognormal spread around the mean")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--mood", type=Path, required=True)
    return parser.parse_args(arguments)


async def _run(options: argparse.Namespace) -> None:
    settings = ServerOptions(latency_s=options.latency, latency_sigma=options.sigma, seed=options.seed)
    engine = JournalEngine(settings, Journal(options.journal), Mood(options.mood))

    def announce(port: int) -> None:
        sys.stdout.write(f"listening on {port}\n")
        sys.stdout.flush()

    await serve(engine, options.port, stop=asyncio.Event(), on_port=lambda _port: None, on_listen=announce)


if __name__ == "__main__":
    asyncio.run(_run(_parse(sys.argv[1:])))
