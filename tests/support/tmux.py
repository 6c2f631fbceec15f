"""A real terminal for tests: a window of tmux that a program runs in, read as a person sees it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.support.processes import subprocess_env, wait_until


class Window:
    """A window of a tmux server of its own."""

    def __init__(self, command: Sequence[str], *, columns: int, lines: int, env: Mapping[str, str]) -> None:
        """Run the command in a window of that size; the window stays when it has ended."""
        self._server = f"mill-{uuid.uuid4().hex[:8]}"
        variables = [f"{name}={value}" for name, value in env.items()]
        words = shlex.join(["env", "-u", "COLUMNS", "-u", "LINES", "TERM=screen-256color", *variables, *command])
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), f"{words}; sleep 600")

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, *words], check=True, capture_output=True, text=True, env=subprocess_env()
        )
        return done.stdout

    def lines(self) -> list[str]:
        """Return what is on the screen, without the blank rest of each line."""
        return self._tmux("capture-pane", "-p").splitlines()

    def text(self) -> str:
        """Return the same as one text."""
        return "\n".join(self.lines())

    def scrolled_away(self) -> list[str]:
        """Return the lines that have left the screen at its top."""
        shown = len(self.lines())
        return self._tmux("capture-pane", "-p", "-S", "-").splitlines()[:-shown]

    def colours(self) -> str:
        """Return the screen with its escape sequences."""
        return self._tmux("capture-pane", "-p", "-e")

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def press(self, key: str) -> None:
        """Press a key."""
        self._tmux("send-keys", key)

    def wait_for(self, marker: str, timeout_s: float = 40.0) -> str:
        """Return the screen once the marker is on it."""
        wait_until(lambda: marker in self.text(), timeout_s, f"{marker!r} on the screen", detail=self.text)
        return self.text()

    def close(self) -> None:
        """End the program and the server."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")


@contextlib.contextmanager
def window(command: Sequence[str], *, columns: int, lines: int, env: Mapping[str, str]) -> Iterator[Window]:
    """Open a window for a while; the test is skipped where there is no tmux."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    opened = Window(command, columns=columns, lines=lines, env=env)
    try:
        yield opened
    finally:
        opened.close()
