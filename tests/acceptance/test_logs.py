"""What workers log in a run that goes wrong: a handful of lines, in JSON if wanted, and nothing that is private."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from producer.simulator.server import Rule
from tests.conftest import ModelServerFactory
from tests.support.books import balanced
from tests.support.mill import Mill
from tests.support.processes import wait_until

PROMPT = "canary-prompt: where is the treasure of the sleepy captain buried?"
ANSWER = "canary-answer: under the third palm tree, behind the lighthouse"
KEY = "sk-canary-key-0123456789"
FAILING = 400


def own_lines(log: str) -> list[str]:
    """Return the lines about samples."""
    return [line for line in log.splitlines() if "sample" in line]


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_private_and_few_lines_in_a_run_with_faults(
    mill: Mill, model_server: ModelServerFactory, form: str
) -> None:
    """Prompts, answers and the key stay out of the log, whatever a server says; 400 faults alike are a few lines."""
    model_server(
        rules=[
            Rule(match="refused", status=400, message=f"cannot take {PROMPT} with Bearer {KEY}"),
            Rule(match="broken", body=f'{{"choices": [{{"text": "{ANSWER}"}}'),
            Rule(match="blank", content="", usage={"prompt_tokens": 5, "completion_tokens": 9}),
            Rule(content=ANSWER),
        ]
    )
    mill.env.update(MILL_API_KEY=KEY, MILL_LOG_FORMAT=form, MILL_MAX_ATTEMPTS="2", MILL_BACKOFF_S="0.01")
    rows = [f"{PROMPT} refused {number}" for number in range(FAILING)]
    rows += [f"{PROMPT} {what}" for what in ("broken", "blank", "well")]
    mill.enqueue(rows)
    worker = mill.worker(concurrency=32)
    balanced(mill, accepted=1, failed=FAILING + 2)
    assert worker.stop() == 0
    log = worker.output()
    for part in ("canary", "treasure", "palm tree", "0123456789"):
        assert part not in log, next(line for line in log.splitlines() if part in line)
    assert 3 <= len(own_lines(log)) <= 20, log
    told = [line for line in own_lines(log) if "more in the last" in line]
    assert any(f"... and {FAILING - 3} more in the last" in line for line in told), told
    if form == "text":
        assert "[...]" in log, "the server's own words are there"
        return
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"time", "level", "logger", "message", "worker"} <= line.keys() for line in lines)
    assert {line["logger"].partition(".")[0] for line in lines} >= {"workers", "celery"}
    failed = [line for line in lines if line.get("event") == "sample_failed"]
    assert {"dataset", "sample", "fault", "endpoint", "attempts"} <= failed[0].keys()
    assert sum(line.get("more", 1) for line in failed if line["fault"] == "bad_request") == FAILING


@pytest.mark.slow
def test_up_starts_workers_that_log_json(mill: Mill, model_server: ModelServerFactory) -> None:
    """`up --log-format json` holds for workers that `scale` adds later, and `logs -f` shows them as they come."""
    model_server()
    mill.run("up", "--no-flower", "--log-format", "json", timeout_s=120)
    try:
        followed = mill.start("logs", "-f", name="followed")
        mill.run("scale", "2", timeout_s=120)
        line = followed.wait_for_output("mill2 | ").partition(" | ")[2]
        assert json.loads(line)["worker"].startswith("mill2-")
        mill.run("up", "--no-flower", "--workers", "2", "--log-format", "text").stdout.index("log format stays")
    finally:
        mill.run("down", timeout_s=120)
    for name in ("mill1", "mill2"):
        lines = Path(mill.env["MILL_STATE_DIR"], "logs", f"{name}.log").read_text().splitlines()
        assert {json.loads(line)["worker"].partition("-")[0] for line in lines} >= {name}


def test_a_wrong_log_format_is_refused(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker with a MILL_LOG_FORMAT that does not exist says so in one sentence and ends."""
    model_server()
    worker = mill.worker(wait=False, extra_env={"MILL_LOG_FORMAT": "xml"})
    wait_until(lambda: not worker.running, 30, "the worker's end", detail=worker.tail)
    assert worker.returncode == 2
    assert "MILL_LOG_FORMAT cannot be used" in worker.output()
