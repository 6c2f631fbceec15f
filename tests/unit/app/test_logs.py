"""Log lines: many alike are counted, secrets and prompts stay out, JSON is one object a line."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from app import logs
from app.logs import Crowd, Discreet
from tests.support.processes import wait_until


class Log:
    """A logger of a test's own, and what it wrote."""

    def __init__(self, name: str, *, form: str = "text", secrets: tuple[str, ...] = (), window_s: float = 60.0) -> None:
        self.stream = io.StringIO()
        self.logger = logging.getLogger(f"test.{name}")
        self.logger.propagate = False
        self.logger.setLevel(logging.DEBUG)
        handler = logging.StreamHandler(self.stream)
        logs.dress([handler], form=form, secrets=secrets, worker="mill1@host")
        handler.filters.clear()
        self.crowd = Crowd(handler, window_s=window_s)
        handler.addFilter(self.crowd)
        self.logger.handlers = [handler]

    def lines(self) -> list[str]:
        """Return what was written."""
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    """Return a log of text."""
    made = Log(request.node.name)
    yield made
    made.crowd.flush()


def fail(log: Log, number: int, *, fault: str = "timeout", endpoint: str = "http://a") -> None:
    """Log a fault as the workers do."""
    more = logs.fields("call_failed", sample=f"s{number}", fault=fault, endpoint=endpoint)
    log.logger.warning("sample s%d: %s", number, fault, extra=more)


def test_ten_thousand_faults_make_a_handful_of_lines(log: Log) -> None:
    """Of 10,000 faults alike three are written, and one line says how many more there were."""
    for number in range(10_000):
        fail(log, number)
    assert log.lines() == [f"sample s{number}: timeout" for number in range(3)]
    log.crowd.flush()
    (told,) = log.lines()[3:]
    assert told.startswith("... and 9,997 more in the last ")
    assert told.endswith(" s, the last one: sample s9999: timeout")


def test_what_differs_is_not_counted_together(log: Log) -> None:
    """Another fault, another server, another exception and another sentence are lines of their own."""
    for number in range(3):
        fail(log, number)
    fail(log, 3, fault="connect")
    fail(log, 4, endpoint="http://b")
    for error in (ValueError("x"), KeyError("y")):
        log.logger.error("broken", exc_info=error)
    log.logger.warning("%s", "one sentence")
    log.logger.warning("%s", "another")
    assert sum("sample" in line for line in log.lines()) == 5
    assert log.lines()[-2:] == ["one sentence", "another"]
    assert "KeyError: 'y'" in log.lines()


def test_news_of_several_datasets_and_states_are_all_told(log: Log) -> None:
    """A server that goes down and comes back is told of each time, and so is each of many paused datasets."""
    for number in range(6):
        paused = logs.fields("dataset_paused", dataset=f"d{number}")
        log.logger.error("dataset %s is paused", f"d{number}", extra=paused)
        state = "down" if number % 2 else "up"
        changed = logs.fields("endpoint_changed", endpoint="http://a", state=state)
        log.logger.warning("endpoint %s is %s", "http://a", state, extra=changed)
    assert len(log.lines()) == 12


def test_the_count_comes_without_another_line(request: pytest.FixtureRequest) -> None:
    """When the window is over the count is written by itself, and the next line is written again."""
    log = Log(request.node.name, window_s=0.3)
    for number in range(8):
        fail(log, number)
    wait_until(lambda: any("... and 5 more" in line for line in log.lines()), 10, "the count")
    fail(log, 9)
    assert log.lines()[-1] == "sample s9: timeout"


def test_threads_lose_no_count(log: Log) -> None:
    """What several threads log at once is either written or counted."""
    threads = [threading.Thread(target=lambda: [fail(log, n) for n in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.crowd.flush()
    assert "... and 1,997 more" in log.lines()[-1]


def test_secrets_become_stars(request: pytest.FixtureRequest) -> None:
    """A key is masked wherever it stands: in words, in fields and in a traceback; a longer one before its part."""
    for form in ("text", "json"):
        log = Log(request.node.name + form, form=form, secrets=("sk-canary", "sk-canary-long", "x"))
        try:
            raise ValueError("Incorrect key sk-canary-long")  # noqa: TRY301 - the traceback is the point
        except ValueError:
            log.logger.exception("refused sk-canary", extra=logs.fields("refused", endpoint="http://u:sk-canary@h"))
        text = log.stream.getvalue()
        assert "canary" not in text
        assert text.count("***") >= 2
        assert "***-long" not in text
        assert "refused" in text, "what is too short to be a secret is not masked"


def test_json_is_one_object_a_line(request: pytest.FixtureRequest) -> None:
    """Each line parses and has time, level, logger, message, the worker, the call's fields and those around it."""
    log = Log(request.node.name, form="json")
    with logs.about(dataset="chat"):
        fail(log, 7)
    log.logger.info("two\nlines")
    try:
        raise RuntimeError("boom")  # noqa: TRY301 - the traceback is the point
    except RuntimeError:
        log.logger.exception("broken")
    first, second, third = map(json.loads, log.lines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": log.logger.name,
        "message": "sample s7: timeout",
        "worker": "mill1@host",
        "dataset": "chat",
        "event": "call_failed",
        "sample": "s7",
        "fault": "timeout",
        "endpoint": "http://a",
    }
    assert second["message"] == "two\nlines"
    assert (third["exception"], "RuntimeError: boom" in third["traceback"]) == ("RuntimeError", True)


def test_a_count_in_json_has_its_number(request: pytest.FixtureRequest) -> None:
    """A line that stands for others says for how many, with the fields of the last one."""
    log = Log(request.node.name, form="json")
    with logs.about(dataset="chat"):
        for number in range(10):
            fail(log, number)
    log.crowd.flush()
    told = json.loads(log.lines()[-1])
    assert (told["more"], told["sample"], told["fault"], told["dataset"]) == (7, "s9", "timeout", "chat")


PROMPT = 'Tell me about\nthe "canary" of Castle Rock, please.'


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("no answer within 30 s", "no answer within 30 s"),
        (f"bad request: {PROMPT}", "bad request: [...]"),
        ('invalid: the "canary" of Castle Rock, pl (cut)', "invalid: [...] (cut)"),
        ("a canary sang", "a canary sang"),
    ],
)
def test_a_server_that_repeats_the_prompt(words: str, shown: str) -> None:
    """Where a server's words repeat 12 characters of the prompt or more, they are left out."""
    assert str(Discreet(" ".join(words.split()), lambda: [PROMPT])) == shown


def test_a_short_prompt_is_left_out_whole() -> None:
    """A prompt of a few characters is found as a whole; one of fewer than four could be any word."""
    assert logs.withhold("cannot read 'Hello'", ["Hello"]) == "cannot read '[...]'"
    assert logs.withhold("cannot read Hi", ["Hi"]) == "cannot read Hi"


def test_a_line_that_is_not_written_costs_no_search(log: Log) -> None:
    """What is private is looked for only in lines that are written."""
    asked = []
    for number in range(5):
        words = Discreet("words", lambda number=number: asked.append(number) or ["secret text"])  # type: ignore[misc]
        record = log.logger.makeRecord("x", logging.INFO, __file__, 1, "sample: %s", (words,), None)
        log.logger.handlers[0].handle(record)
    assert asked == [0, 1, 2]
