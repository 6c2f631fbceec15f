"""`producer show`, `sample`, `diff` and `reclassify` as commands, for a person's eye, with and without Redis."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app import manifest
from app.errors import MillError, UsageError
from app.index import Index
from app.ledger import Ledger, Pen
from app.places import Keys, dataset_folder
from app.queue import Queue
from app.records import Attempt, Kind, KnownSample, Record, RefusedRow, Sample, Source, Usage, encode_line
from app.settings import GenerationSettings
from producer.choosing import choose
from producer.cli import cli
from tests.conftest import Broker


def record(id_: str, kind: Kind = Kind.ACCEPTED, *, dataset: str = "chat", tokens: int | None = 9, **more: Any) -> Pen:
    """Return the line of a record."""
    made = Record(
        id=id_,
        dataset=dataset,
        verdict=kind,
        reason=more.pop("reason", None),
        source=Source(row=7, id="row 7"),
        messages=more.pop("messages", [{"role": "user", "content": f"What is {id_}?"}]),
        content=more.pop("content", f"It is {id_}."),
        finish_reason="stop",
        usage=Usage(completion_tokens=tokens),
        sampling={},
        settings="0" * 16,
        **more,
    )
    return Pen(kind, id_, encode_line(made), made.reason or "", made.round, tokens or 0)


class Desk:
    """A folder of datasets in which commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def dataset(self, name: str, *pens: Pen) -> None:
        """Make a dataset whose samples are those, and `s-missing` besides."""
        with Ledger.open(dataset_folder(self.path, name)) as ledger:
            manifest.fix_settings(ledger, name, GenerationSettings(), {}, new=False)
            manifest.begin_source(ledger, name, "my rows.jsonl", "auto")
            ids = dict.fromkeys([*(pen.id for pen in pens if pen.kind is not Kind.REFUSED), "s-missing"])
            ledger.commit([Pen(Kind.PENDING, id_, encode_line(KnownSample(id=id_))) for id_ in ids])
            for pen in pens:
                ledger.commit([pen])

    def run(self, *words: str, expect: int = 0) -> Result:
        """Run a command and check its exit code."""
        result = CliRunner().invoke(cli, words)
        if isinstance(result.exception, Exception):
            raise result.exception
        assert result.exit_code == expect, result.output
        return result

    def fails(self, *words: str) -> str:
        """Run a command that ends in an error, and return its sentence."""
        with pytest.raises(MillError) as caught:
            self.run(*words)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk without Redis."""
    monkeypatch.setenv("MILL_PREPARED_DIR", str(tmp_path))
    monkeypatch.setenv("MILL_STATE_DIR", str(tmp_path / ".state"))
    monkeypatch.setenv("MILL_REDIS_URL", "redis://127.0.0.1:1/0")
    return Desk(tmp_path)


@pytest.fixture
def books(broker: Broker, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Let the desk have Redis, and return its work list."""
    monkeypatch.setenv("MILL_REDIS_URL", broker.url)
    monkeypatch.setenv("MILL_KEY_PREFIX", broker.key_prefix)
    made = Queue(broker.client, Keys(broker.key_prefix))
    made.register("chat", "f", {})
    return made


# show


def test_show_tells_every_round_and_failed_call(desk: Desk) -> None:
    """Prompt, tools, each round with its faults, the answer, and the place in the file, at which the record stands."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    fault = Attempt("timeout", "http://gpu1", 1_700_000_000.0, "no answer within 5 s")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    first = record("s1", Kind.FAILED, reason="timeout", error="gave up", content=None, tokens=None, messages=messages)
    desk.dataset(
        "chat",
        first,
        record(
            "s1", round=1, faults=[fault], tool_calls=[call], tools=[tool], reasoning="Hm. " * 500, messages=messages
        ),
    )
    shown = desk.run("show", "s1").stdout
    for text in (
        "s1 of chat: accepted",
        "source: row 7, id row 7",
        "[system] Be kind.",
        '[user] [{"type": "text", "text": "Hi"}]',
        '--- prompt\n[tool definition] {"name": "look", "parameters": {}}\n[system] Be kind.',
        "--- round 0 (a later one counts): failed: timeout",
        "[error] gave up",
        "--- round 1: accepted",
        "failed call: timeout at ",
        "by http://gpu1: no answer within 5 s",
        "[reasoning (2,000 characters, --full: all)] Hm. ",
        "1,400 characters more",
        "[answer] It is s1.",
        '[answer calls call_1] look {"at": "sky"}',
        "Redis could not be asked whether it is queued",
    ):
        assert text in shown, text
    path, offset = dataset_folder(desk.path, "chat").lines(Kind.ACCEPTED), 0
    assert f"raw_responses.jsonl, byte {offset}, " in shown
    assert f"tail -c +1 {path} | head -n 1" in shown
    assert "characters more" not in desk.run("show", "s1", "--full").stdout
    assert json.loads(desk.run("show", "s1", "--json").stdout)["rounds"][1]["content"] == "It is s1."


def test_status_tells_of_settings_that_others_cannot_use(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value that status itself does not read is told beside unknown names, and the numbers come."""
    desk.dataset("chat", record("s1"))
    monkeypatch.setenv("MILL_STREAM", "yess")
    monkeypatch.setenv("MILL_MAX_INFLIGHT", "4")
    shown = desk.run("status", "--json", expect=1)
    unknown, unusable = shown.stderr.splitlines()
    assert unknown.startswith("producer: MILL_MAX_INFLIGHT is not a setting of promptmill")
    assert unusable == "producer: MILL_STREAM cannot be used: input should be true or false."
    assert json.loads(shown.stdout)["datasets"]["chat"]["counts"]["accepted"] == 1


def test_show_makes_control_characters_harmless(desk: Desk) -> None:
    """No text of a record can steer the terminal, whatever field it stands in."""
    evil = "a\x1b[2Jb\x9bc\u202ed\x07"
    desk.dataset(
        "chat",
        record(
            "s1",
            Kind.REJECTED,
            reason=evil,
            content=evil,
            reasoning=evil,
            messages=[{"role": evil, "content": evil, "tool_calls": [{"id": evil, "function": {"name": evil}}]}],
            faults=[Attempt(evil, evil, 1.0, evil)],
            worker=evil,
            model=evil,
        ),
    )
    for words in (
        ("show", "s1"),
        ("show", "s1", "--full"),
        ("sample", "chat", "--kind", "rejected"),
        ("diff", "chat", "chat"),
    ):
        shown = desk.run(*words).stdout
        assert not [char for char in shown if not char.isprintable() and char not in "\n\t"], words
    assert "a\\u001b[2Jb\\u009bc\\u202ed\\u0007" in desk.run("show", "s1").stdout


def test_show_says_where_an_unrecorded_sample_is(desk: Desk, books: Queue) -> None:
    """Queued, in flight by whom, missing with the command that brings it back, failed, refused and why."""
    refused = RefusedRow(id="row-3", source="rows.jsonl", row=3, reason="no_prompt", detail="it is empty", start='{"x"')
    desk.dataset(
        "chat",
        Pen(Kind.REFUSED, "row-3", encode_line(refused), "no_prompt"),
        record("s-f", Kind.FAILED, reason="timeout"),
    )
    books.put("chat", [Sample(id="s-missing", messages=[{"role": "user", "content": "Where?"}])])
    queued = desk.run("show", "s-missing").stdout
    assert "s-missing of chat: queued" in queued
    assert "[user] Where?" in queued
    assert "--- in the queue, to be asked" in queued

    books.beat("w@host/1", {}, ttl_s=60)
    books.take("chat", "s-missing", "w@host/1")
    assert "--- asked by w@host/1 since 20" in desk.run("show", "s-missing").stdout
    books.part("w@host/1")
    assert "which is dead: it comes back" in desk.run("show", "s-missing").stdout

    books.forget("chat", ["s-missing"])
    assert "run producer enqueue 'my rows.jsonl' --dataset chat" in desk.run("show", "s-missing").stdout
    assert "producer retry chat asks it again" in desk.run("show", "s-f").stdout
    shown = desk.run("show", "row-3").stdout
    assert "row 3 of rows.jsonl was refused: no_prompt" in shown
    assert "it is empty" in shown


def test_show_finds_an_id_by_its_beginning(desk: Desk) -> None:
    """The beginning of an id is enough where it is the only one; else the candidates are named."""
    desk.dataset("chat", record("fruits-1"), record("fruits-12"), record("trees-1"))
    desk.dataset("other", record("fruits-1", dataset="other"))
    assert desk.run("show", "trees").stdout.startswith("trees-1 of chat: accepted")
    assert desk.run("show", "fruits-1", "--dataset", "chat").stdout.startswith("fruits-1 of chat")
    assert desk.run("show", "fruits-12").stdout.startswith("fruits-12 of chat")
    assert desk.fails("show", "fruits") == (
        "'fruits' may be fruits-1 of chat, fruits-12 of chat, fruits-1 of other; give the whole id, and --dataset."
    )
    assert desk.fails("show", "fruits-1").startswith("'fruits-1' may be fruits-1 of chat, fruits-1 of other")
    assert "knows no sample 'nuts'" in desk.fails("show", "nuts", "-d", "chat")
    assert "No dataset in" in desk.fails("show", "nuts")
    assert "There is no dataset 'x'" in desk.fails("show", "nuts", "-d", "x")


# sample


def test_sample_is_reproducible_by_its_seed(desk: Desk) -> None:
    """The same seed chooses the same records, another one others, and without one the command to repeat it is said."""
    desk.dataset("chat", *(record(f"s{number:03}") for number in range(60)))
    words = ("sample", "chat", "-n", "5", "--json", "--seed")
    ids = [[json.loads(line)["id"] for line in desk.run(*words, seed).stdout.splitlines()] for seed in "112"]
    assert len(set(ids[0])) == 5
    assert ids[0] == ids[1] != ids[2]
    drawn = desk.run("sample", "chat", "-n", "2")
    again = drawn.stderr.partition("the same again: producer ")[2].split()
    assert desk.run(*again).stdout == drawn.stdout
    assert "[user] What is s0" in drawn.stdout


def test_a_choice_is_even_and_lasts_while_a_dataset_grows(desk: Desk) -> None:
    """Each record is as likely as any other, and a record that was chosen from many is chosen from fewer, too."""
    desk.dataset("chat", *(record(f"s{number:02}") for number in range(20)))
    with Ledger.open(dataset_folder(desk.path, "chat")) as ledger:
        drawn = Counter[str]()
        for seed in range(2000):
            drawn.update(id_ for id_, _entry in choose(ledger, 3, seed=seed, kind=Kind.ACCEPTED))
        assert len(drawn) == 20
        assert all(220 < n < 380 for n in drawn.values())
        before = [id_ for id_, _entry in choose(ledger, 5, seed=7, kind=Kind.ACCEPTED)]
        ledger.commit([record(f"t{number:02}") for number in range(10)])
        after = [id_ for id_, _entry in choose(ledger, 5, seed=7, kind=Kind.ACCEPTED)]
        assert [id_ for id_ in after if id_.startswith("s")] == before[: sum(id_.startswith("s") for id_ in after)]


def test_sample_takes_a_kind_and_a_reason(desk: Desk) -> None:
    """Rejected and failed records can be looked at by their reason; none at all is said, with exit code 1."""
    desk.dataset(
        "chat",
        record("a"),
        record("b", Kind.REJECTED, reason="too_short"),
        record("c", Kind.REJECTED, reason="empty"),
        record("d", Kind.FAILED, reason="timeout", content=None, error="no answer"),
    )
    shown = desk.run("sample", "chat", "--kind", "rejected", "--reason", "empty").stdout
    assert "=== 1 of 1: c rejected: empty" in shown
    assert "[error] no answer" in desk.run("sample", "chat", "--kind", "failed").stdout
    none = desk.run("sample", "chat", "--kind", "rejected", "--reason", "x", expect=1)
    assert "no sample of 'chat' is rejected as x." in none.stderr
    assert "--reason is for rejected" in desk.fails("sample", "chat", "--reason", "empty")


def test_sample_reads_no_record_but_those_that_it_shows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a dataset is, as many lines are read as records are shown."""
    desk.dataset("chat", *(record(f"s{number:03}") for number in range(200)))
    reads, original = [0], Ledger.read

    def read(*words: Any) -> bytes:
        reads[0] += 1
        return original(*words)

    monkeypatch.setattr(Ledger, "read", read)
    desk.run("sample", "chat", "-n", "4")
    assert reads == [4]


# diff


def test_diff_tells_what_is_different(desk: Desk) -> None:
    """Samples in one alone, changed outcomes, both distributions, equal answers, and the biggest differences."""
    call = {"id": "x1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    desk.dataset(
        "a",
        record("s1", content="Same.", tool_calls=[call], tokens=10, latency_s=1.0),
        record("s2", content="Short.", tokens=10, latency_s=1.0),
        record("s3", content="Other.", tokens=10, latency_s=1.0),
        record("s4", Kind.FAILED, reason="timeout", content=None, tokens=None),
        record("only-a"),
    )
    desk.dataset(
        "b",
        record("s1", content="Same. ", tool_calls=[{**call, "id": "y2"}], tokens=10, latency_s=2.0),
        record("s2", Kind.REJECTED, reason="truncated", content="Very long.", tokens=900, latency_s=2.0),
        record("s3", content="Another.", tokens=12, latency_s=2.0),
        record("s4"),
        record("only-b1"),
        record("only-b2", Kind.FAILED, reason="reset"),
    )
    found = json.loads(desk.run("diff", "a", "b", "-n", "1", "--json").stdout)
    assert (found["both"], found["answered"], found["equal"]) == (4, 3, 1)
    assert (found["a"]["only"], found["b"]["only"]) == (1, 2)
    assert [found["a"][kind] for kind in ("accepted", "rejected", "failed")] == [4, 0, 1]
    assert found["outcomes"] == [
        ["accepted", "rejected: truncated", 1],
        ["failed: timeout", "accepted", 1],
        ["accepted", "accepted", 2],
    ]
    assert found["a"]["latency_s"] == {"n": 3, "mean": 1.0, "p5": 1.0, "p50": 1.0, "p95": 1.0}
    assert found["b"]["tokens"]["n"] == 3
    assert found["b"]["tokens"]["mean"] == pytest.approx(922 / 3)
    assert [(one["id"], one["tokens"], one["answers"]) for one in found["examples"]] == [
        ("s2", [10, 900], ["Short.", "Very long."])
    ]

    shown = desk.run("diff", "a", "b").stdout
    assert "4 samples are in both; 3 have two answers, 1 of them equal (33.3 %)." in shown
    assert "=== s2: 10 and 900 tokens" in shown
    assert "[B, rejected: truncated] Very long." in shown
    assert shown.index("=== s2") < shown.index("=== s3")
    assert "=== s1" not in shown


def test_diff_of_equal_and_of_foreign_datasets(desk: Desk) -> None:
    """A dataset equals itself; two without a common sample are said to be so."""
    desk.dataset("a", *(record(f"s{number:04}") for number in range(1500)))
    desk.dataset("b", record("t1"))
    same = json.loads(desk.run("diff", "a", "a", "--json").stdout)
    assert (same["both"], same["equal"], same["examples"]) == (1500, 1500, [])
    apart = desk.run("diff", "a", "b")
    assert "0 samples are in both" in apart.stdout
    assert "the two have no sample in common" in apart.stderr
    assert "There is no dataset 'c'" in desk.fails("diff", "a", "c")


def test_diff_keeps_a_few_pages_in_memory(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two indexes are read in step, a page at a time, however many samples there are."""
    desk.dataset("a", *(record(f"s{number:04}") for number in range(2500)))
    pages, original = list[int](), Index.page

    def page(self: Index, after: str, *kinds: Kind) -> Any:
        found = original(self, after, *kinds)
        pages.append(len(found))
        return found

    monkeypatch.setattr(Index, "page", page)
    desk.run("diff", "a", "a")
    assert pages == [1000, 1000, 1000, 1000, 500, 500, 0, 0]


# reclassify


def test_reclassify_shows_what_changes(desk: Desk) -> None:
    """A table of the verdicts before and now, the new rules, and with --dry-run the same words without the deed."""
    desk.dataset("chat", record("a", tokens=5), record("b", tokens=50), record("c", tokens=500))
    told = desk.run("reclassify", "chat", "--min-completion-tokens", "40", "--dry-run")
    assert "1 of 3 answered samples would have another verdict or reason." in told.stdout
    done = desk.run("reclassify", "chat", "--min-completion-tokens", "40")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["accepted", "rejected:", "too_short", "1", "*"] in rows
    assert ["accepted", "accepted", "2"] in rows
    assert "min_completion_tokens 40, keep_truncated off, allow_think_leak off, max_repetition unset" in done.stderr
    assert "=== 1 of 1: a rejected: too_short" in desk.run("sample", "chat", "--kind", "rejected").stdout
    again = desk.run("reclassify", "chat")
    assert "0 of 3 answered samples have another verdict or reason." in again.stdout
    assert "enqueue has to give" not in again.stderr


def test_reclassify_refuses_what_contradicts_itself(desk: Desk) -> None:
    """Wrong usage and unknown datasets are one sentence."""
    desk.dataset("chat")
    assert "contradict" in desk.fails("reclassify", "chat", "--max-repetition", "0.5", "--no-max-repetition")
    assert "There is no dataset 'x'" in desk.fails("reclassify", "x")
    with pytest.raises(UsageError):
        desk.run("reclassify", "x")
    assert "max-repetition" in desk.run("reclassify", "chat", "--max-repetition", "2", expect=2).output


def test_a_record_is_found_where_it_moved_to_meanwhile(desk: Desk) -> None:
    """A reader that looked a record up before a reclassify reads the record, not what stands in its place now."""
    desk.dataset("chat", record("a", tokens=5, finished_at=1.0), record("b", tokens=50, finished_at=2.0))
    with Ledger.open(dataset_folder(desk.path, "chat")) as reader:
        before = reader.look_up(["a", "b"])
        for rules in (("--min-completion-tokens", "99"), ("--min-completion-tokens", "10"), ("--keep-truncated",)):
            desk.run("reclassify", "chat", *rules)
            for id_ in "ab":
                found = json.loads(reader.read(before[id_], id_))
                assert (found["id"], found["content"]) == (id_, f"It is {id_}.")
