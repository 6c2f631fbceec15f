"""Every command's help, wrong usage, and that no secret is ever shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.books import balanced
from tests.support.mill import Mill
from tests.support.processes import wait_until

COMMANDS = (
    "enqueue",
    "run",
    "retry",
    "up",
    "scale",
    "down",
    "logs",
    "status",
    "monitor",
    "verify",
    "pause",
    "resume",
    "bound",
    "export",
    "validate",
)


def test_help(mill: Mill) -> None:
    """Every command explains itself and shows examples of itself."""
    told = mill.run("--help").stdout
    for name in COMMANDS:
        assert f"  {name} " in told
        own = mill.run(name, "--help").stdout
        assert f"Usage: producer {name}" in own
        examples = own.partition("Examples:")[2].strip().splitlines()
        assert examples, name
        assert all(line.strip().startswith(f"producer {name}") for line in examples)
    assert "Examples:" in told


@pytest.mark.parametrize(
    "words",
    [
        ("no-such-command",),
        ("enqueue",),
        ("enqueue", "rows.jsonl"),
        ("enqueue", "no-such-file.jsonl", "--dataset", "case"),
        ("run",),
        ("run", "no-such-recipe.toml"),
        ("run", "rows.jsonl"),
        ("enqueue", "rows.jsonl", "--dataset", "case", "--limit", "0"),
        ("enqueue", "rows.jsonl", "--dataset", "case", "--no-such-option"),
        ("status", "nowhere"),
        ("verify", "nowhere"),
        ("retry", "nowhere"),
        ("pause", "nowhere"),
        ("resume", "nowhere"),
        ("export", "nowhere", "--format", "openai", "--output", "x.jsonl"),
        ("scale", "-1"),
    ],
    ids=" ".join,
)
def test_wrong_usage(mill: Mill, words: tuple[str, ...]) -> None:
    """Wrong usage ends with 2 and words for people, never a traceback, and makes nothing."""
    mill.write_rows(["x"])
    told = mill.run(*words, expect=2)
    assert told.stderr.strip()
    assert "Traceback" not in told.stderr
    assert not mill.prepared.exists()


@pytest.mark.parametrize("words", [("status",), ("verify",), ("export", "--format", "openai", "--output", "x.jsonl")])
def test_a_finished_dataset_needs_no_redis(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory, words: tuple[str, ...]
) -> None:
    """Once all is recorded, status, verify and export go by the files alone."""
    model_server()
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    mill.enqueue(["one", "two"])
    worker = mill.worker()
    mill.wait_recorded(2)
    assert worker.stop() == 0
    server.kill()
    command, *options = words
    told = mill.run(command, "case", *options)
    assert "Traceback" not in told.stderr
    assert {"status": "2 of 2", "verify": "case: complete", "export": "2 records exported as openai"}[
        command
    ] in told.stdout


def test_verify_of_nothing_is_no_success(mill: Mill, new_redis: RedisFactory) -> None:
    """Where no dataset was looked at verify ends with 1 and names the folder, with Redis and without it."""
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    words = f"nothing was verified: there is no dataset in {mill.prepared} (MILL_PREPARED_DIR)"
    assert words in mill.run("verify", expect=1).stderr
    server.kill()
    told = mill.run("verify", "--json", expect=1)
    assert words in told.stderr
    assert "cannot be reached" in told.stderr
    assert told.json() == {}


def test_verify_of_an_unfinished_dataset_needs_redis(mill: Mill, new_redis: RedisFactory) -> None:
    """While samples are left and Redis does not answer verify ends with 1 and says why."""
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    mill.enqueue(["one", "two"])
    server.kill()
    told = mill.run("verify", expect=1)
    assert "2 samples are not recorded, and without Redis nobody can tell whether they are queued." in told.stdout
    assert "case: NOT complete" in told.stdout


def test_pause_and_resume(mill: Mill, model_server: ModelServerFactory) -> None:
    """A paused dataset is not asked, with its reason in status, while others go on; resume lets it go on."""
    server = model_server()
    mill.enqueue(["held"], dataset="held")
    mill.run("pause", "held", "--why", "disk swap")
    mill.worker()
    mill.enqueue(["free"], dataset="free")
    mill.wait_recorded(1, "free")
    part = mill.status("held")["datasets"]["held"]
    assert (part["state"], part["counts"]["queued"], part["eta"]["seconds"]) == ("paused", 1, None)
    assert "Paused: disk swap." in mill.run("status", "held").stdout
    assert server.count("held") == 0
    mill.run("resume", "held")
    mill.wait_recorded(1, "held")
    balanced(mill, "held", accepted=1)


def _everything(mill: Mill) -> str:
    files = [path for path in mill.path.rglob("*") if path.is_file() and "redis" not in path.parts[-2]]
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in files)


def test_a_password_is_never_shown(mill: Mill, model_server: ModelServerFactory, new_redis: RedisFactory) -> None:
    """A Redis password with odd characters works encoded, as a variable and from a file, and is in no output."""
    secret = "hush#now/w[o]rd"  # noqa: S105  the test is about it
    encoded = "hush%23now%2Fw%5Bo%5Drd"
    model_server()
    server = new_redis()
    server.client().config_set("requirepass", secret)
    url = server.url
    mill.env["MILL_REDIS_URL"] = url.replace("//", f"//:{encoded}@")
    mill.enqueue(["one"])
    worker = mill.worker()
    mill.wait_recorded(1)
    outputs = [worker.output()]
    mill.env["MILL_REDIS_URL"] = url
    for told in (mill.enqueue(["one"], expect=1), mill.run("status")):
        assert "refuses the user or password" in " ".join((told.stdout + told.stderr).split())
        outputs += [told.stdout, told.stderr]
    mill.env["MILL_REDIS_PASSWORD"] = secret
    outputs.append(mill.run("status", "--json").stdout)
    del mill.env["MILL_REDIS_PASSWORD"]
    file = mill.path.parent / f"{mill.path.name}-password"
    file.write_text(f"{secret}\n")
    mill.env["MILL_REDIS_PASSWORD_FILE"] = str(file)
    outputs.append(mill.run("verify").stdout)
    for broken in (f"redis://:{secret}@127.0.0.1:{server.port}/0", f"http://:{encoded}@127.0.0.1:{server.port}"):
        mill.env["MILL_REDIS_URL"] = broken
        told = mill.enqueue(["one"], expect=2)
        assert told.stderr.count("\n") == 1
        outputs.append(told.stderr)
    for text in (*outputs, _everything(mill)):
        assert "hush" not in text


@pytest.mark.parametrize("kind", ["a file in its place", "a link to nothing"])
def test_a_folder_that_cannot_be_written(mill: Mill, model_server: ModelServerFactory, kind: str) -> None:
    """Enqueue and worker end with the path and the reason before any request, and nothing is queued."""
    server = model_server()
    good, folder = mill.prepared, mill.path / "bad"
    if kind == "a file in its place":
        folder.mkdir()
        (folder / "case").write_text("in the way")
    else:
        (folder / "case").mkdir(parents=True)
        (folder / "case" / "raw_responses.jsonl").symlink_to("/nonexistent/file")
    mill.env["MILL_PREPARED_DIR"] = str(folder)
    told = mill.enqueue(["x"], expect=1)
    assert str(folder / "case") in told.stderr
    assert told.stderr.count("\n") == 1
    assert mill.run("pause", "case", expect=2)
    mill.env["MILL_PREPARED_DIR"] = str(good)
    mill.enqueue(["x"])
    mill.env["MILL_PREPARED_DIR"] = str(folder)
    worker = mill.worker(wait=False)
    wait_until(lambda: not worker.running, 30, "the worker's end")
    assert worker.returncode == 1
    assert str(Path("bad") / "case") in worker.output()
    assert "Traceback" not in worker.output()
    assert len(server.requests) == 0


def test_few_open_files(mill: Mill, model_server: ModelServerFactory) -> None:
    """Too few file descriptors are told with both numbers at the start; a run leaves none behind."""
    model_server(latency_s=0.05)
    slots = 16
    worker = mill.worker(concurrency=slots)
    descriptors = Path(f"/proc/{worker.pid}/fd")
    seen = []
    for run in range(3):
        mill.enqueue([f"run {run} row {number}" for number in range(80)])
        mill.wait_recorded(80 * (run + 1))
        if descriptors.exists():
            seen.append(len(list(descriptors.iterdir())))
    balanced(mill, accepted=240)
    # A slot that the first run left idle opens one to Redis and one to the server; a leak would grow with the samples.
    assert not seen or max(seen) - seen[0] <= 2 * slots, seen


def test_a_worker_that_cannot_start_says_why_and_ends(mill: Mill, model_server: ModelServerFactory) -> None:
    """Whatever keeps a worker from starting ends it with a sentence; it never says that it is ready."""
    model_server()
    mill.enqueue(["a"])
    broken = {
        "MILL_API_KEY": "sk-hunter2\r",
        "MILL_MODEL_URLS": "http://[::1:8000/v1",
        "MILL_PREPARED_DIR": str(mill.path / "elsewhere"),
    }
    for name, value in broken.items():
        worker = mill.worker(extra_env={name: value}, wait=False)
        assert worker.wait(30) in {1, 2}
        assert name in worker.output()
        assert "Traceback" not in worker.output()
        assert "ready." not in worker.output()
        assert "hunter2" not in worker.output()
    assert not (mill.path / "elsewhere").exists()
