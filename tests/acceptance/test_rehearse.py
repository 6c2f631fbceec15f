"""`producer rehearse`: a dry run with real parts in a place of its own, of which nothing is left."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.errors import MillError
from app.records import Kind
from producer.cli import cli
from tests.conftest import Broker
from tests.support.jsonl_check import assert_strict
from tests.support.mill import Mill
from tests.support.processes import PROJECT_ROOT, ManagedProcess, wait_until

PROMPTS = PROJECT_ROOT / "examples" / "prompts.jsonl"
"""32 prompts."""
QUICK = ("--mean-tokens", "20", "--first-token-s", "0.1", "--max-in-flight", "4", "--speedup", "1")
SLOW = ("--mean-tokens", "100000", "--sigma", "0", "--max-tokens", "100000", "--speedup", "1")


@pytest.fixture
def scratch(mill: Mill) -> Path:
    """Return the folder in which a rehearsal makes its scratch folder."""
    folder = mill.path / "tmp"
    folder.mkdir()
    mill.env["TMPDIR"] = str(folder)
    return folder


def processes_in(folder: Path) -> dict[str, int]:
    """Return the processes that run in the folder: each one's command, and its id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[command] = int(entry.name)
        except OSError:
            continue  # it has ended, or is a zombie
    return found


def nothing_left(scratch: Path) -> None:
    """Assert that neither process nor file of a rehearsal is there any more."""
    wait_until(lambda: not processes_in(scratch), 20, "the end of all processes", detail=lambda: processes_in(scratch))
    assert list(scratch.iterdir()) == []


def under_way(rehearsal: ManagedProcess, scratch: Path) -> dict[str, int]:
    """Wait until the worker asks the simulated server, and return the processes."""
    rehearsal.wait_for_output("in flight 4", 60)
    found = processes_in(scratch)
    assert len(found) == 3, found
    return found


def bytes_of(folder: Path) -> int:
    """Return the bytes of a dataset's lines and index."""
    return sum(
        path.stat().st_size for path in folder.iterdir() if path.suffix == ".jsonl" or path.name == "index.sqlite"
    )


def one(found: dict[str, int], word: str) -> int:
    """Return the process whose command has the word."""
    [pid] = [pid for command, pid in found.items() if word in command]
    return pid


def test_a_rehearsal(mill: Mill, broker: Broker, scratch: Path) -> None:
    """Every row of a bundled dataset is asked by a real worker; the figures are there, and nothing else was touched."""
    mill.env.update(MILL_MODEL_URLS="http://127.0.0.1:9", MILL_MAX_PENDING="10")
    kept = mill.path / "kept"
    told = mill.run("rehearse", str(PROMPTS), *QUICK, "--rows", "320", "--keep", str(kept), "--json", timeout_s=120)
    found = told.json()
    assert (found["read"], found["samples"], found["refused"]) == (32, 32, 0)
    assert found["outcomes"] == {"accepted": 32, "rejected": 0, "failed": 0}
    assert found["assumed"] == {
        "mean_tokens": 20,
        "sigma": 0.9,
        "tokens_per_second": 40,
        "server_tokens_per_second": 4000,
        "first_token_s": 0.1,
        "failure_share": 0,
        "max_tokens": 8192,
        "max_in_flight": 4,
        "workers": 1,
    }
    path = kept / "rehearsal" / "raw_responses.jsonl"
    records = assert_strict(path, count=32).records
    tokens = [record["usage"]["completion_tokens"] for record in records]
    assert all(len(record["output_ids"]) == count for record, count in zip(records, tokens, strict=True))
    assert found["answers"]["mean_tokens"] == pytest.approx(sum(tokens) / 32)
    assert found["answers"]["longest_tokens"] == max(tokens)
    rate = found["rate"]
    assert 0 < rate["samples_per_s"] == pytest.approx(rate["real_samples_per_s"] / found["speedup"])
    assert rate["output_tokens_per_s"] == pytest.approx(rate["samples_per_s"] * sum(tokens) / 32)
    assert rate["output_tokens_per_s"] <= 4 * 40, "no more than four requests at the speed of one each"
    assert found["bound"]["by"] in {"in_flight", "workers"}
    assert found["needs"]["worker_cpu_ms_per_sample"] > 0
    assert found["whole"]["samples"] == 320
    error = 2.0395 * statistics.stdev(tokens) / 32**0.5  # Student's, for 31 degrees of freedom
    low_s = 320 * (statistics.fmean(tokens) - error) / rate["output_tokens_per_s"]
    assert found["whole"]["seconds_low"] == pytest.approx(low_s, rel=1e-3)
    assert found["whole"]["seconds_high"] > 320 * statistics.fmean(tokens) / rate["output_tokens_per_s"]
    assert found["whole"]["disk_bytes"] == pytest.approx(10 * bytes_of(kept / "rehearsal"), rel=0.01)
    assert found["commands"][-2] == f"producer enqueue {PROMPTS} --dataset prompts --max-tokens 8192"
    assert broker.client.dbsize() == 0
    assert not mill.prepared.exists()
    assert not Path(mill.env["MILL_STATE_DIR"]).exists()
    nothing_left(scratch)


@pytest.mark.slow
def test_failures_and_long_answers_are_told(mill: Mill, scratch: Path) -> None:
    """What the server fails for good and what max_tokens cuts is counted as a real run would count it."""
    mill.env["MILL_MAX_ATTEMPTS"] = "1"
    options = ("--limit", "24", "--failure-share", "0.4", "--max-tokens", "12", *QUICK)
    told = mill.run("rehearse", str(PROMPTS), *options, timeout_s=120).stdout
    assert "24 rows read" in told
    assert "rejected: truncated " in told
    assert "failed: server_error " in told
    assert "40.0% of the requests failing" in told
    assert "whole run 32 samples of 32 rows: " in told
    assert "--max-tokens 12" in told
    nothing_left(scratch)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_nothing_behind(mill: Mill, scratch: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a terminal that goes away end all processes and remove all files."""
    rehearsal = mill.start("rehearse", str(PROMPTS), *SLOW, "--max-in-flight", "4")
    under_way(rehearsal, scratch)
    rehearsal.send_signal(number)
    assert rehearsal.wait(30) == 130
    assert rehearsal.output().endswith("producer: interrupted; nothing is left of the rehearsal.\n")
    assert "Traceback" not in rehearsal.output()
    nothing_left(scratch)


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("celery_process", "The rehearsal's worker1 ended: "),
        pytest.param("simulator", "The rehearsal's server ended: ", marks=pytest.mark.slow),
        pytest.param("-server ", "The rehearsal's redis ended: ", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_ends_it(mill: Mill, scratch: Path, victim: str, words: str) -> None:
    """A worker, server or Redis that is killed ends the rehearsal with one sentence, and the others with it."""
    rehearsal = mill.start("rehearse", str(PROMPTS), *SLOW, "--max-in-flight", "4")
    os.kill(one(under_way(rehearsal, scratch), victim), signal.SIGKILL)
    assert rehearsal.wait(30) == 1
    assert words in rehearsal.output().splitlines()[-1]
    assert "Traceback" not in rehearsal.output()
    nothing_left(scratch)


@pytest.mark.slow
def test_killed_itself_it_leaves_no_process_behind(mill: Mill, scratch: Path) -> None:
    """After a SIGKILL Redis, the worker and the server end too."""
    rehearsal = mill.start("rehearse", str(PROMPTS), *SLOW, "--max-in-flight", "4")
    under_way(rehearsal, scratch)
    os.kill(rehearsal.pid, signal.SIGKILL)
    wait_until(lambda: not processes_in(scratch), 20, "the end of all processes")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("missing.jsonl",), "missing.jsonl"),
        ((str(PROMPTS), "--mean-tokens", "0"), "--mean-tokens 0 cannot be used; give a number above 0."),
        ((str(PROMPTS), "--tokens-per-second", "inf"), "--tokens-per-second inf cannot be used"),
        ((str(PROMPTS), "--max-in-flight", "0"), "MAX_IN_FLIGHT cannot be used"),
        ((str(PROMPTS), "--columns", "prompt=no"), "no row has the column 'no'"),
        ((str(PROMPTS), "--keep", str(PROMPTS.parent)), "cannot be used: it is there already and not empty"),
    ],
)
def test_what_cannot_be_rehearsed_is_told_before_anything_is_started(
    options: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake is one sentence with exit code 2."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(cli, ["rehearse", *options])
    assert isinstance(result.exception, MillError)
    assert result.exception.exit_code == 2
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)
    assert (result.stdout, list(tmp_path.iterdir())) == ("", [])


def test_conversations_made_anew_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample would be several requests, of which the figures say nothing."""
    monkeypatch.setenv("MILL_TURNS", "all")
    with pytest.raises(MillError, match="MILL_TURNS=all cannot be rehearsed: a sample would be several requests"):
        raise CliRunner().invoke(cli, ["rehearse", str(PROMPTS)]).exception or AssertionError


def test_what_enqueue_refuses_is_told(mill: Mill, scratch: Path) -> None:
    """Where no row is a prompt the command ends with the sentence of `enqueue`, and nothing is left."""
    told = mill.run("rehearse", str(mill.write_rows([{"prompt": ""}])), expect=None)
    assert told.code != 0
    assert "there is nothing to ask: no row of the 1 is a sample" in told.stderr
    assert "Traceback" not in told.stderr
    assert not mill.folder("rehearsal").lines(Kind.ACCEPTED).exists()
    nothing_left(scratch)
