"""Processes whose clock is wrong, and can be set while they run."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.processes import PROJECT_ROOT

_CUSTOMIZE = """
import os, time

_true, _file = time.time, os.environ["WRONG_CLOCK"]

def _wrong():
    with open(_file) as file:
        return _true() + float(file.read())

time.time = _wrong
"""


class WrongClock:
    """What `time.time()` says in the processes that are started with `env`: so many seconds more than is true."""

    def __init__(self, folder: Path, *, ahead_s: float = 0.0) -> None:
        """Write what Python loads by itself when it starts into a folder of its own."""
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_CUSTOMIZE, encoding="utf-8")
        self._file = folder / "ahead"
        self.set(ahead_s)
        self.env = {"PYTHONPATH": f"{folder}{os.pathsep}{PROJECT_ROOT}", "WRONG_CLOCK": str(self._file)}

    def set(self, ahead_s: float) -> None:
        """Set the clock of all processes that have it."""
        beside = self._file.with_suffix(".new")
        beside.write_text(str(ahead_s), encoding="utf-8")
        beside.replace(self._file)
