"""Has the workers' floor look at the model servers, in a process of its own, while this one does something else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

import msgspec

from app import settings
from app.errors import MillError
from app.preflight import Job, Report
from producer.guard import guarded

_MODULE = "workers.preflight"
_SHOWN = 300


class LookFailedError(MillError):
    """The look itself did not come to an end; nothing is known of the servers."""


class Look:
    """A look under way; used as a context manager, so that it never outlives the command."""

    def __init__(self, job: Job) -> None:
        """Start it with this process's settings; where that fails, `report` says why."""
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble: OSError | None = None
        try:
            with tempfile.TemporaryFile() as file:
                file.write(msgspec.json.encode(job))
                file.seek(0)
                self._process = subprocess.Popen(
                    guarded([sys.executable, "-P", "-m", _MODULE], Path.cwd()),
                    stdin=file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=settings.child_environment(),
                )
        except OSError as error:
            self._trouble = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def report(self, *, timeout_s: float) -> Report:
        """Wait for what was seen. Raises LookFailedError."""
        if self._process is None:
            raise LookFailedError(f"the model servers could not be looked at ({self._trouble})") from self._trouble
        try:
            said, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LookFailedError(f"the look at the model servers took more than {timeout_s:g} s") from error
        if self._process.returncode:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            last = lines[-1][:_SHOWN] if lines else f"it ended with {self._process.returncode}"
            raise LookFailedError(f"the model servers could not be looked at ({last.rstrip('.')})")
        try:
            return msgspec.json.decode(said, type=Report)
        except msgspec.DecodeError as error:
            raise LookFailedError("the look at the model servers brought no report") from error
