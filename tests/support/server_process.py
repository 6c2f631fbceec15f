"""The fake model server as a process of its own, which can be frozen and killed like a real one."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from producer.ports import free_port
from tests.support.processes import ManagedProcess

_ANSWER_TIMEOUT_S = 10.0


class ServerProcess:
    """`python -m producer.simulator.server` on a port that it keeps over restarts."""

    def __init__(self, folder: Path, *, latency_s: float, rules: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take a folder for its log, the seconds that an answer takes, and rules; nothing is started yet."""
        self.port = free_port()
        self._folder = folder
        self._latency_s = latency_s
        self._rules = list(rules)
        self._process: ManagedProcess | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def url(self) -> str:
        """The base URL, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> ManagedProcess:
        """The process, to freeze and kill; raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("The model server was never started.")
        return self._process

    def start(self) -> Self:
        """Start it, on the same port as before, and wait until it listens."""
        words = ["--port", str(self.port), "--latency", str(self._latency_s)]
        if self._rules:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / "model-server.rules.json"
            file.write_text(json.dumps({"rules": self._rules}), encoding="utf-8")
            words += ["--rules", str(file)]
        command = [sys.executable, "-m", "producer.simulator.server", *words]
        self._process = ManagedProcess(command, log_dir=self._folder, name="model-server")
        self._process.wait_for_output("listening")
        return self

    def stats(self) -> dict[str, Any]:
        """Return the tallies since its last start."""
        stats: dict[str, Any] = self._get("/__stats")
        return stats

    def counts(self) -> dict[str, int]:
        """Return the chat requests since its last start, by last user text."""
        counts: dict[str, int] = self._get("/__counts")
        return counts

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=_ANSWER_TIMEOUT_S) as answer:  # noqa: S310  http, ours
            return json.load(answer)
