"""Output that goes into files and pipes: plain lines that stand alone, and readers that stop reading."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ModelServerFactory
from tests.support.books import balanced
from tests.support.mill import Mill
from tests.support.processes import subprocess_env, wait_until

_MONITOR = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"


def test_plain_lines(mill: Mill, model_server: ModelServerFactory) -> None:
    """Without a terminal no control byte is written, each line stands alone, and blocked readers block nobody."""
    model_server(latency_s=0.1)
    mill.env.update(TERM="dumb", NO_COLOR="1")
    mill.enqueue([f"p {number}" for number in range(150)])
    worker = mill.worker(concurrency=4)
    monitor = mill.start("monitor", "--interval", "1", "--until-done", name="monitor")
    words = [sys.executable, "-c", _MONITOR, "monitor", "--interval", "0.2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=subprocess_env(mill.env), cwd=mill.path) as blocked:
        mill.wait_recorded(150)
        assert monitor.wait(20) == 0
        blocked.terminate()
    balanced(mill, accepted=150)
    for process in (worker, monitor):
        data = process.output_path.read_bytes()
        assert b"\r" not in data
        assert b"\x1b" not in data
    lines = [line for line in monitor.output().splitlines() if " case " in line]
    assert lines[-1].split(" ", 1)[1].startswith("case done: 150/150 (100.0 %)")
    for line in lines:
        for word in ("/150", "samples/s", "failed 0", "done" if "150/150" in line else "ETA"):
            assert word in line
    assert monitor.output().splitlines()[-1] == "Ended: 150/150 (100.0 %), failed 0."


def test_a_reader_that_quits(mill: Mill) -> None:
    """A closed pipe ends the view quietly."""
    mill.enqueue(["one"])
    words = [sys.executable, "-c", _MONITOR, "monitor", "--interval", "0.2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, env=subprocess_env(mill.env), cwd=mill.path) as monitor:
        assert monitor.stdout is not None
        assert monitor.stderr is not None
        assert monitor.stdout.readline()
        monitor.stdout.close()
        wait_until(lambda: monitor.poll() is not None, 20, "the end of monitor")
        assert monitor.stderr.read() == b""


def test_rate_and_eta_after_a_resume(mill: Mill, model_server: ModelServerFactory) -> None:
    """The rate counts this session alone: unknown before its first sample, near the truth soon, 0 without workers."""
    server = model_server()
    rows = [f"e {number}" for number in range(400)]
    mill.enqueue(rows[:300])
    worker = mill.worker(concurrency=32)
    mill.wait_recorded(300)
    worker.stop()
    server.set_options(latency_s=0.4)
    mill.enqueue(rows)
    part = mill.status()["datasets"]["case"]
    assert (part["percent"], part["eta"]["seconds"], part["rates"]["now"]["samples_per_s"]) == (75.0, None, 0.0)
    assert "No worker is running" in mill.run("status").stdout
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(360)
    part = mill.status()["datasets"]["case"]
    assert 5 <= part["rates"]["now"]["samples_per_s"] <= 13, "about ten a second, whatever was recorded before"
    eta = part["eta"]
    assert eta["seconds"] is not None, eta
    assert abs(eta["seconds"] - part["counts"]["left"] / 10) <= 0.6 * part["counts"]["left"] / 10 + 1
    assert eta["low_s"] <= eta["seconds"] <= eta["high_s"]
    worker.stop()
    part = mill.status()["datasets"]["case"]
    assert (part["eta"]["seconds"], part["rates"]["now"]["samples_per_s"]) == (None, 0.0)
    assert part["percent"] <= 100
