"""A scratch place with a Redis, a simulated server and workers of its own, all of which are gone afterwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from app.errors import MillError, UsageError
from app.settings import ENV_PREFIX, child_environment
from producer import local_broker, ports, processes
from producer.guard import guarded
from producer.processes import Process

_START_S = 90.0
_REDIS_READY = "Ready to accept connections"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Place:
    """The folder and the processes of one rehearsal."""

    def __init__(self, folder: Path) -> None:
        self.prepared = folder / "prepared"
        self._folder = folder
        self._url = ""
        self._running: list[Process] = []

    def start_broker(self) -> str:
        """Start a Redis like that of `producer up` and return its URL. Raises BrokerError and MillError."""
        program, port, password = local_broker.find_program(), ports.free_port(), secrets.token_urlsafe(24)
        settings = local_broker.configure(self._folder / "redis", port=port, password=password)
        self._start("redis", [str(program), str(settings)], {}, ready=_REDIS_READY)
        self._url = local_broker.url_of(port, password)
        return self._url

    def enqueue(self, words: Sequence[str], settings: Mapping[str, str]) -> None:
        """Run `producer enqueue` with these words; an adapter of the user's own is found in the current folder.

        Raises UsageError with its own sentence where it refuses.
        """
        command = [sys.executable, "-P", "-m", "producer.start", "enqueue", *words]
        process = self._spawn("enqueue", command, settings, path=[Path.cwd()])
        code = _exit_code(process)
        self._running.remove(process)
        if code:
            raise UsageError(_sentence(processes.own_words(process)))

    def start(self, name: str, words: Sequence[str], settings: Mapping[str, str], *, ready: str) -> Process:
        """Start a Python program and wait until its output says `ready`. Raises MillError with its last words."""
        return self._start(name, [sys.executable, *words], settings, ready=ready)

    def check(self) -> None:
        """Raise MillError where a process has ended."""
        for process in self._running:
            if not processes.is_alive(process):
                raise MillError(f"The rehearsal's {process.name} ended: {processes.last_words(process)}.")

    def stop(self, process: Process, *, seconds: float) -> None:
        """End a process in order; one that is still there after that time is killed."""
        processes.stop([process], seconds=seconds, say=lambda _sentence: None)
        self._running.remove(process)

    def keep(self, folder: Path) -> None:
        """Put the records into a folder that is new or empty."""
        if folder.exists():
            folder.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.prepared, folder)

    def close(self) -> None:
        """Kill whatever runs here: nothing of it is needed any more."""
        for process in self._running:
            processes.signal_process(process, signal.SIGKILL)
        processes.wait_gone(self._running, seconds=10)
        self._running.clear()

    def _start(self, name: str, command: Sequence[str], settings: Mapping[str, str], *, ready: str) -> Process:
        process = self._spawn(name, command, settings)
        trouble = processes.wait_ready(process, lambda: ready in processes.own_words(process), seconds=_START_S)
        if trouble:
            raise MillError(f"The rehearsal's {name} did not start, {trouble}.")
        return process

    def _spawn(
        self, name: str, command: Sequence[str], settings: Mapping[str, str], *, path: Sequence[Path] = ()
    ) -> Process:
        line = guarded(command, self._folder)
        with processes.uninterrupted():
            log = self._folder / "logs" / f"{name}.log"
            process = processes.start(name, line, log=log, env=self._environment(settings, path))
            self._running.append(process)
        return process

    def _environment(self, settings: Mapping[str, str], path: Sequence[Path]) -> dict[str, str]:
        """Return what the processes see: none of the user's own settings, and what they may import."""
        inherited = {name: value for name, value in child_environment().items() if not name.startswith(ENV_PREFIX)}
        given = [Path(name) for name in inherited.pop("PYTHONPATH", "").split(os.pathsep) if name]
        places = [str(place.resolve()) for place in (*given, *path)]
        return {
            **inherited,
            **({"PYTHONPATH": os.pathsep.join(places)} if places else {}),
            **settings,
            "PYTHONUNBUFFERED": "1",
            "MILL_STATE_DIR": str(self._folder / "state"),
            **({"MILL_REDIS_URL": self._url} if self._url else {}),
            "MILL_PREPARED_DIR": str(self.prepared),
        }


@contextlib.contextmanager
def scratch() -> Iterator[Place]:
    """Make a place; its processes and files are gone at the end, however it comes."""
    with _signals_interrupt():
        try:
            folder = Path(tempfile.mkdtemp(prefix="promptmill-rehearsal-"))
        except OSError as error:
            raise MillError(f"The rehearsal has no temporary folder ({error}); set TMPDIR to one with room.") from error
        place = Place(folder)
        try:
            yield place
        finally:
            with processes.uninterrupted():
                place.close()
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and a terminal that goes away end the rehearsal as Ctrl-C does, and let none of them end that."""

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(process: Process) -> int:
    _pid, status = os.waitpid(process.pid, 0)
    return os.waitstatus_to_exitcode(status)


def _sentence(output: str) -> str:
    """Return what a command said at its end, without its name."""
    lines = [line for line in output.splitlines() if line.strip()]
    return (lines or ["producer enqueue ended without a word."])[-1].removeprefix("producer: ")
