"""The helpers for true subprocesses start, watch, kill and clean up for real."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import ManagedProcess, run_command, run_producer, subprocess_env, wait_until

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); {SLEEPER}"
PARENT = """
import sys
from pathlib import Path
from tests.support.processes import ManagedProcess
child = ManagedProcess([sys.executable, "-c", sys.argv[1]], log_dir=Path(sys.argv[2]), name="child")
child.wait_for_output("up")
print("child", child.pid, flush=True)
import time; time.sleep(600)
"""


def python(code: str, folder: Path, *arguments: str, name: str = "python") -> ManagedProcess:
    """Start a Python program given as text."""
    return ManagedProcess([sys.executable, "-c", code, *arguments], log_dir=folder, name=name)


def test_marker_then_sigkill(tmp_path: Path) -> None:
    """A process is awaited by its output and then ends by SIGKILL and by nothing else."""
    with python(SLEEPER, tmp_path) as process:
        assert process.wait_for_output("up", 20) == "up"
        assert process.running
        process.kill()
        assert process.returncode == -signal.SIGKILL
        with pytest.raises(AssertionError, match="had already ended with -9"):
            process.kill()


def test_stop_sends_sigterm(tmp_path: Path) -> None:
    """Stop gives the process its say and returns its return code."""
    with python(STUBBORN, tmp_path) as process:
        process.wait_for_output("up", 20)
        assert process.stop() == 7


def test_early_end_is_reported_with_output(tmp_path: Path) -> None:
    """A process that ends before its marker fails the wait at once, with its output in the message."""
    with python("print('bad luck'); exit(3)", tmp_path) as process:
        with pytest.raises(AssertionError, match=r"(?s)ended with 3 before 'up'.*bad luck"):
            process.wait_for_output("up", 20)
        assert process.wait() == 3


def test_output_files_are_kept_apart(tmp_path: Path) -> None:
    """Two processes of one name write to two files."""
    for text in ("one", "two"):
        with python(f"print('{text}')", tmp_path) as process:
            process.wait()
    assert [path.read_text() for path in sorted(tmp_path.glob("python.*.log"))] == ["one\n", "two\n"]


def test_children_die_with_their_starter(tmp_path: Path) -> None:
    """When the starter is killed the kernel kills what it started, however it started it."""
    with python(PARENT, tmp_path, SLEEPER, str(tmp_path), name="parent") as parent:
        child = int(parent.wait_for_output("child", 20).split()[1])
        assert Path(f"/proc/{child}").exists()
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: _gone(child), 10, f"the end of {child}")


def _gone(pid: int) -> bool:
    """Say whether a process is gone or only its name is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_environment_holds_no_other_mill_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MILL_ variables of the tests' own environment never reach a subprocess; given ones do, and app imports."""
    monkeypatch.setenv("MILL_REDIS_URL", "redis://wrong")
    assert "MILL_REDIS_URL" not in subprocess_env({})
    code = "import app, json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('MILL_')}))"
    finished = run_command([sys.executable, "-c", code], env={"MILL_MODEL": "m"}, cwd=tmp_path)
    assert finished.json() == {"MILL_MODEL": "m"}
    assert finished.code == 0


def test_run_command_keeps_streams_apart(tmp_path: Path) -> None:
    """A finished command has its code, stdout and stderr."""
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(2)"
    finished = run_command([sys.executable, "-c", code], env={}, cwd=tmp_path)
    assert (finished.code, finished.stdout, finished.stderr) == (2, "out\n", "err\n")


def test_run_command_has_a_deadline(tmp_path: Path) -> None:
    """A command that takes too long is killed and fails the test with what it said."""
    with pytest.raises(AssertionError, match=r"(?s)still ran after 1 s.*up"):
        run_command([sys.executable, "-c", SLEEPER], env={}, cwd=tmp_path, timeout_s=1)


def test_wait_until_returns_the_value() -> None:
    """The first true value is returned; a condition that stays false says what was awaited and what was seen."""
    values = iter([0, 0, 5])
    assert wait_until(lambda: next(values), 5, "a number", poll_s=0.01) == 5
    with pytest.raises(
        AssertionError, match=r"(?s)a miracle did not come true within 0.1 s; the last value was \[\].*why"
    ):
        wait_until(list, 0.1, "a miracle", detail=lambda: json.dumps("why"))


@pytest.mark.parametrize("words", [("--version",), ("status", "--help"), ("no-such-command",), ("enqueue", "nowhere")])
def test_a_forked_command_is_what_a_user_starts(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A command out of the forge ends and says the same as one that an interpreter of its own begins."""
    env = {"MILL_PREPARED_DIR": str(tmp_path)}
    forked = run_producer(*words, env=env, cwd=tmp_path)
    begun = run_producer(*words, env={**env, "PYTHONHASHSEED": "1"}, cwd=tmp_path)
    assert forked == begun
    assert forked.stdout or forked.stderr
