"""Shows what the background services wrote to their logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from app.errors import UsageError
from app.places import StateDir
from producer import processes


def log_files(state: StateDir, name: str | None = None) -> dict[str, Path]:
    """Return the logs by service name: all, or those whose name begins with `name`.

    Raises UsageError when there is none.
    """
    logs = {path.stem: path for path in sorted(state.logs.glob("*.log"))}
    chosen = {stem: path for stem, path in logs.items() if name is None or stem.startswith(name)}
    if not logs:
        raise UsageError(f"There are no logs in {state.logs}: nothing was started here; `producer up` does it.")
    if not chosen:
        raise UsageError(f"No service here is called {name!r}; there are logs of {', '.join(logs)}.")
    return chosen


def logs(
    state: StateDir, name: str | None = None, *, follow: bool = False, lines: int = 20
) -> Iterator[tuple[str, str]]:
    """Yield (service, line): the last lines of each log, then, if asked to, each new line for ever.

    Raises UsageError when no log fits the name.
    """
    files = log_files(state, name)
    for service, path in files.items():
        for line in processes.tail(path, lines):
            yield service, line
    if follow:
        yield from processes.follow(files)
