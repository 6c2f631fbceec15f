"""True subprocesses for tests: workers, producers and servers that die with the tests and can be killed for real."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from app.settings import ENV_PREFIX, child_environment
from tests.support.forge import Forge, Forged

PROJECT_ROOT = Path(__file__).resolve().parents[2]
WORKER_READY = "ready."
"""Ends the line that Celery logs once a worker consumes."""

_WRAPPER = str(Path(__file__).with_name("die_with_parent.py"))
PRODUCER = "import sys; from producer.cli import main; sys.argv[0] = 'producer'; sys.exit(main())"
_FORGED = [["-m", "celery"], ["-m", "tests.support.kill_points"], ["-c", PRODUCER]]
_POLL_S = 0.05
_TAIL_CHARS = 4000
_KILL_WAIT_S = 20.0

_Value = TypeVar("_Value")


def wait_until(
    predicate: Callable[[], _Value],
    timeout_s: float = 30.0,
    what: str = "the condition",
    *,
    poll_s: float = _POLL_S,
    detail: Callable[[], object] | None = None,
) -> _Value:
    """Return the predicate's first true value.

    Raises AssertionError with `what`, the last value and `detail()` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            more = f"\n{detail()}" if detail else ""
            raise AssertionError(f"{what} did not come true within {timeout_s:g} s; the last value was {value!r}{more}")
        time.sleep(poll_s)


def subprocess_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without what is its own, importing from the checkout, plus `env`.

    What a process compiles is kept for the next, hundreds of which are started.
    """
    left_out = (ENV_PREFIX, "FLOWER_CONF", "PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST")
    inherited = {name: value for name, value in child_environment().items() if not name.startswith(left_out)}
    return {**inherited, "PYTHONPATH": str(PROJECT_ROOT), "PYTHONUNBUFFERED": "1", **(env or {})}


def _start(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None, output: int, errors: int
) -> subprocess.Popen[bytes] | Forged:
    """Start a command with `subprocess_env(env)`, in a group of its own."""
    program, *arguments = command
    whole = subprocess_env(env)
    forged = sys.platform == "linux" and program == sys.executable and arguments[:2] in _FORGED
    if forged and _forge().can(whole):
        return _forge().start(arguments, cwd=cwd, env=whole, output=output, errors=errors)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=cwd,
        env=whole,
        start_new_session=True,
    )


@functools.cache
def _forge() -> Forge:
    return Forge(_COMMON)


_COMMON = subprocess_env()


class ManagedProcess:
    """A process in a group of its own that writes to a file and is killed when its starter dies.

    Start it from a thread that lives as long as it: Linux watches the starting thread, not the whole process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_dir: Path,
        name: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start the command with `subprocess_env(env)` in `cwd` (the log folder unless given)."""
        self.name = name
        log_dir.mkdir(parents=True, exist_ok=True)
        self.output_path = _unused(log_dir, name)
        with self.output_path.open("wb") as output:
            self._process = _start(command, cwd=cwd or log_dir, env=env, output=output.fileno(), errors=output.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id, which is the group's id too."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The return code, negative for a signal; None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Return all that it has written so far, stdout and stderr together."""
        return self.output_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_output(self, marker: str, timeout_s: float = 30.0) -> str:
        """Return the first line with `marker`; raises AssertionError when it ends or the time is up before."""

        def line() -> str | None:
            ended = not self.running
            found = next((one for one in self.output().splitlines() if marker in one), None)
            if found is None and ended:
                raise AssertionError(f"{self.name} ended with {self.returncode} before {marker!r}:\n{self.tail()}")
            return found

        found = wait_until(line, timeout_s, f"{marker!r} in the output of {self.name}", detail=self.tail)
        assert found is not None
        return found

    def tail(self) -> str:
        """Return the end of the output, for messages."""
        return f"--- {self.name} (pid {self.pid}), end of output ---\n{self.output()[-_TAIL_CHARS:]}"

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return its return code; raises AssertionError when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s\n{self.tail()}") from None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its group."""
        self._process.send_signal(number)

    def send_group_signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        os.killpg(self.pid, number)

    def stop(self, timeout_s: float = 40.0) -> int:
        """Ask it to end with SIGTERM and return its return code."""
        if self.running:
            self.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """Kill the whole group with SIGKILL and assert that this, and nothing else, ended it."""
        assert self.running, f"{self.name} had already ended with {self.returncode}\n{self.tail()}"
        self.send_group_signal(signal.SIGKILL)
        code = self.wait(_KILL_WAIT_S)
        assert code == -signal.SIGKILL, f"{self.name} ended with {code}, not by SIGKILL\n{self.tail()}"

    def pause(self) -> None:
        """Freeze the whole group (SIGSTOP): its sockets stay open and nobody answers."""
        self.send_group_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused group go on."""
        self.send_group_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill whatever of the group is left; safe to call on an ended process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.send_group_signal(signal.SIGKILL)
        self.wait(_KILL_WAIT_S)


def _unused(folder: Path, name: str) -> Path:
    """Return a path for a log, a new one for each process of the same name."""
    number = len(list(folder.glob(f"{name}.*.log"))) + 1
    return folder / f"{name}.{number}.log"


class WorkerProcess(ManagedProcess):
    """A true Celery worker: `celery -A app worker -c CONCURRENCY -n NAME@%h`."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        log_dir: Path,
        concurrency: int = 4,
        drain_s: float | None = None,
        extra_env: Mapping[str, str] | None = None,
        name: str = "worker1",
        arguments: Sequence[str] = (),
    ) -> None:
        """Start the worker; `drain_s` sets MILL_DRAIN_S, `arguments` go to Celery."""
        drain = {} if drain_s is None else {"MILL_DRAIN_S": f"{drain_s:g}"}
        command = [sys.executable, "-m", "celery", "-A", "app", "worker", "-c", str(concurrency), "-n", f"{name}@%h"]
        super().__init__(
            [*command, *arguments],
            log_dir=log_dir,
            name=name,
            env={**env, **drain, **(extra_env or {})},
        )

    def wait_ready(self, timeout_s: float = 40.0) -> Self:
        """Wait until it consumes."""
        self.wait_for_output(WORKER_READY, timeout_s)
        return self


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Return the standard output as parsed JSON."""
        return json.loads(self.stdout)


def start_producer(
    *arguments: str,
    env: Mapping[str, str],
    log_dir: Path,
    name: str = "producer",
) -> ManagedProcess:
    """Start `producer ARGUMENTS` in the background."""
    return ManagedProcess([sys.executable, "-c", PRODUCER, *arguments], log_dir=log_dir, name=name, env=env)


def run_producer(
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path,
    timeout_s: float = 60.0,
) -> Finished:
    """Run `producer ARGUMENTS` to its end; raises AssertionError with its output when it takes too long."""
    return run_command([sys.executable, "-c", PRODUCER, *arguments], env=env, cwd=cwd, timeout_s=timeout_s)


def run_command(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout_s: float = 60.0) -> Finished:
    """Run a command to its end with `subprocess_env(env)`; whatever it left behind in its group is killed."""
    streams = [os.pipe(), os.pipe()]
    try:
        process = _start(command, cwd=cwd, env=env, output=streams[0][1], errors=streams[1][1])
    finally:
        for _read, write in streams:
            os.close(write)
    said = {read: bytearray() for read, _write in streams}
    deadline = time.monotonic() + timeout_s
    ended = _read_to_the_end(said, deadline)
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()) if ended else 0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILL_WAIT_S)
        told = "\n".join(f"{bytes(text[-_TAIL_CHARS:])!r}" for text in said.values())
        raise AssertionError(f"{list(command)} still ran after {timeout_s:g} s\n{told}") from None
    finally:
        for read in said:
            os.close(read)
    out, err = (text.decode(errors="replace") for text in said.values())
    return Finished(code, out, err)


def _read_to_the_end(streams: Mapping[int, bytearray], deadline: float) -> bool:
    """Read descriptors until all have ended; tell whether they did in time."""
    with selectors.DefaultSelector() as selector:
        for descriptor in streams:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for key, _events in ready:
                piece = os.read(key.fd, 65536)
                streams[key.fd].extend(piece)
                if not piece:
                    selector.unregister(key.fd)
    return True
