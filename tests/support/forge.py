"""Starts the product's processes out of one that has loaded other people's packages: loading costs more than most do.

What is forked is a process like any other, with a group, environment, folder and standard streams of its own, and the
product's own modules are loaded in it. Only programs that could not tell the difference are started in this way.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forge_server import MOST_BYTES

_SERVER = str(Path(__file__).with_name("forge_server.py"))
_MODULES = (
    *("celery.bin.celery", "celery.apps.worker", "celery.concurrency.thread", "celery.loaders.app"),
    *("celery.worker.components", "celery.worker.autoscale", "kombu.transport.redis", "redis", "msgspec"),
    *("pydantic_settings", "aiohttp", "openai.resources.chat", "openai.types.chat", "rich.console"),
    *("typer", "sqlite3", "prometheus_client"),
)
"""Packages that take no notice of the environment while they are loaded."""
_READ_AT_FIRST = ("PYTHON", "LANG", "LC_", "LD_")
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Forged:
    """A forked process, with the part of subprocess.Popen's interface that tests use; for one thread at a time."""

    def __init__(self, pid: int, status: int) -> None:
        """Take the process and the descriptor that tells its wait status."""
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the return code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its return code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            said = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(int(said)) if said else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Forge:
    """The process that forks; it ends when this one does."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it in an environment; of that, only what an interpreter reads as it begins concerns its programs."""
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, _SERVER, str(theirs.fileno()), *_MODULES],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._orders.close()
        self._process.wait()

    def can(self, environment: Mapping[str, str]) -> bool:
        """Tell whether an interpreter would begin alike in that environment."""
        return _read_at_first(environment) == _read_at_first(self._environment)

    def start(self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: int, errors: int) -> Forged:
        """Start `python ARGUMENTS` (`-c` or `-m`) in that environment, with these standard streams."""
        limits = [(limit, resource.getrlimit(limit)) for limit in _LIMITS]
        document = {"command": [*arguments], "cwd": str(cwd), "env": dict(env), "limits": limits}
        order = json.dumps(document).encode()
        assert len(order) <= MOST_BYTES
        status, told = os.pipe()
        with open(os.devnull, "rb") as nothing, self._lock:  # noqa: PTH123  a descriptor
            try:
                socket.send_fds(self._orders, [order], [nothing.fileno(), output, errors, told])
            finally:
                os.close(told)
            return Forged(int(self._orders.recv(64)), status)


def _read_at_first(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_FIRST)}
