"""Debian's Chromium for the tests of the dashboard: found, or installed where that needs no password.

As a program (`python -m tests.support.chromium`) it installs what is missing as root on Debian and its kin, with one
line of output; anywhere else it does nothing, and the tests that need a browser are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from app.settings import child_environment

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # it only ever sees this machine's own pages, and root has no other way
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""What keeps it from asking anybody for anything."""
_INSTALL_S = 600


def find() -> Path | None:
    """Return the browser on PATH, if there is one."""
    return next((Path(path) for name in NAMES if (path := shutil.which(name))), None)


def _may_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt(*words: str) -> str | None:
    """Run apt-get; return why it failed, or None."""
    try:
        done = subprocess.run(
            ["apt-get", "-qq", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            env=child_environment({"DEBIAN_FRONTEND": "noninteractive"}),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]


def main() -> None:
    """Install the browser if that can be done, and never fail: tests tell what they lack."""
    if find() or not _may_install():
        return
    sys.stdout.write("Installing Chromium, for the tests of the dashboard (about 350 MB).\n")
    sys.stdout.flush()
    install = ("install", "-y", "--no-install-recommends", *PACKAGES)
    trouble = _apt(*install)
    if trouble:  # the lists of a fresh container are empty, and those of an old one stale
        _apt("update")
        trouble = _apt(*install)
    if trouble:
        sys.stdout.write(f"Chromium could not be installed ({trouble}); tests that need it are skipped.\n")


if __name__ == "__main__":
    main()
