"""Reads status and verify all through a chaos run, and checks that the books balance each time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.mill import Mill

_PAUSE_S = 2.0
_VERIFY_EVERY = 4
"""One reading of so many is a verify."""
_ANSWERS_WITHIN_S = 90.0


def status_problems(document: Mapping[str, Any]) -> list[str]:
    """Return what does not add up in a `status --json`."""
    views = {**document["datasets"], "totals": document["totals"]}
    return [f"status of {name}: {words}" for name, part in views.items() for words in _sums(part["counts"])]


def _sums(counts: Mapping[str, int | None]) -> list[str]:
    n = {name: value or 0 for name, value in counts.items()}
    wrong = []
    if n["read"] != n["refused"] + n["samples"]:
        wrong.append("read is not refused + samples")
    if n["samples"] != n["accepted"] + n["rejected"] + n["failed"] + n["left"]:
        wrong.append("samples is not accepted + rejected + failed + left")
    if counts["queued"] is not None and n["left"] != n["queued"] + n["in_flight"] + n["missing"]:
        wrong.append("left is not queued + in flight + missing")
    return [f"{words}: {dict(counts)}" for words in wrong]


def verify_problems(document: Mapping[str, Any]) -> list[str]:
    """Return what does not add up, or must never be, in a `verify --json`."""
    wrong = []
    for name, report in document.items():
        n = {what: value or 0 for what, value in report["counts"].items()}
        if n["read"] != n["refused"] + n["samples"]:
            wrong.append(f"verify of {name}: read is not refused + samples: {n}")
        if n["samples"] != n["accepted"] + n["rejected"] + n["failed"] + n["left"]:
            wrong.append(f"verify of {name}: samples is not the sum of its parts: {n}")
        if report["counts"]["queued"] is not None and n["left"] != n["queued"] + n["in_flight"] + n["missing"]:
            wrong.append(f"verify of {name}: left is not queued + in flight + missing: {n}")
        if report["duplicates"] or report["bad_lines"]:
            wrong.append(f"verify of {name}: {'; '.join(report['problems'])}")
    return wrong


class Watch:
    """A thread that runs `producer status --json` and `producer verify --json`, one after the other."""

    def __init__(self, mill: Mill, on_problem: Callable[[str], None]) -> None:
        self.readings = 0
        self._mill = mill
        self._on_problem = on_problem
        self._ended = threading.Event()
        self._samples: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def stop(self) -> None:
        """Read to the end of the present command and stop."""
        self._ended.set()
        self._thread.join(2 * _ANSWERS_WITHIN_S)

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            self.readings += 1
            command = "status" if self.readings % _VERIFY_EVERY else "verify"
            try:
                self._read(command)
            except Exception as error:  # noqa: BLE001  whatever it is, the run shall tell of it
                self._on_problem(f"{command} could not be read: {type(error).__name__}: {error}")

    def _read(self, command: str) -> None:
        done = self._mill.run(command, "--json", expect=None, timeout_s=_ANSWERS_WITHIN_S)
        if "Traceback" in done.stderr or done.code not in {0, 1}:
            self._on_problem(f"{command} ended with {done.code}: {done.stderr}")
            return
        if not done.stdout.strip():
            return  # one sentence on stderr: there is nothing to read yet
        document = done.json()
        problems = status_problems(document) if command == "status" else verify_problems(document)
        counts = {
            name: part["counts"] for name, part in (document["datasets"] if command == "status" else document).items()
        }
        for name, n in counts.items():
            if n["samples"] < self._samples.get(name, 0):
                problems.append(f"{command} of {name}: {n['samples']} samples, and {self._samples[name]} before")
            self._samples[name] = n["samples"]
        for problem in problems:
            self._on_problem(problem)
