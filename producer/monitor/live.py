"""The view in a terminal, drawn anew as numbers come in and as the window changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from app.errors import EXIT_OK
from producer import status
from producer.monitor.over import Over
from producer.monitor.screen import Frame, draw
from producer.monitor.terminal import single_keys, stops_like_ctrl_c
from producer.monitor.view import Feed, View

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_REDRAW_S = 1.0
"""Seconds after which the same view is drawn again, for it grows older."""


def open_console(stream: TextIO) -> Console | None:
    """Return the terminal as a console; None for one that cannot move its cursor."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only terminals need it

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return None if console.is_dumb_terminal else console


class _Taker:
    """Takes views in a thread of its own, so that a slow Redis, disk or link never freezes the screen."""

    def __init__(self, feed: Feed, interval_s: float) -> None:
        self._feed = feed
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._latest = View(None, time.monotonic())
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def look(self) -> View:
        """Return the newest view; raise what taking one raised."""
        if self._error is not None:
            raise self._error
        return self._latest

    def end(self) -> None:
        """Take no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._latest = self._feed.take()
            except Exception as error:  # noqa: BLE001 - raised again where the screen is
                self._error = error
                return
            self._ended.wait(self._interval_s)


def show(feed: Feed, over: Over, console: Console, keys: TextIO, *, interval_s: float, pause_s: float) -> int:
    """Show views until `q` or until the work is over; return the exit code."""
    taker = _Taker(feed, pause_s)
    try:
        with stops_like_ctrl_c(), single_keys(keys) as pressed:
            while (code := _show_until_resized(console, taker, over, pressed, interval_s)) is None:
                # What is on the screen was wrapped for another width: draw anew.
                console.clear()
    finally:
        taker.end()
    return code


def _show_until_resized(
    console: Console, taker: _Taker, over: Over, pressed: Callable[[], str], interval_s: float
) -> int | None:
    from rich.live import Live  # noqa: PLC0415

    size, shown, drawn = console.size, None, 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while console.size == size:
            view = taker.look()
            if view is not shown or time.monotonic() - drawn >= _REDRAW_S:
                shown, drawn = view, time.monotonic()
                live.update(_rendered(view, console, interval_s), refresh=True)
                if view.picture is not None and over(view.picture):
                    return status.exit_code(view.picture)
            if pressed() in {"q", "Q"}:
                return EXIT_OK
    return None


def _rendered(view: View, console: Console, interval_s: float) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    unicode = (console.encoding or "").lower().startswith("utf")
    # A line and a column stay free: a full screen would scroll with every refresh.
    frame = Frame(console.size.width - 1, console.size.height - 1, interval_s, unicode=unicode)
    lines = [
        Text.assemble(*((span.text, span.style) for span in line.spans), no_wrap=True, overflow="crop")
        for line in draw(view, frame)
    ]
    return Group(*lines)
