"""`producer monitor` in a real terminal, and from the files alone; `producer report` beside it."""

from __future__ import annotations

import contextlib
import json
import re
import sys

import pytest

from producer.simulator.server import Rule
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.mill import Mill
from tests.support.processes import PROJECT_ROOT, wait_until
from tests.support.tmux import Window, window

_RUN = "import sys; from producer.cli import main; sys.argv[0] = 'producer'; sys.exit(main())"


@pytest.fixture
def run(mill: Mill, model_server: ModelServerFactory) -> Mill:
    """Return a run of two datasets on slow answers: some fail, some are rejected, most are still to come."""
    model_server(
        latency_s=0.5,
        rules=[
            Rule(match="bad", status=400, message="this model takes no such prompt"),
            Rule(match="cut", finish_reason="length"),
        ],
    )
    mill.env["MILL_MAX_IN_FLIGHT"] = "4"
    words = ("bad", "cut", *["well"] * 20)
    for dataset in ("chat", "math"):
        mill.enqueue([f"{dataset} {words[n % len(words)]} {n}" for n in range(400)], dataset=dataset)
    mill.worker(concurrency=6)
    mill.wait_recorded(6, "chat")
    return mill


def monitor(
    mill: Mill, *arguments: str, columns: int, lines: int, **env: str
) -> contextlib.AbstractContextManager[Window]:
    """Open the monitor in a window of that size."""
    command = [sys.executable, "-c", _RUN, "monitor", "--interval", "0.5", *arguments]
    variables = {**mill.env, "PYTHONPATH": str(PROJECT_ROOT), **env}
    return window(command, columns=columns, lines=lines, env=variables)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "lines"), [(40, 30), (80, 24), (200, 50), (60, 8)])
def test_the_screen_fits_its_window(run: Mill, columns: int, lines: int) -> None:
    """At every size the datasets are on it, nothing wraps or scrolls away while it is drawn again and again."""
    with monitor(run, columns=columns, lines=lines) as shown:
        shown.wait_for("chat   running")
        first = shown.lines()[0]
        wait_until(lambda: shown.lines()[0] != first, 20, "another second")
        screen = shown.lines()
        assert screen[0].startswith("promptmill ")
        assert screen[0].rstrip().endswith("q quits")
        assert any(line.startswith("math   running") for line in screen)
        assert sum(line.startswith("promptmill ") for line in screen) == 1
        assert shown.scrolled_away() == []
        if lines == 50:
            assert "failed bad_request" in shown.text()
            assert "HTTP 400: this model takes no such prompt" in shown.text()
            assert re.search(r"127\.0\.0\.1:\d+   up   \d of 4 in flight", shown.text())
            assert re.search(r"worker1@\S+   running   \d of 6 slots busy   heartbeat \d s ago", shown.text())
        else:
            assert "more lines" in shown.text()


@pytest.mark.slow
def test_a_window_that_changes_and_q(run: Mill) -> None:
    """After each change of size the screen is whole, and q leaves it with the prompt below."""
    with monitor(run, columns=100, lines=30) as shown:
        shown.wait_for("chat   running")
        for columns, lines in ((40, 20), (160, 40), (70, 10), (100, 30)):
            shown.resize(columns, lines)
            wait_until(lambda columns=columns: _is_whole(shown, columns), 20, f"{columns} columns", detail=shown.text)
        shown.press("q")
        wait_until(lambda: "\x1b[?25l" not in shown.colours(), 10, "the end")
        assert "chat   running" in shown.text()
        assert "Traceback" not in shown.text()


def _is_whole(shown: Window, columns: int) -> bool:
    """Tell whether one title of the new width is on the screen, and each dataset's head once."""
    screen = shown.lines()
    titles = [line.rstrip() for line in screen if line.startswith("promptmill ")]
    heads = [line for line in screen if re.match(r"chat   running", line)]
    return len(titles) == 1 and len(titles[0]) == columns - 1 and len(heads) == 1


@pytest.mark.slow
def test_no_color(run: Mill) -> None:
    """With NO_COLOR set there is no colour; the bar's parts differ by their characters."""
    with monitor(run, columns=80, lines=40, NO_COLOR="1") as shown:
        shown.wait_for("chat   running")
        assert not re.search(r"\x1b\[(3[0-7]|9[0-7]|38;)", shown.colours())
        assert "█ accepted" in shown.text()
        assert "▚ failed" in shown.text()


@pytest.mark.slow
def test_redis_goes_away_and_comes_back(mill: Mill, model_server: ModelServerFactory, new_redis: RedisFactory) -> None:
    """While Redis is gone the files go on telling, with the time of what only Redis knew; then Redis is asked again."""
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    model_server(latency_s=0.5)
    mill.enqueue([f"p {number}" for number in range(200)])
    mill.worker()
    mill.wait_recorded(4)
    wait_until(mill.folder().progress.exists, 20, "progress.json")
    with monitor(mill, columns=100, lines=30) as shown:
        shown.wait_for("slots busy")
        server.kill()
        text = shown.wait_for("These are the numbers of the files; a worker last wrote them at ")
        assert "cannot be reached" in text
        assert "of 200" in text
        plain = mill.start("monitor", "--from", str(mill.prepared), "--interval", "0.2", name="plain")
        line = plain.wait_for_output(" case ")
        assert re.search(r"case \w+: \d+/200 \(.*failed 0, .*by the files of \d\d:\d\d:\d\d", line), line
        server.start()
        wait_until(lambda: "numbers of the files" not in shown.text(), 40, "Redis' own numbers", detail=shown.text)


def test_the_report_tells_the_numbers_of_status(mill: Mill, model_server: ModelServerFactory) -> None:
    """Counts, tokens and reasons in the page are those of `status --json`, and Redis is not asked."""
    model_server(rules=[Rule(match="bad", status=400), Rule(match="cut", finish_reason="length")])
    mill.enqueue([*(f"p {n}" for n in range(20)), "bad 1", "bad 2", "cut 1", {"prompt": ""}])
    mill.worker()
    mill.wait_recorded(23)
    mill.wait_idle()
    told = mill.status()["datasets"]["case"]
    mill.env["MILL_REDIS_URL"] = "redis://127.0.0.1:1/0"
    path = mill.path / "run.html"
    said = mill.run("report", "case", "--output", str(path))
    assert said.stdout.startswith(f"{path}: ")
    page = path.read_text(encoding="utf-8")
    found = re.search(r'id="numbers">(.*?)</script>', page, re.DOTALL)
    assert found
    part = json.loads(found.group(1))["datasets"]["case"]
    for field in ("read", "refused", "samples", "accepted", "rejected", "failed", "left"):
        assert part["counts"][field] == told["counts"][field], field
    assert part["tokens"]["total"] == told["tokens"]["total"]
    assert part["reasons"] == told["reasons"]
    assert f"<dd>{told['tokens']['total']:,}<small>of accepted samples" in page
    assert f'<td>bad_request</td><td class="n">{told["reasons"]["failed"]["bad_request"]}</td>' in page
    assert mill.run("report", "milk", expect=2).stderr.startswith("producer: There is no dataset 'milk' in ")
