"""Shows snapshots as they change: live in a terminal, one plain line per dataset and interval anywhere else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from app.errors import EXIT_INTERRUPTED, EXIT_OK
from app.snapshot import Part, Snapshot, State
from app.surroundings import clock_time
from producer import status
from producer.pipes import silence

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LIVE_INTERVAL_S = 3.0
PLAIN_INTERVAL_S = 10.0
_TICK_S = 0.2
"""Seconds between two looks at the keyboard and at the terminal's size."""
_OVER = frozenset({State.DONE, State.EMPTY})

Take = Callable[[], Snapshot]


def monitor(
    take: Take,
    *,
    interval_s: float | None = None,
    until_done: bool = False,
    stream: TextIO | None = None,
    keys: TextIO | None = None,
) -> int:
    """Show snapshots until `q`, Ctrl-C, a closed pipe or, with `until_done`, until nothing is left to wait for.

    `take` may be slow: a terminal stays alive meanwhile and shows how old its numbers are. Without an interval it is
    3 s in a terminal and 10 s elsewhere. `keys` is where `q` is read (standard input in a terminal).
    Returns the exit code: 130 after Ctrl-C, with `until_done` that of `status`, else 0. Raises what `take` raises.
    """
    over = _Over(until_done)
    stream = stream or sys.stdout
    try:
        if stream.isatty() and (console := _console(stream)) is not None:
            return _show_live(take, interval_s or LIVE_INTERVAL_S, over, console, keys or sys.stdin)
        return _show_plain(take, interval_s or PLAIN_INTERVAL_S, over, stream)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence(stream)
        return EXIT_OK


class _Over:
    """Tells when there is nothing left to wait for."""

    def __init__(self, until_done: bool) -> None:
        self._until_done = until_done
        self._lost_before = False

    def __call__(self, snapshot: Snapshot) -> bool:
        # While enqueue writes, samples can look lost for a moment: that has to be seen twice.
        state = snapshot.totals.state
        lost, before = state is State.INCOMPLETE, self._lost_before
        self._lost_before = lost
        return self._until_done and (state in _OVER or (lost and before))


# Without a terminal


def _show_plain(take: Take, interval_s: float, over: _Over, stream: TextIO) -> int:
    _write(stream, f"Watching every {interval_s:g} s; Ctrl-C ends it.")
    notes = list[str]()
    while True:
        started = time.monotonic()
        snapshot = take()
        for line in plain_lines(snapshot):
            _write(stream, line)
        for note in snapshot.totals.notes:
            if note not in notes:
                _write(stream, f"{_clock(snapshot)} {status.printable(note)}")
        notes = snapshot.totals.notes
        if over(snapshot):
            code = status.exit_code(snapshot)
            _write(stream, f"Ended: {_progress(snapshot.totals)}, failed {snapshot.totals.counts.failed:,}.")
            return code
        time.sleep(max(0.0, interval_s - (time.monotonic() - started)))


def plain_lines(snapshot: Snapshot) -> Iterator[str]:
    """Yield one line per dataset that stands alone."""
    for name, part in snapshot.datasets.items():
        items = [
            f"{status.printable(name)} {part.state.value}: {_progress(part)}",
            f"{status.rate_words(part.rate.samples_per_s)} samples/s",
            f"{status.rate_words(part.rate.tokens_per_s)} tok/s",
            f"failed {part.counts.failed:,}",
            status.eta_words(part),
        ]
        missing = part.counts.missing
        if missing:
            items.append(f"missing {missing:,} (run producer enqueue again)")
        yield f"{_clock(snapshot)} {', '.join(filter(None, items))}"
    if not snapshot.datasets:
        yield f"{_clock(snapshot)} no dataset yet"


def _clock(snapshot: Snapshot) -> str:
    return clock_time(snapshot.at, now=snapshot.at)


def _progress(part: Part) -> str:
    counts = part.counts
    percent = "" if part.percent is None else f" ({part.percent:.1f} %)"
    return f"{counts.samples - counts.left:,}/{counts.samples:,}{percent}"


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()


# In a terminal


class _Taker:
    """Takes snapshots in a thread of its own, so that a slow Redis or disk never freezes the screen."""

    def __init__(self, take: Take, interval_s: float) -> None:
        self._take = take
        self._interval_s = interval_s
        self._ended = threading.Event()
        self.latest: Snapshot | None = None
        self.taken = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def look(self) -> Snapshot | None:
        """Return the newest snapshot; raise what taking one raised."""
        if self._error is not None:
            raise self._error
        return self.latest

    def end(self) -> None:
        """Take no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.latest = self._take()
            except Exception as error:  # noqa: BLE001 - raised again where the screen is
                self._error = error
                return
            self.taken += 1
            self._ended.wait(self._interval_s)


def _console(stream: TextIO) -> Console | None:
    """Return the terminal as a console; None for one that cannot move its cursor."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only terminals need it

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return None if console.is_dumb_terminal else console


def _show_live(take: Take, interval_s: float, over: _Over, console: Console, keys: TextIO) -> int:
    taker = _Taker(take, interval_s)
    try:
        with _stops_like_ctrl_c(), _single_keys(keys) as pressed:
            while (code := _show_until_resized(console, taker, over, pressed, interval_s)) is None:
                # What is on the screen was wrapped for another width: draw anew.
                console.clear()
    finally:
        taker.end()
    return code


def _show_until_resized(
    console: Console, taker: _Taker, over: _Over, pressed: Callable[[], str], interval_s: float
) -> int | None:
    from rich.live import Live  # noqa: PLC0415

    size, taken, drawn = console.size, -1, 0.0
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while console.size == size:
            snapshot = taker.look()
            if taker.taken != taken or time.monotonic() - drawn >= 1.0:
                fresh, taken, drawn = taker.taken != taken, taker.taken, time.monotonic()
                live.update(_screen(snapshot, size.width, size.height, interval_s), refresh=True)
                if fresh and snapshot is not None and over(snapshot):
                    return status.exit_code(snapshot)
            if pressed() in {"q", "Q"}:
                return EXIT_OK
    return None


def _screen(snapshot: Snapshot | None, width: int, height: int, interval_s: float) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if snapshot is None:
        return Text("Reading the numbers ...  (q ends)")
    age = max(0.0, time.time() - snapshot.at)
    old = f", {age:.0f} s old" if age > 2 * interval_s + 1 else ""
    title = Text(f"promptmill at {clock_time(snapshot.at, now=time.time())}{old}  (q ends)", style="bold", no_wrap=True)
    title.truncate(width)
    # A line stays free: a full screen would scroll with every refresh.
    body = status.render(snapshot, width=width - 1).renderables[: max(1, height - 2)]
    return Group(title, *body)


@contextlib.contextmanager
def _stops_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the view in order, so that the cursor comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _single_keys(keys: TextIO) -> Iterator[Callable[[], str]]:
    """Yield a function that waits a tick for one key; the terminal is as before afterwards."""
    if not keys.isatty():
        yield _no_key
        return
    import termios  # noqa: PLC0415 - a terminal alone has it
    import tty  # noqa: PLC0415

    descriptor = keys.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], _TICK_S)
        data = os.read(descriptor, 64) if ready else b""
        if ready and not data:
            raise KeyboardInterrupt  # the terminal is gone
        return data.decode("ascii", "replace")[:1]

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    time.sleep(_TICK_S)
    return ""
