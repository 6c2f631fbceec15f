"""`producer run`: several datasets out of one recipe, side by side, from their rows to the exports."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from producer.simulator.rules import Rule
from tests.conftest import Broker, ModelServerFactory, RedisFactory
from tests.support.books import all_balanced
from tests.support.mill import Mill
from tests.support.processes import subprocess_env, wait_until

FIXTURES = Path(__file__).parents[1] / "fixtures"
_PRODUCER = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"


def recipe(mill: Mill, *datasets: Mapping[str, Any], more: str = "") -> str:
    """Write a recipe beside the inputs and return its path; JSON's values are TOML's."""
    tables = ["[[dataset]]\n" + "".join(f"{key} = {json.dumps(one[key])}\n" for key in one) for one in datasets]
    path = mill.path / "recipe.toml"
    path.write_text("\n".join([*tables, more]), encoding="utf-8")
    return str(path)


def row(mill: Mill, stdout: str, dataset: str) -> dict[str, str]:
    """Return a dataset's line of the table."""
    _, start, table = stdout.partition("dataset  ")
    heading, *lines = (line.split() for line in (start + table).splitlines())
    found = next(line for line in lines if line[0] == dataset)
    return dict(zip(heading, found, strict=False))


def tickets(broker: Broker, dataset: str) -> int:
    """Return how many tickets wait in a dataset's queue."""
    return int(str(broker.client.llen(f"{broker.key_prefix}mill.{dataset}")))


READ = {"functions": 12, "code": 12, "reasoning": 12, "chat": 12, "math": 7, "agents": 3, "multi-turn": 10, "mix": 13}
REFUSED = {"functions": 3, "code": 3, "reasoning": 2, "chat": 2, "math": 1, "agents": 0, "multi-turn": 0, "mix": 2}


def test_the_small_recipe_from_rows_to_exports(mill: Mill, model_server: ModelServerFactory) -> None:
    """Eight datasets become two exports; every row is accounted for, and short answers are rejected."""
    model_server(rules=[Rule(match="boiling point", content="98 °C")], default=Rule(repeat=60))
    shutil.copytree(FIXTURES / "datasets", mill.path / "datasets")
    file = shutil.copy(FIXTURES / "recipe-small.toml", mill.path)
    trial = mill.run("run", file, "--limit-scale", "0.1")
    assert row(mill, trial.stdout, "total")["queued"] == "9"
    told = mill.run("run", file)
    samples = {name: READ[name] - REFUSED[name] for name in READ}
    for name, count in samples.items():
        line = row(mill, told.stdout, name)
        assert (line["read"], line["refused"]) == (str(READ[name]), str(REFUSED[name]))
        assert int(line["waiting"]) + int(line["queued"]) == count
        assert line["input"] == "complete"
    early = mill.run("run", file, "--export", expect=1)
    assert "math: not recorded yet: 6 samples." in early.stderr
    assert not list(mill.path.glob("eagle3*"))
    mill.worker(concurrency=16)
    for name, count in samples.items():
        mill.wait_recorded(count, name)

    exported = mill.run("run", file, "--export")
    records = {name: [json.loads(line) for line in mill.out(name).read_bytes().splitlines()] for name in samples}
    short = {name: count - len(records[name]) for name, count in samples.items()}
    assert sum(short.values()) > 0
    all_balanced(
        mill, {name: {"accepted": count - short[name], "rejected": short[name]} for name, count in samples.items()}
    )
    rows = [
        json.loads(line)
        for part in ("train", "validation")
        for line in (mill.path / f"eagle3-{part}.jsonl").read_text().splitlines()
    ]
    wanted = {
        record["id"]: record["prompt_token_ids"] + record["output_ids"]
        for name in records
        for record in records[name]
        if len(record["prompt_token_ids"]) + len(record["output_ids"]) <= 8192
    }
    assert len(rows) == len(wanted) > 30
    assert {one["id"]: one["input_ids"] for one in rows} == wanted
    assert f"{len(rows)} records exported as tokens" in exported.stdout
    twice = sum(map(len, records.values())) - len(wanted)
    assert f"{twice} left out: an earlier dataset of the same export has the id already" in exported.stdout
    assert (mill.path / "eagle3-vocab.npz").stat().st_size > 0
    assert "functions" in (mill.path / "eagle3.README.md").read_text()
    kept = mill.run("run", file, "--export", expect=1)
    assert "2 of 2 exports could not be written." in kept.stderr
    assert "eagle3-vocab.npz: " in kept.stderr
    mill.run("run", file, "--export", "--overwrite")
    again = mill.run("run", file)
    assert row(mill, again.stdout, "total")["recorded"] == str(sum(samples.values()))
    assert row(mill, again.stdout, "total")["queued"] == "0"


def test_one_bad_dataset_does_not_stop_the_others(mill: Mill) -> None:
    """A missing file, a source that breaks off, other settings and a folder in the way are told at the end, with 1."""
    for name in ("good", "other", "blocked"):
        mill.write_rows([f"{name} {n}" for n in range(30)], name)
    (mill.path / "torn.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 this is no gzip stream")
    (mill.path / "empty.jsonl").write_text("")
    mill.enqueue(mill.path / "other.jsonl", "--temperature", "0.5", dataset="other")
    (mill.prepared / "blocked").write_text("in the way")
    file = recipe(
        mill,
        *({"name": name, "source": f"{name}.jsonl"} for name in ("missing", "other", "blocked", "empty")),
        {"name": "torn", "source": "torn.jsonl.gz"},
        {"name": "good", "source": "good.jsonl"},
    )
    dry = mill.run("run", file, "--dry-run", expect=1)
    told = mill.run("run", file, expect=1)

    ends = {name: row(mill, told.stdout, name) for name in ("missing", "other", "blocked", "empty", "torn", "good")}
    assert {name: line["input"] for name, line in ends.items()} == {
        "missing": "failed", "other": "failed", "blocked": "failed", "empty": "complete", "torn": "failed",
        "good": "complete",
    }  # fmt: skip
    assert ends["good"]["queued"] == row(mill, told.stdout, "total")["queued"] == "30"
    assert f"producer: missing: There is no file {mill.path / 'missing.jsonl'}" in told.stderr
    assert (
        "producer: other: The dataset 'other' was started with other settings (temperature: 0.5 -> null)" in told.stderr
    )
    assert f"producer: blocked: {mill.prepared / 'blocked'}" in told.stderr
    assert "producer: torn: " in told.stderr
    assert "producer: empty: there is nothing to ask" in told.stderr
    last = told.stderr.splitlines()[-1]
    assert "5 of 6 datasets could not be queued as they should (missing, other, blocked, empty, torn)" in last
    assert "Traceback" not in told.stderr
    assert "producer: missing: " in dry.stderr
    assert "producer: good" not in dry.stderr
    mended = mill.run("run", file, "--only", "good", "--only", "other", "--new-settings")
    assert row(mill, mended.stdout, "other")["waiting"] == "30"
    assert "other: 30 samples that waited got the new settings now." in mended.stderr


def test_datasets_take_turns_by_weight(mill: Mill, model_server: ModelServerFactory) -> None:
    """While little room is in Redis, answers come by weight, and all datasets come to their end together."""
    server = model_server(latency_s=0.01)
    mill.env["MILL_MAX_PENDING"] = "12"
    for name, count in (("heavy", 120), ("light", 40)):
        mill.write_rows([f"{name} {n}" for n in range(count)], name)
    file = recipe(
        mill,
        {"name": "light", "source": "light.jsonl"},
        {"name": "heavy", "source": "heavy.jsonl", "weight": 3},
    )
    mill.worker(concurrency=4)
    told = mill.run("run", file)

    assert row(mill, told.stdout, "total")["queued"] == "160"
    mill.wait_recorded(120, "heavy")
    mill.wait_recorded(40, "light")
    first = Counter(request.key.split()[0] for request in server.requests[:80])
    assert 50 <= first["heavy"] <= 70
    all_balanced(mill, {"heavy": {"accepted": 120}, "light": {"accepted": 40}})


def test_a_paused_dataset_does_not_block_the_others(mill: Mill, model_server: ModelServerFactory) -> None:
    """What is paused fills Redis only so far that the others go on to their end; afterwards it goes on itself."""
    model_server()
    mill.env["MILL_MAX_PENDING"] = "16"
    for name in ("held", "free"):
        mill.write_rows([f"{name} {n}" for n in range(24)], name)
    mill.enqueue(mill.path / "held.jsonl", "--limit", "1", dataset="held")
    mill.run("pause", "held")
    file = recipe(
        mill, {"name": "held", "source": "held.jsonl", "weight": 100}, {"name": "free", "source": "free.jsonl"}
    )
    mill.worker()
    producer = mill.start("run", file)
    mill.wait_recorded(24, "free")
    assert producer.running
    assert mill.recorded("held") == 0
    wait_until(lambda: "paused: held" in producer.output(), 20, "why it waits")
    mill.run("resume", "held")
    mill.wait_recorded(24, "held")
    assert producer.wait() == 0


def test_ctrl_c_and_the_same_command(mill: Mill, broker: Broker) -> None:
    """An interrupted run ends within two seconds with 130; the same command queues the rest alone."""
    for name in ("a", "b"):
        mill.write_rows([f"{name} {n}" for n in range(10_000)], name)
    file = recipe(mill, {"name": "a", "source": "a.jsonl"}, {"name": "b", "source": "b.jsonl"})
    producer = mill.start("run", file)
    wait_until(lambda: tickets(broker, "a") > 0 and tickets(broker, "b") > 0, 20, "tickets of both", poll_s=0.01)
    producer.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert producer.wait() == 130
    assert time.monotonic() - began < 2
    assert "run the same command again to go on." in producer.output()
    assert "Traceback" not in producer.output()
    done = {name: tickets(broker, name) for name in ("a", "b")}
    assert abs(done["a"] - done["b"]) <= 1_000
    assert sum(done.values()) < 20_000
    told = mill.run("run", file)
    for name, count in done.items():
        line = row(mill, told.stdout, name)
        assert (line["waiting"], line["queued"]) == (f"{count:,}", f"{10_000 - count:,}")
        assert tickets(broker, name) == 10_000


def test_a_redis_that_goes_away_ends_it_and_the_same_command_goes_on(mill: Mill, new_redis: RedisFactory) -> None:
    """Without Redis nothing can be queued: one sentence, exit code 1, and no dataset counts as read to its end."""
    server = new_redis()
    mill.env.update(MILL_REDIS_URL=server.url, MILL_MAX_PENDING="40")
    for name in ("a", "b"):
        mill.write_rows([f"{name} {n}" for n in range(300)], name)
    file = recipe(mill, {"name": "a", "source": "a.jsonl"}, {"name": "b", "source": "b.jsonl"})
    producer = mill.start("run", file)
    wait_until(lambda: "no worker is running" in producer.output(), 20, "why it waits")
    server.kill()
    assert producer.wait(30) == 1
    assert "stopped; run the same command again to go on." in producer.output()
    assert "Traceback" not in producer.output()
    assert {row(mill, producer.output(), name)["input"] for name in ("a", "b")} == {"stopped"}
    server.start()
    mill.env["MILL_MAX_PENDING"] = "1000"
    told = mill.run("run", file)
    assert row(mill, told.stdout, "total")["queued"] == "600"


def test_a_source_that_hangs_holds_up_no_other(mill: Mill, broker: Broker) -> None:
    """While one source gives nothing, the others are queued to their end, and Ctrl-C still ends the run at once."""
    os.mkfifo(mill.path / "hangs.jsonl")
    mill.write_rows([f"row {n}" for n in range(700)], "good")
    file = recipe(mill, {"name": "hangs", "source": "hangs.jsonl"}, {"name": "good", "source": "good.jsonl"})
    producer = mill.start("run", file)
    wait_until(lambda: tickets(broker, "good") == 700, 20, "the tickets of the other one")
    assert producer.running
    producer.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert producer.wait() == 130
    assert time.monotonic() - began < 3
    assert row(mill, producer.output(), "good")["input"] == "complete"
    assert row(mill, producer.output(), "hangs")["input"] == "stopped"
    assert "Traceback" not in producer.output()


def test_looking_first_needs_no_redis(mill: Mill) -> None:
    """--dry-run shows each dataset's place, adapter and limit, reads no whole source, and makes nothing."""
    mill.env["MILL_REDIS_URL"] = "redis://127.0.0.1:1/0"
    file = recipe(
        mill,
        {"name": "a", "source": "a.jsonl", "limit": 200, "shuffle": 1, "weight": 2.5},
        {"name": "b", "source": str(mill.path / "b.csv")},
    )
    mill.write_rows([{"question": "x"}], "a")
    (mill.path / "b.csv").write_text("prompt\nhello\n")
    told = mill.run("run", file, "--dry-run")

    lines = [line.split() for line in told.stdout.splitlines()]
    assert lines[1] == ["a", "2.5", "200", "question", str(mill.path / "a.jsonl")]
    assert lines[2] == ["b", "1", "all", "prompt", str(mill.path / "b.csv")]
    assert told.stdout.splitlines()[-1].endswith("Nothing was queued (--dry-run).")
    assert told.stderr == ""
    assert not mill.prepared.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--overwrite",), "--overwrite belongs to --export"),
        (("--export", "--only", "a"), "it takes --overwrite and no other option"),
        (("--export",), "names no export"),
        (("--limit-scale", "0"), "--limit-scale 0.0 cannot be used"),
        (("--only", "b"), "has no dataset 'b'"),
    ],
)
def test_options_that_do_not_fit(mill: Mill, words: tuple[str, ...], told: str) -> None:
    """They end with 2 and one sentence, before anything is made."""
    mill.write_rows(["x"], "a")
    file = recipe(mill, {"name": "a", "source": "a.jsonl"})
    wrong = mill.run("run", file, *words, expect=2)
    assert told in wrong.stderr
    assert wrong.stderr.count("\n") == 1
    assert not mill.prepared.exists()


@pytest.mark.parametrize(
    "table",
    [
        'format = "tokn"',
        'format = "tokens"\nsplit = "train=2"',
        'format = "vocab"\nlimit = 5',
        'format = "trl"',
        'format = "vocab"',
    ],
)
def test_a_wrong_export_is_told_before_the_run(mill: Mill, table: str) -> None:
    """An export that cannot be written as it stands ends the command before days of work, not after."""
    mill.write_rows(["x"], "a")
    output = "x.txt" if "trl" in table else "x.jsonl"
    file = recipe(mill, {"name": "a", "source": "a.jsonl"}, more=f'[[export]]\noutput = "{output}"\n{table}\n')
    wrong = mill.run("run", file, expect=2)
    assert f"[[export]] 1 ({output}): " in wrong.stderr
    assert not mill.prepared.exists()


def test_one_line_for_all_in_a_terminal(mill: Mill) -> None:
    """In a terminal one line tells how far all datasets are, remarks stand on lines of their own, and it is cleared."""
    for name in ("a", "b"):
        mill.write_rows([f"{name} {n}" for n in range(1500)], name)
    file = recipe(mill, {"name": "a", "source": "a.jsonl"}, {"name": "b", "source": "b.jsonl"})
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", _PRODUCER, "run", file]
        told = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=subprocess_env(mill.env), check=True)
        shown = os.read(ours, 65536).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    pieces = [piece for line in shown.split("\r\n") for piece in line.split("\r\x1b[2K") if piece]
    assert [piece for piece in pieces if piece.startswith("producer: ")] == [
        piece for piece in pieces if piece.endswith("adapter auto reads the first rows as prompt.")
    ]
    assert any(piece.startswith("2 datasets") and ": read " in piece for piece in pieces)
    assert shown.endswith("\r\x1b[2K")
    assert row(mill, told.stdout.decode(), "total")["queued"] == "3,000"
