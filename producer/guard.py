"""Runs a command in a folder, and has the kernel end it when whoever asked dies: `guard.py PID FOLDER COMMAND...`.

It replaces itself by the command, so that process id and exit code are the command's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str], folder: Path) -> list[str]:
    """Return the command line that runs a command in a folder and ends with this process, even when that is killed."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder), *command]


def main() -> None:
    """Ask for the signal, then become the command; an asker that died meanwhile ends it at once."""
    asker, folder, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(asker):
        sys.exit(1)
    os.chdir(folder)
    os.execv(command[0], command)  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main()
