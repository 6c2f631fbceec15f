"""Logs of background processes stay small, lose no line, and are followed from one file to the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.places import StateDir
from app.settings import child_environment
from producer import log_rotation, processes, service_logs
from producer.processes import Process
from tests.support.processes import wait_until

LIMIT = 20_000
LINES = 3000
WRITER = textwrap.dedent(
    f"""
    import sys, time
    from producer.log_rotation import keep_own_output_small
    keep_own_output_small(limit_bytes={LIMIT}, look_s=0.02)
    for number in range({LINES}):
        print(f"line {{number:05d}} " + "x" * 30, file=sys.stderr if number % 2 else sys.stdout, flush=True)
        time.sleep(0.0005)
    print("end", flush=True)
    time.sleep(600)
    """
)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Return a state folder."""
    return StateDir(tmp_path / "state")


@pytest.fixture
def writer(state: StateDir) -> Iterator[Process]:
    """Run a program that writes more than three logs hold, and rotates its own."""
    process = processes.start(
        "mill1", [sys.executable, "-c", WRITER], log=state.logs / "mill1.log", env=child_environment()
    )
    yield process
    processes.signal_process(process, signal.SIGKILL)
    processes.wait_gone([process], seconds=10)


def test_a_running_process_rotates_its_own_output(state: StateDir, writer: Process) -> None:
    """Whoever follows sees each line once and in order, and no more than four files of about the limit remain."""
    seen = []
    for _service, line in service_logs.logs(state, "mill1", follow=True, lines=0):
        if line == "end":
            break
        seen.append(int(line.split()[1]))
    assert seen == list(range(seen[0], LINES)), "lines are missing or twice"
    assert len(seen) > LINES // 2
    files = sorted(path.name for path in state.logs.iterdir())
    assert files == ["mill1.log", "mill1.log.1", "mill1.log.2", "mill1.log.3"]
    assert all(path.stat().st_size < 3 * LIMIT for path in state.logs.iterdir())
    assert processes.is_alive(writer)


def test_a_rotated_log_still_tells_last_words(state: StateDir, writer: Process) -> None:
    """After a rotation the process's words are read from the new log, whatever the old one's length was."""
    late = Process(name=writer.name, pid=writer.pid, started=writer.started, log=writer.log, offset=10**9)
    wait_until(lambda: processes.last_words(late) == "end", 30, "the writer's last line")


def test_a_full_log_is_set_aside_at_the_start(state: StateDir) -> None:
    """What an earlier process wrote moves one number up each time; three are kept, and the oldest goes."""
    state.logs.mkdir(parents=True)
    log = state.logs / "mill1.log"
    for number in range(6):
        log.write_bytes(b"%d" % number)
        log_rotation.set_aside_if_full(log, limit_bytes=1)
    left = {path.name: path.read_bytes() for path in state.logs.iterdir()}
    assert left == {"mill1.log.1": b"5", "mill1.log.2": b"4", "mill1.log.3": b"3"}
    log.write_bytes(b"small")
    log_rotation.set_aside_if_full(log)
    assert log.read_bytes() == b"small"


def test_output_that_is_no_file_is_left_alone() -> None:
    """In a terminal, a pipe or a container's log nothing is rotated."""
    code = (
        "import threading; from producer.log_rotation import keep_own_output_small; keep_own_output_small(look_s=0.01);"
        "print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "1\n"
