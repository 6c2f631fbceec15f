"""The monitor: plain lines that stand alone, a live view that leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.snapshot import BrokerState, Counts, Eta, Part, Rate, Rates, State
from producer.monitor.picture import Picture
from producer.monitor.plain import plain_lines
from producer.monitor.run import monitor
from producer.monitor.view import View

ROOT = Path(__file__).parents[3]
RATES = Rates(now=Rate(samples_per_s=10.0, tokens_per_s=5310.4, rejected_per_s=0.0, failed_per_s=0.0, window_s=60.0))


def part(done: int, *, total: int = 1000, state: State = State.RUNNING, missing: int = 0) -> Part:
    """Return the numbers of a dataset with four failed samples."""
    left = total - done
    counts = Counts(
        read=total, samples=total, accepted=done - 4, failed=4, left=left, queued=left - missing, missing=missing
    )
    eta = Eta(reason="paused")
    if state is State.RUNNING:
        eta = Eta(seconds=left / 10, low_s=left / 11, high_s=left / 8, at=time.time() + left / 10)
    return Part(state=state, counts=counts, percent=100 * done / total, rates=RATES, eta=eta)


def view(one: Part, *, notes: list[str] | None = None, age_s: float = 0.0, trouble: str | None = None) -> View:
    """Return a view of one dataset."""
    totals = Part(state=one.state, counts=one.counts, rates=one.rates, percent=one.percent, notes=notes or [])
    broker = BrokerState(reachable=True, url="redis://h:1/0")
    picture = Picture(at=time.time(), broker=broker, totals=totals, datasets={"math": one})
    return View(picture, time.monotonic() - age_s, trouble=trouble)


class Series:
    """A feed that gives views of these parts in turn."""

    def __init__(self, *parts: Part, notes: list[str] | None = None) -> None:
        self._left = iter(parts)
        self._notes = notes
        self.closed = False

    def take(self) -> View:
        """Return the next."""
        return view(next(self._left), notes=self._notes)

    def close(self) -> None:
        """Note it."""
        self.closed = True


def test_a_plain_line_stands_alone() -> None:
    """Each line has time, name, state, done/total, percent, rates, failures and ETA."""
    (line,) = plain_lines(view(part(452)), interval_s=10)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d math running: 452/1,000 \(45\.2 %\), 10 samples/s, 5,310 tok/s, failed 4, "
        r"ETA 0:00:55 \(0:00:50 to 0:01:09\)",
        line,
    )


def test_a_plain_line_says_how_old_it_is() -> None:
    """Numbers that nothing newer has come for say so, and what is wrong has a line of its own."""
    trouble, line = plain_lines(view(part(452), age_s=95, trouble="The link to gpu1 was lost."), interval_s=10)
    assert trouble.endswith(" The link to gpu1 was lost.")
    assert line.endswith("(0:00:50 to 0:01:09), 95 s old")
    (waiting,) = plain_lines(View(None, time.monotonic() - 7, "gpu1 over ssh"), interval_s=10)
    assert waiting.endswith(" waiting for gpu1 over ssh for 7 s")


def test_until_done_ends_with_a_last_line() -> None:
    """Without a terminal there is a first line, one per interval, and a last one with status' exit code."""
    out = io.StringIO()
    feed = Series(part(500), part(1000, state=State.DONE))
    code = monitor(feed, interval_s=0.01, until_done=True, stream=out)
    assert feed.closed
    lines = out.getvalue().splitlines()
    assert code == 1
    assert len(lines) == 4
    assert lines[0].startswith("Watching every 0.01 s")
    assert lines[-1] == "Ended: 1,000/1,000 (100.0 %), failed 4."
    assert not set(out.getvalue()) & {"\x1b", "\r"}


def test_a_note_is_told_once() -> None:
    """A sentence that stays true is not repeated with every interval."""
    out = io.StringIO()
    feed = Series(part(5), part(6), part(1000, state=State.DONE), notes=["Redis is slow."])
    monitor(feed, interval_s=0.01, until_done=True, stream=out)
    assert out.getvalue().count("Redis is slow.") == 1


def test_lost_samples_must_be_seen_twice() -> None:
    """A moment in which enqueue has written an id down and not queued it yet does not end the view."""
    out = io.StringIO()
    lost = part(500, state=State.INCOMPLETE, missing=500)
    monitor(Series(lost, part(600), lost, lost), interval_s=0.01, until_done=True, stream=out)
    assert len(out.getvalue().splitlines()) == 6
    assert "missing 500 (run producer enqueue again)" in out.getvalue()


def test_a_closed_pipe_ends_it_quietly() -> None:
    """A reader that quits (`| head -1`) ends the monitor without an error and with exit code 0."""
    program = (
        "import itertools, sys; from producer.monitor.run import monitor\n"
        "from tests.unit.producer.test_monitor import Series, part\n"
        "sys.exit(monitor(Series(*itertools.repeat(part(10), 10**6)), interval_s=0.01))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline().startswith(b"Watching")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.wait(20) == 0


LIVE = """
import itertools, sys
from producer.monitor.run import monitor
from tests.unit.producer.test_monitor import Series, part
sys.exit(monitor(Series(*itertools.repeat(part(452), 10**5)), interval_s=0.1))
"""


class Terminal:
    """A monitor in a pseudo-terminal of its own."""

    def __init__(self, *, columns: int, env: dict[str, str] | None = None) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        clean = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}  # noqa: TID251  a child's
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVE],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**clean, "TERM": "xterm-256color", **(env or {})},
            start_new_session=True,
        )
        self.seen = ""

    def resize(self, columns: int) -> None:
        """Give the terminal another width."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, marker: str, *, timeout_s: float = 30.0) -> str:
        """Return all output up to and with the marker, from the last call on."""
        deadline = time.monotonic() + timeout_s
        os.set_blocking(self.master, False)
        while marker not in self.seen:
            assert time.monotonic() < deadline, f"no {marker!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 65536).decode()
            except BlockingIOError:
                time.sleep(0.02)
        found, _, self.seen = self.seen.partition(marker)
        return found + marker

    def close(self) -> None:
        """End the process and give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Open pseudo-terminals that are closed after the test."""
    opened: list[Terminal] = []

    def open_one(**options: object) -> Terminal:
        opened.append(Terminal(**options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def plain_text(shown: str) -> str:
    """Return what was shown without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_q_leaves_the_terminal_as_it_was(terminal: Callable[..., Terminal]) -> None:
    """The live view shows the numbers, hides the cursor meanwhile, and q brings cursor and modes back, exit code 0."""
    screen = terminal(columns=80)
    shown = screen.read_until("ETA 0:00:55")
    assert HIDE in shown
    assert "452 of 1,000" in shown
    assert "\x1b[?1049h" not in shown
    os.write(screen.master, b"q")
    screen.read_until(SHOW)
    assert screen.process.wait(20) == 0
    assert termios.tcgetattr(screen.slave) == screen.before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_bring_the_cursor_back(terminal: Callable[..., Terminal], number: signal.Signals) -> None:
    """Ctrl-C and a kill end the view in order, with exit code 130."""
    screen = terminal(columns=80)
    screen.read_until("ETA 0:00:55")
    screen.process.send_signal(number)
    screen.read_until(SHOW)
    assert screen.process.wait(20) == 130
    assert termios.tcgetattr(screen.slave) == screen.before


def test_a_narrow_and_resized_terminal_is_readable(terminal: Callable[..., Terminal]) -> None:
    """At 40 columns no line is wider, and after a change of width the screen is drawn anew."""
    screen = terminal(columns=40)
    shown = screen.read_until("ETA 0:00:55")
    assert max(len(line) for line in re.split(r"[\r\n]+", plain_text(shown))) <= 40
    screen.resize(100)
    screen.read_until("\x1b[2J")
    assert "452 of 1,000   ETA 0:00:55" in plain_text(screen.read_until("ETA 0:00:55"))


def test_a_dumb_terminal_gets_plain_lines(terminal: Callable[..., Terminal]) -> None:
    """Where no cursor can be moved, the lines are those of a pipe."""
    screen = terminal(columns=80, env={"TERM": "dumb"})
    shown = screen.read_until("ETA 0:00:55")
    assert "math running: 452/1,000 (45.2 %)" in shown
    assert "\x1b" not in shown
