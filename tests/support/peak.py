"""The most memory that a process of its own has ever needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.processes import PRODUCER, run_command

_MEASURED = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:])
unit = 1 if sys.platform == "darwin" else 1024
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)
sys.exit(ended.returncode)
"""


def run_measured(*arguments: str, env: Mapping[str, str], cwd: Path, timeout_s: float = 60.0) -> tuple[str, int]:
    """Run `producer ARGUMENTS` with success; return what it said and the bytes that it needed at most."""
    command = [sys.executable, "-c", _MEASURED, sys.executable, "-c", PRODUCER, *arguments]
    finished = run_command(command, env=env, cwd=cwd, timeout_s=timeout_s)
    assert finished.code == 0, finished
    said, _, peak = finished.stdout.rpartition("peak ")
    return said, int(peak)


def peak_bytes(pid: int) -> int:
    """Return the bytes that a running process has needed at most; skips the test where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        pytest.skip("there is no /proc")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found, status
    return int(found[1]) * 1024
