"""The simulated server's realistic mode: how speed is shared, how long answers are, and that all counts agree."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.repetition import is_repetitive
from producer.simulator import words
from producer.simulator.realistic import Traits
from producer.simulator.sharing import SharedSpeed
from tests.support.processes import PROJECT_ROOT, Finished, ManagedProcess, run_command

CHAT = "/v1/chat/completions"


class Played:
    """A shared speed on a clock that the test moves."""

    def __init__(self, each: float, total: float) -> None:
        self.now = 0.0
        self.ends: dict[str, float] = {}
        self.speed = SharedSpeed(each, total, clock=lambda: self.now)

    def begin(self, name: str, tokens: float) -> Any:
        """Begin an answer whose end is noted."""
        return self.speed.begin(tokens, lambda: self.ends.update({name: round(self.now, 6)}))

    def pass_to(self, until: float) -> None:
        """Let the time pass, with every answer that ends on the way."""
        while (wait_s := self.speed.seconds_to_next()) is not None and self.now + wait_s <= until:
            self.now += wait_s
            self.speed.finish_due()
        self.now = until
        self.speed.finish_due()


def played(story: Any) -> None:
    """Run a story in a loop of its own."""

    async def run() -> None:
        story()

    asyncio.run(run())


def test_one_answer_has_its_own_speed_alone() -> None:
    """An answer that is alone is as fast as one can be, though the server could do more."""

    def story() -> None:
        play = Played(each=40, total=4000)
        play.begin("a", 400)
        play.pass_to(60)
        assert play.ends == {"a": 10.0}
        assert play.speed.generated == pytest.approx(400)

    played(story)


def test_the_server_is_shared_by_those_that_are_there() -> None:
    """Three answers on a server for 60 tokens/s get 20 each, and what is left goes faster when one ends."""

    def story() -> None:
        play = Played(each=40, total=60)
        play.begin("short", 100)
        play.begin("long", 300)
        play.begin("longer", 340)
        play.pass_to(5)
        assert play.ends == {"short": 5.0}
        play.pass_to(100)
        # 200 more at 30 a second; then 40 more at 40.
        assert play.ends["long"] == pytest.approx(5 + 200 / 30)
        assert play.ends["longer"] == pytest.approx(5 + 200 / 30 + 1)
        assert play.speed.generated == pytest.approx(740)

    played(story)


def test_one_that_comes_later_slows_the_others_down() -> None:
    """An answer that begins, or is given up, changes the speed of those that are under way from then on."""

    def story() -> None:
        play = Played(each=40, total=40)
        play.begin("first", 120)
        play.pass_to(1)
        late = play.begin("late", 400)
        play.pass_to(3)
        late.cancel()
        late.cancel()
        play.pass_to(50)
        assert play.ends == {"first": 4.0}, "40 alone, 40 in two seconds of 20, and 40 alone again"
        assert play.speed.generated == pytest.approx(160)

    played(story)


def test_lengths_are_lognormal_around_their_mean() -> None:
    """The mean is the one that was asked for, and the spread that of sigma; without spread all are alike."""
    rng = random.Random(5)
    lengths = [Traits(mean_tokens=800, sigma=0.9).length(rng) for _ in range(20_000)]
    assert abs(statistics.fmean(lengths) - 800) < 30
    assert abs(statistics.median(lengths) - 800 * math.exp(-0.405)) < 20
    assert abs(statistics.stdev(map(math.log, lengths)) - 0.9) < 0.02
    assert {Traits(mean_tokens=50, sigma=0).length(rng) for _ in range(10)} == {50}


def test_text_has_as_many_words_as_tokens_and_repeats_nothing() -> None:
    """A token is a word, its id is always the same, and the text is no loop for the rule that finds loops."""
    text, ids = words.write(5_000, random.Random(1))
    assert len(text.split()) == len(ids) == 5_000
    assert ids == [words.id_of(f" {word}") for word in text.split()]
    assert max(ids) < words.VOCABULARY
    assert not is_repetitive(text, 0.01)
    assert 4 < len(text) / len(ids) < 5
    prompt = "Please summarise the following report in three sentences, and name its authors: it was written in 1998."
    assert 3.5 < len(prompt) / len(words.read(prompt)) < 5.5


def serve(folder: Path, *options: str) -> tuple[ManagedProcess, str]:
    """Start the server as a program and return it with its address."""
    command = [sys.executable, "-m", "producer.simulator.server", "--port", "0", *options]
    process = ManagedProcess(command, log_dir=folder, name="server", cwd=PROJECT_ROOT)
    return process, str(json.loads(process.wait_for_output("listening"))["listening"])


def ask(url: str, **fields: Any) -> Any:
    """Ask for one answer."""
    body = {"messages": [{"role": "user", "content": "How are you?"}], "return_token_ids": True, **fields}
    request = urllib.request.Request(f"{url}{CHAT}", json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  http, ours
        return json.load(answer)


def test_usage_ids_and_text_say_the_same(tmp_path: Path) -> None:
    """Each count is the number of ids, an answer that max_tokens cuts ends with length, and the tallies add up."""
    process, url = serve(tmp_path, "--mean-tokens", "60", "--speedup", "500", "--seed", "3")
    with process, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _n: ask(url, max_tokens=100), range(80)))
        with urllib.request.urlopen(f"{url}/__stats", timeout=10) as told:  # noqa: S310  http, ours
            stats = json.load(told)
    finishes = set()
    for answer in answers:
        [choice] = answer["choices"]
        ids, usage, finish = choice["token_ids"], answer["usage"], choice["finish_reason"]
        finishes.add(finish)
        assert usage["completion_tokens"] == len(ids)
        assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (ids[-1] == words.EOS_ID) == (finish == "stop")
        assert len(choice["message"]["content"].split()) == len(ids) - (finish == "stop")
        assert len(ids) == 100 if finish == "length" else len(ids) <= 100
    assert finishes == {"stop", "length"}
    total = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert stats["generated_tokens"] == pytest.approx(total, rel=0.001)


def test_failures_come_as_often_as_was_asked(tmp_path: Path) -> None:
    """A share of the requests is answered 500, in the shape of the server's errors."""
    process, url = serve(tmp_path, "--mean-tokens", "3", "--speedup", "1000", "--failure-share", "0.5")
    errors = []
    with process:
        for _ in range(60):
            try:
                ask(url)
            except urllib.error.HTTPError as error:
                errors.append((error.code, json.load(error)["error"]["code"]))
    assert set(errors) == {(500, 500)}
    assert 12 < len(errors) < 48


def told(*options: str, folder: Path) -> Finished:
    """Return what the program says to options."""
    command = [sys.executable, "-m", "producer.simulator.server", *options]
    return run_command(command, env={"COLUMNS": "200"}, cwd=folder)


def test_help_and_mistakes(tmp_path: Path) -> None:
    """The help shows how it is used; options that have no effect, or no sense, are refused by name."""
    shown = told("--help", folder=tmp_path)
    assert shown.code == 0
    assert "--server-tokens-per-second" in shown.stdout
    assert "python -m producer.simulator.server --mean-tokens 800" in shown.stdout
    for options, words_ in (
        (("--speedup", "3"), "--speedup needs --mean-tokens"),
        (("--mean-tokens", "0"), "argument --mean-tokens: '0' is not a number above 0"),
        (("--mean-tokens", "5", "--failure-share", "2"), "argument --failure-share: '2' is not a number from 0 to 1"),
        (("--latency", "nan"), "argument --latency: 'nan' is not a number of at least 0"),
    ):
        refused = told(*options, folder=tmp_path)
        assert refused.code == 2
        assert words_ in refused.stderr
