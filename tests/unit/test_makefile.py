"""What make says on a machine that lacks something."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT_VENV = """#!/bin/sh
if [ "$1" = -m ]; then
    mkdir -p "$3/bin"
    ln -s {python} "$3/bin/python"
    exit 1
fi
exec {python} "$@"
"""
"""A Python as on Debian without python3-venv: it begins an environment and then gives up."""


def test_a_python_without_venv_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """Make ends with one sentence that names the package, and a second make does not take half an environment."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    python = tmp_path / "python"
    python.write_text(_WITHOUT_VENV.format(python=sys.executable))
    python.chmod(0o755)
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    for _ in range(2):
        told = subprocess.run(
            [make, f"PYTHON={python}", ".venv/bin/python"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert told.returncode == 2
        sentence, *rest = told.stderr.splitlines()
        assert "install python3-venv" in sentence
        assert all(line.startswith("make") for line in rest)
        assert not (tmp_path / ".venv").exists()
