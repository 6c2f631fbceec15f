"""Starts, recognises, stops and reads background processes that outlive the command that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from producer import log_rotation

POLL_S = 0.05
_TAIL_BYTES = 64 * 1024
_OUR_WORDS = "promptmill: "
"""How the sentence begins with which a program of ours ends, in whatever company of warnings."""
_ERROR_WORDS = ("error", "critical", "refused", "cannot", "unrecoverable", "not found", "no such", "denied", "fatal")


class Process(msgspec.Struct, frozen=True):
    """A background process, told apart from any later one that has its pid."""

    name: str
    """How people call it: mill1, flower, redis."""
    pid: int
    started: str
    """Names the moment at which the process began, as the system counts it."""
    log: str
    """The absolute path of its log."""
    offset: int = 0
    """The byte of the log at which its own words begin."""
    draining: bool = False
    """It was told to end and finishes its running requests."""


def start(name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> Process:
    """Start `command` in a session of its own, its output appended to `log`.

    Raises OSError when the program cannot be run or the log cannot be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log_rotation.set_aside_if_full(log)
    offset = log_size(log)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        pid = os.posix_spawn(
            command[0],
            list(command),
            dict(env),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
            # A shell's background jobs ignore these two, and Python ignores the third; a service must not inherit that.
            setsigdef=[signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE],
            setsigmask=[],
        )
    finally:
        os.close(output)
    return Process(name=name, pid=pid, started=_began(pid) or "ended", log=str(log.resolve()), offset=offset)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back, so that no process is started and then not written down."""
    held_back = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_alive(process: Process) -> bool:
    """Say whether this very process still runs; a later process with its pid does not count, nor does a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)  # a child of ours would stay a zombie for as long as we run
    return _began(process.pid) == process.started


def signal_process(process: Process, number: signal.Signals) -> bool:
    """Send a signal, to this very process only; return whether it was there."""
    if not is_alive(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def wait_ready(process: Process, is_ready: Callable[[], bool], *, seconds: float) -> str | None:
    """Wait until the process is ready; return None then, else one clause that says what happened instead."""
    deadline = time.monotonic() + seconds
    while not is_ready():
        if not is_alive(process):
            return f"it ended: {last_words(process)}"
        if time.monotonic() >= deadline:
            return f"it was not ready after {seconds:.0f} s: {last_words(process)}"
        time.sleep(POLL_S)
    return None


def own_words(process: Process) -> str:
    """Return what the process has written to its log."""
    return read_from(Path(process.log), process.offset)


def wait_gone(processes: Sequence[Process], *, seconds: float) -> tuple[Process, ...]:
    """Wait until all have ended; return those that still run when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        left = tuple(process for process in processes if is_alive(process))
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)


def stop(processes: Sequence[Process], *, seconds: float, say: Callable[[str], None]) -> None:
    """Ask all to end with SIGTERM, and end those with SIGKILL that are still there after `seconds`."""
    for process in processes:
        signal_process(process, signal.SIGTERM)
    for process in wait_gone(processes, seconds=seconds):
        say(f"{process.name} (pid {process.pid}) did not end within {seconds:.0f} s and was killed.")
        signal_process(process, signal.SIGKILL)
    wait_gone(processes, seconds=10)


def log_size(path: Path) -> int:
    """Return the log's size in bytes; 0 when there is none."""
    return path.stat().st_size if path.exists() else 0


def read_from(path: Path, offset: int) -> str:
    """Return the log's text from a byte offset on; all of a log that has begun anew since."""
    offset = offset if offset <= log_size(path) else 0
    return _bytes_from(path, offset).decode("utf-8", "replace")


def last_words(process: Process) -> str:
    """Return the log line that best says why a process ended.

    That is promptmill's own sentence, else the last line that tells of an error, else the last; without a full stop.
    """
    path = Path(process.log)
    text = read_from(path, max(process.offset, log_size(path) - _TAIL_BYTES))
    if not text.strip():  # the log may just have been set aside
        aside = path.with_name(f"{path.name}.1")
        text = read_from(aside, max(0, log_size(aside) - _TAIL_BYTES)) if log_size(path) < process.offset else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix(_OUR_WORDS) for line in lines if line.startswith(_OUR_WORDS)]
    telling = [line for line in lines if any(word in line.lower() for word in _ERROR_WORDS)]
    return (own or telling or lines or ["it wrote nothing to its log"])[-1][:500].removesuffix(".")


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of a log."""
    text = read_from(path, max(0, log_size(path) - _TAIL_BYTES))
    return text.splitlines()[-lines:] if lines else []


def _bytes_from(path: Path, offset: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read()


def _began(pid: int) -> str | None:
    """Return what names the start of a living process, else None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    state, ticks = fields[0], fields[19]
    return None if state in {"Z", "X"} else f"{boot}:{ticks}"
