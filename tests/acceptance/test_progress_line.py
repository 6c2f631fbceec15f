"""Long commands say how far they are: on one line in a terminal, which is gone afterwards."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.conftest import ModelServerFactory
from tests.support.mill import Mill
from tests.support.processes import subprocess_env

_PRODUCER = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"


def _in_a_terminal(mill: Mill, *words: str) -> tuple[str, str]:
    """Run a command whose standard error is a terminal; return its standard output and what the terminal got."""
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", _PRODUCER, *words]
        told = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, env=subprocess_env(mill.env), cwd=mill.path, check=True
        )
        shown = os.read(ours, 65536)
    finally:
        os.close(theirs)
        os.close(ours)
    return told.stdout.decode(), shown.decode()


def test_enqueue_and_export_show_how_far_they_are(mill: Mill, model_server: ModelServerFactory) -> None:
    """In a terminal both rewrite one line and clear it at the end; elsewhere short ones write no progress."""
    model_server()
    file = mill.write_rows(["one", "two"])
    stdout, shown = _in_a_terminal(mill, "enqueue", str(file), "--dataset", "case")
    assert shown.startswith("producer: adapter auto reads the first rows as prompt.\r\n")
    assert shown.endswith("\r\x1b[2Kread 2, queued 2, already recorded 0\r\x1b[2K")
    assert stdout.startswith("case: read 2")
    mill.worker()
    mill.wait_recorded(2)
    stdout, shown = _in_a_terminal(mill, "export", "case", "--format", "openai", "--output", "x.jsonl")
    assert shown.startswith("\r\x1b[2Kread 0 of 0 MiB\r\x1b[2K")
    assert stdout.startswith("2 records exported as openai to x.jsonl ")
    plain = mill.run("export", "case", "--format", "openai", "--output", "y.jsonl")
    assert plain.stderr == ""
