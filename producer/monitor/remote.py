"""Pictures from another machine: `producer status --json --watch` there, over one ssh connection that is kept.

The command is a list of words from beginning to end. ssh itself joins the remote ones into a line for a shell, so each
is quoted; nothing else is ever put into a line. A connection that is slow or lost costs only newer numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import IO, cast

import msgspec

from app.errors import MillError, UsageError
from app.snapshot import SCHEMA_VERSION
from producer.monitor.picture import Picture
from producer.monitor.view import View

_WAIT_S = 1.0
"""Seconds after which a view is given again if nothing new has come."""
_PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Seconds before the first, second, ... try to connect again."""
_SILENCE_S = 20.0
"""Seconds beyond twice the interval after which a connection on which nothing comes is given up."""
_MOST_BYTES = 64 * 1024 * 1024
_KEPT_WORDS = 4000
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_SSH_FAILED, _NOT_FOUND, _NO_FOLDER, _WRONG_USAGE = 255, (126, 127), 125, 2


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and how `producer` is run."""

    host: str
    """As ssh takes it: HOST, USER@HOST or a name of ~/.ssh/config."""
    ssh: str = "ssh"
    """ssh with options of one's own, in a shell's spelling."""
    command: str = "producer"
    """How the program is called there, in a shell's spelling."""
    folder: str | None = None
    """The folder to run it in."""

    def arguments(self, *, interval_s: float, dataset: str | None) -> list[str]:
        """Return the words to run.

        Raises UsageError for a host that ssh would take for an option, and for a command that cannot be read.
        """
        if not self.host or self.host.startswith("-") or not self.host.isprintable() or " " in self.host:
            raise UsageError(f"--ssh cannot be used: {self.host!r} is not a host such as me@gpu1.")
        ssh, command = _words("--ssh-command", self.ssh), _words("--remote-command", self.command)
        there = [*(["env", "-C", self.folder] if self.folder else []), *command]
        there += ["status", "--json", "--watch", f"{interval_s:g}", *(["--", dataset] if dataset else [])]
        options = [word for option in _OPTIONS for word in ("-o", option)]
        return [*ssh, "-T", *options, "--", self.host, " ".join(map(shlex.quote, there))]


def _words(option: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} cannot be used: {error}.") from error
    if not words:
        raise UsageError(f"{option} cannot be used: it is empty.")
    return words


class RemoteFeed:
    """Views of another machine; a thread of its own keeps the connection."""

    def __init__(self, machine: Machine, *, interval_s: float, dataset: str | None = None) -> None:
        """Begin to connect.

        Raises UsageError.
        """
        self._machine = machine
        self._arguments = machine.arguments(interval_s=interval_s, dataset=dataset)
        self._silence_s = 2 * interval_s + _SILENCE_S
        self._news = threading.Condition()
        self._view = View(None, time.monotonic(), self._source)
        self._given: View | None = None
        self._lost_at: float | None = None
        self._why = ""
        self._error: MillError | None = None
        self._said = b""
        self._tries = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_connected, name="ssh", daemon=True)
        self._thread.start()

    @property
    def _source(self) -> str:
        return f"{self._machine.host} over ssh"

    def take(self) -> View:
        """Return the newest view, a second after the last one at the latest.

        Raises MillError when there will be none: no such command there, another version, a host that refuses.
        """
        with self._news:
            self._news.wait_for(lambda: self._view is not self._given or self._error is not None, _WAIT_S)
            if self._error is not None:
                raise self._error
            self._given = self._view
            if self._lost_at is None:
                return self._view
            lost_s = time.monotonic() - self._lost_at
            why = f" ({self._why})" if self._why else ""
            trouble = f"The link to {self._machine.host} was lost {lost_s:.0f} s ago{why}; trying again."
            return dataclasses.replace(self._view, trouble=trouble)

    def close(self) -> None:
        """End the connection."""
        self._ended.set()
        self._thread.join(_WAIT_S)

    # In the thread

    def _keep_connected(self) -> None:
        while not self._ended.is_set():
            self._said = b""
            try:
                with self._connection() as process:
                    hung = self._listen(process)
                    # One that is listened to no longer would wait for ever for somebody to take what it writes.
                    code = None if hung or self._ended.is_set() else process.wait()
            except OSError as error:
                self._fail(f"{self._arguments[0]} could not be started: {error.strerror or error}.")
                return
            if self._ended.is_set() or (code is not None and self._is_hopeless(code)):
                return
            with self._news:
                if self._lost_at is None:
                    self._lost_at = time.monotonic()
                self._why = "nothing came" if hung else self._last_words() or f"it ended with {code}"
            self._ended.wait(_PAUSES_S[min(self._tries, len(_PAUSES_S) - 1)])
            self._tries += 1

    @contextlib.contextmanager
    def _connection(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours, and the screen is no place for ssh's questions
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _listen(self, process: subprocess.Popen[bytes]) -> bool:
        """Take in what comes until the connection ends; return whether it was given up because nothing came."""
        out, err = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stderr)
        heard, rest = time.monotonic(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ, "out")
            selector.register(err, selectors.EVENT_READ, "err")
            while selector.get_map() and not self._ended.is_set():
                if time.monotonic() - heard > self._silence_s or len(rest) > _MOST_BYTES:
                    return True
                for key, _events in selector.select(0.2):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.data == "err":
                        self._said = (self._said + data)[-_KEPT_WORDS:]
                    else:
                        heard = time.monotonic()
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            self._receive(line)
        return False

    def _receive(self, line: bytes) -> None:
        if not line.startswith(b"{"):  # a greeting of the shell there
            self._said = (self._said + line + b"\n")[-_KEPT_WORDS:]
            return
        try:
            picture = decode(line, self._machine.host)
        except MillError as error:
            with self._news:
                self._error = error
                self._news.notify_all()
            self._ended.set()
            return
        with self._news:
            self._view = View(picture, time.monotonic(), self._source)
            self._lost_at, self._tries = None, 0
            self._news.notify_all()

    def _is_hopeless(self, code: int) -> bool:
        """Note why no picture will ever come, if that is so."""
        host, words = self._machine.host, self._last_words()
        if code in _NOT_FOUND:
            why = (
                f"{host} does not run {self._machine.command!r} ({words}); say with --remote-command how it is called."
            )
        elif code == _WRONG_USAGE and "--watch" in words:
            why = f"promptmill on {host} is older than this one and knows no status --watch; install the same version."
        elif code in {_NO_FOLDER, _WRONG_USAGE}:
            why = f"{host} says: {words}"
        elif code == _SSH_FAILED and self._view.picture is None:
            why = f"{host} could not be reached by ssh: {words or 'it says nothing'}."
        else:
            return False
        self._fail(why)
        return True

    def _fail(self, why: str) -> None:
        with self._news:
            self._error = MillError(why)
            self._news.notify_all()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._said.decode("utf-8", "replace").splitlines() if line.strip()]
        telling = [line for line in lines if "option" in line.lower() or "error" in line.lower()]
        words = (telling or lines or [""])[-1]
        return "".join(char if char.isprintable() else "?" for char in words)[:200].rstrip(".")


class _Form(msgspec.Struct):
    schema: int


def decode(line: bytes, host: str) -> Picture:
    """Return the picture of a line.

    Raises MillError for one in another form than this version's, saying which side is older.
    """
    try:
        theirs = msgspec.json.decode(line, type=_Form).schema
        if theirs != SCHEMA_VERSION:
            older = f"promptmill on {host}" if theirs < SCHEMA_VERSION else "this promptmill"
            raise MillError(
                f"{host} tells its numbers in form {theirs}, this promptmill reads form {SCHEMA_VERSION}: {older} is "
                "older; install the same version on both."
            )
        return msgspec.json.decode(line, type=Picture)
    except msgspec.DecodeError as error:
        raise MillError(f"What {host} tells are no numbers of promptmill ({error}).") from error
