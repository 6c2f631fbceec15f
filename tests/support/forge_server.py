"""Forks a program for each order that comes over the socket FD: `forge_server.py FD MODULE...` (see `forge`).

It loads the modules first and has one thread only, so that a fork is a whole process. Orders are JSON; with each come
the descriptors of standard input, output and error, and one for the wait status. The end of the socket ends it, and its
programs with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import time
import types
from typing import Any

MOST_BYTES = 131_072
"""Of one order."""
_PR_SET_PDEATHSIG = 1


class _Server:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._statuses: dict[int, int] = {}
        """The descriptor for the wait status, by process."""

    def serve(self) -> dict[str, Any]:
        """Fork until the socket ends; returns in the forked processes alone, with their order."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        with selectors.DefaultSelector() as selector:
            selector.register(self._orders, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _events in selector.select():
                    if key.fileobj is not self._orders:
                        self._reap()
                    elif order := self._take():
                        return order

    def _take(self) -> dict[str, Any] | None:
        data, descriptors, _flags, _address = socket.recv_fds(self._orders, MOST_BYTES, 4)
        if not data:
            os._exit(0)
        forge = os.getpid()
        pid = os.fork()
        if not pid:
            self._become(descriptors, forge)
            return json.loads(data)
        self._statuses[pid] = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        self._orders.send(str(pid).encode())
        return None

    def _reap(self) -> None:
        os.read(self._wake, 4096)
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self._statuses.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, str(status).encode())
            os.close(descriptor)

    def _become(self, descriptors: list[int], forge: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != forge:
            os._exit(1)
        for target, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, target)
        self._orders.detach()
        os.closerange(3, 1024)


def _run(order: dict[str, Any]) -> None:
    """Be `python -c CODE ARGUMENTS` or `python -m MODULE ARGUMENTS`."""
    for limit, values in order["limits"]:
        if resource.getrlimit(limit) != tuple(values):
            resource.setrlimit(limit, values)
    os.chdir(order["cwd"])
    os.environ.clear()  # noqa: TID251  a program finds its settings there
    os.environ.update(order["env"])  # noqa: TID251  same
    time.tzset()
    kind, what, *arguments = order["command"]
    if kind == "-m":
        sys.path.insert(0, order["cwd"])
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, "")
    sys.argv = ["-c", *arguments]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(what, "<string>", "exec"), vars(main))  # noqa: S102  the tests' own


def main() -> None:
    """Load, serve, and in a forked process run."""
    del sys.path[0]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    _run(_Server(socket.socket(fileno=int(sys.argv[1]))).serve())


if __name__ == "__main__":
    main()
