"""Run a command that the kernel kills when the process that started it is gone: `die_with_parent.py PID COMMAND...`.

It replaces itself by the command, so process id and return code are the command's own. A `preexec_fn` would do the
same inside the forked copy of a process with threads, where it can deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the death signal, then become the command; a parent that died meanwhile ends it at once."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    main()
