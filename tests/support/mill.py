"""The whole product in one hand, for tests: enqueue, real workers, status and the files they write."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import redis

from app.places import DatasetFolder, Keys, dataset_folder
from app.records import Kind
from tests.support.processes import Finished, ManagedProcess, WorkerProcess, run_producer, start_producer, wait_until

FINAL_KINDS = (Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED)
"""The kinds of record that end a sample."""

_IDLE_POLL_S = 0.1
_STATUS_EVERY_S = 5.0


class Mill:
    """Drives one prepared folder through the command line; every process it starts is gone after `close`."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        """Take the environment of all processes (read anew at each start) and a folder for inputs and logs."""
        self.env = env
        self.path = folder
        self.logs = folder / "logs"
        self._processes: list[ManagedProcess] = []

    @property
    def prepared(self) -> Path:
        """The folder of the dataset folders."""
        return Path(self.env["MILL_PREPARED_DIR"])

    def folder(self, dataset: str = "case") -> DatasetFolder:
        """Return the dataset's paths."""
        return dataset_folder(self.prepared, dataset)

    def out(self, dataset: str = "case") -> Path:
        """Return the file of accepted records."""
        return self.folder(dataset).lines(Kind.ACCEPTED)

    def write_rows(self, rows: Iterable[Mapping[str, Any] | str], name: str = "rows") -> Path:
        """Write rows as JSONL and return the file; a plain string becomes `{"prompt": ...}`."""
        path = self.path / f"{name}.jsonl"
        documents = ({"prompt": row} if isinstance(row, str) else row for row in rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
        return path

    def run(self, *arguments: str, expect: int | None = 0, timeout_s: float = 60.0) -> Finished:
        """Run `producer ARGUMENTS` and assert its exit code; None takes any."""
        finished = run_producer(*arguments, env=self.env, cwd=self.path, timeout_s=timeout_s)
        said = f"producer {' '.join(arguments)} ended with {finished.code}\n{finished.stdout}\n{finished.stderr}"
        assert expect is None or finished.code == expect, said
        return finished

    def start(self, *arguments: str, name: str = "producer") -> ManagedProcess:
        """Start `producer ARGUMENTS` in the background."""
        return self._keep(start_producer(*arguments, env=self.env, log_dir=self.logs, name=name))

    def enqueue(
        self,
        source: Path | Iterable[Mapping[str, Any] | str],
        *arguments: str,
        dataset: str = "case",
        expect: int | None = 0,
        timeout_s: float = 60.0,
        preflight: bool = False,
    ) -> Finished:
        """Enqueue a file, or rows that are written to one first; the look at the servers is a process more to start."""
        file = source if isinstance(source, Path) else self.write_rows(source)
        words = ("enqueue", str(file), "--dataset", dataset, *arguments)
        if not preflight:
            words += ("--no-preflight",)
        return self.run(*words, expect=expect, timeout_s=timeout_s)

    def worker(
        self,
        *arguments: str,
        concurrency: int = 4,
        name: str | None = None,
        drain_s: float | None = None,
        extra_env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> WorkerProcess:
        """Start a worker and wait until it consumes, unless told not to."""
        worker = WorkerProcess(
            self.env,
            log_dir=self.logs,
            concurrency=concurrency,
            drain_s=drain_s,
            extra_env=extra_env,
            name=name or f"worker{len(self._processes) + 1}",
            arguments=arguments,
        )
        self._keep(worker)
        return worker.wait_ready() if wait else worker

    def status(self, dataset: str | None = None) -> dict[str, Any]:
        """Return what `producer status --json` says, whatever its exit code."""
        words = ("status", *([dataset] if dataset else []), "--json")
        document = self.run(*words, expect=None).json()
        assert isinstance(document, dict)
        return document

    def counts(self, dataset: str = "case") -> dict[str, int]:
        """Return the dataset's counts as status tells them."""
        counts = self.status(dataset)["datasets"][dataset]["counts"]
        assert isinstance(counts, dict)
        return counts

    def recorded(self, dataset: str = "case", kinds: Iterable[Kind] = FINAL_KINDS) -> int:
        """Return how many whole lines the files of these kinds have, without asking the product."""
        paths = [self.folder(dataset).lines(kind) for kind in kinds]
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def wait_recorded(self, count: int, dataset: str = "case", *, timeout_s: float = 60.0) -> None:
        """Wait until at least `count` samples are recorded; reads the files alone, so it is cheap."""
        wait_until(
            lambda: self.recorded(dataset) >= count,
            timeout_s,
            f"{count} recorded samples of {dataset}",
            detail=lambda: f"recorded: {self.recorded(dataset)}\n{self.tails()}",
        )

    def wait_idle(self, dataset: str = "case", timeout_s: float = 60.0) -> dict[str, int]:
        """Wait until nothing is queued or in flight, and return the counts.

        Redis is asked often, the product when it may be so: each `producer status` is a process to start.
        """
        latest: dict[str, int] = {}
        asked_at = time.monotonic()

        def idle() -> bool:
            nonlocal asked_at
            if self._has_prompts(dataset) and time.monotonic() < asked_at + _STATUS_EVERY_S:
                return False
            latest.update(self.counts(dataset))
            asked_at = time.monotonic()
            return latest["queued"] == 0 and latest["in_flight"] == 0

        wait_until(
            idle,
            timeout_s,
            f"dataset {dataset} without queued samples",
            poll_s=_IDLE_POLL_S,
            detail=lambda: f"counts: {latest}\n{self.tails()}",
        )
        return latest

    def _has_prompts(self, dataset: str) -> bool:
        """Whether Redis holds prompts of the dataset; no where it cannot be asked, so that the product is."""
        try:
            keys = Keys(self.env["MILL_KEY_PREFIX"])
            with contextlib.closing(redis.Redis.from_url(self.env["MILL_REDIS_URL"], socket_timeout=3)) as client:
                return bool(client.hlen(keys.prompts(dataset)))
        except (redis.RedisError, KeyError):
            return False

    def tails(self) -> str:
        """Return the end of every started process's output, for messages."""
        return "\n".join(process.tail() for process in self._processes)

    def close(self) -> None:
        """Kill every process that was started."""
        for process in self._processes:
            process.close()

    def _keep(self, process: ManagedProcess) -> ManagedProcess:
        self._processes.append(process)
        return process
