"""What must hold when the dust has settled: every sample once on disk, a true index, no needless call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from app.ledger import Ledger
from app.records import Kind
from producer.simulator.server import ModelServer
from tests.support.folders import fresh_picture, picture
from tests.support.jsonl_check import assert_strict, check_jsonl
from tests.support.mill import Mill


def prompts(count: int, word: str = "prompt") -> list[str]:
    """Return so many different prompts."""
    return [f"{word} {number}" for number in range(count)]


def recorded_prompts(mill: Mill, dataset: str = "case") -> list[str]:
    """Return the prompts of the whole accepted lines that are on disk now, in file order."""
    path = mill.out(dataset)
    if not path.exists():
        return []
    whole = [line for line in check_jsonl(path).records if "messages" in line]
    return [str(line["messages"][-1]["content"]) for line in whole]


def assert_balanced(mill: Mill, expected: Collection[str], dataset: str = "case") -> None:
    """Assert that each prompt has exactly one sound accepted line, the index is true, and `producer verify` agrees."""
    assert_strict(mill.out(dataset), count=len(expected))
    assert sorted(recorded_prompts(mill, dataset)) == sorted(expected)
    folder = mill.folder(dataset)
    for kind in (Kind.REJECTED, Kind.FAILED):
        assert not folder.lines(kind).exists(), folder.lines(kind).read_text(encoding="utf-8")
    verified = mill.run("verify", dataset)
    assert "NOT complete" not in verified.stdout
    with Ledger.open(folder) as ledger:
        assert picture(ledger) == fresh_picture(folder)


def assert_asked_once(server: ModelServer, keys: Iterable[str]) -> None:
    """Assert that none of these prompts was sent more than once."""
    twice = {key: server.count(key) for key in keys if server.count(key) > 1}
    assert not twice, f"asked more than once: {twice}"


def times_asked(mill: Mill, server: ModelServer) -> dict[str, int]:
    """Return how often each prompt that is on disk now was sent; `assert_not_asked_since` takes it."""
    return {prompt: server.count(prompt) for prompt in recorded_prompts(mill)}


def assert_not_asked_since(server: ModelServer, before: Mapping[str, int]) -> None:
    """Assert that no prompt that was on disk at the time was sent again since."""
    again = {prompt: (count, server.count(prompt)) for prompt, count in before.items() if server.count(prompt) > count}
    assert not again, f"asked again although they were recorded (before, now): {again}"


def assert_asked_again_at_most(server: ModelServer, in_flight: int) -> None:
    """Assert that no prompt was sent more than twice, and at most so many were sent twice."""
    again = {key: count for key, count in server.counts.items() if count > 1}
    assert all(count == 2 for count in again.values()), again
    assert len(again) <= in_flight, f"{len(again)} of at most {in_flight} were asked twice: {again}"


def assert_quiet(log: str) -> None:
    """Assert that a process's output shows no traceback and no exception that nobody fetched."""
    for sign in ("Traceback", "never retrieved", "Event loop is closed", "Unrecoverable", "ResourceWarning"):
        assert sign not in log, log[max(0, log.find(sign) - 2000) :][:6000]
