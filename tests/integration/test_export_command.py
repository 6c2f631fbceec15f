"""`producer export` and `producer validate` as commands: options, refusals, cards, the hub, exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.errors import UsageError
from app.records import Record
from producer.cli import cli
from tests.support.exports import TOOL, ids_of, ledger_with, many, record, rows_of
from tests.support.hub import Hub, running_hub
from tests.support.processes import Finished, run_producer, subprocess_env

TOKEN = "hf_testing"  # noqa: S105 no secret


class Desk:
    """A folder with datasets, in which commands run without Redis and without a network."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {
            "MILL_PREPARED_DIR": str(path / "prepared"),
            "HF_HOME": str(path / "hf"),
            "HF_TOKEN": "",
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }

    def dataset(self, name: str, *records: Record) -> None:
        """Make a dataset of accepted records."""
        with ledger_with(self.path / "prepared" / name, records):
            pass

    def run(self, *words: str, expect: int = 0, env: Mapping[str, str] | None = None) -> Finished:
        """Run a command and check its exit code."""
        finished = run_producer(*words, env={**self.env, **(env or {})}, cwd=self.path)
        assert finished.code == expect, finished.stdout + finished.stderr
        assert "Traceback" not in finished.stderr
        return finished


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Return a desk with two datasets."""
    made = Desk(tmp_path)
    made.dataset("chat", *many(20), record("t", tools=[TOOL], reasoning="Hm."), record("n", output_ids=None))
    made.dataset("code", record("code-1"), record("s00003"))
    return made


def test_all_options_of_rows(desk: Desk) -> None:
    """Two datasets in one export: id order, splits, shards, a length, a card; and it says what it did."""
    told = desk.run(
        *("export", "chat", "code", "--format", "tokens", "--output", "out/mix.jsonl", "--order", "id"),
        *("--split", "train=0.5,validation=0.5", "--shard-size", "5", "--max-length", "5", "--card", "out/README.md"),
    )
    files = sorted((desk.path / "out").glob("mix-*.jsonl"))
    assert len(files) >= 4
    assert all("-of-0000" in path.name for path in files)
    ids = [id_ for path in files for id_ in ids_of(path)]
    assert sorted(ids) == sorted([*(one.id for one in many(20)), "t", "code-1"])
    assert "22 records exported as tokens to out/mix.jsonl" in told.stdout
    assert "1 left out: an earlier dataset of the same export has the id already (in_another_dataset)." in told.stdout
    assert "1 left out: the server gave no exact token ids of the answer (no_exact_ids)." in told.stdout
    assert "| `loss_mask` |" in (desk.path / "out" / "README.md").read_text()
    checked = desk.run("validate", *map(str, files), "--dataset", "chat", "--dataset", "code", "--vocab-size", "9")
    assert checked.stdout.splitlines()[-1] == "Sound."


def test_formats_with_their_own_options(desk: Desk) -> None:
    """Options that belong to a format reach it."""
    desk.run("export", "chat", "--format", "specforge", "--output", "s.jsonl", "--status", "--no-tools")
    assert list(rows_of(desk.path / "s.jsonl")[0]) == ["id", "conversations", "status"]
    desk.run("export", "chat", "--format", "openai", "--output", "o.jsonl", "--reasoning", "inline", "--limit", "21")
    assert rows_of(desk.path / "o.jsonl")[20]["messages"][-1]["content"] == "<think>\nHm.\n</think>\n\nHello."


def test_a_vocabulary(desk: Desk) -> None:
    """The format vocab writes the mapping and says how much of the answers it covers."""
    pytest.importorskip("numpy")
    words = ("export", "chat", "--format", "vocab", "--output", "v.npz", "--draft-vocab-size", "2", "--vocab-size", "9")
    told = desk.run(*words)
    assert "2 of 9 ids cover 100.00 % of them." in told.stdout
    assert (desk.path / "v.npz").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "tokens", "--reasoning", "field"), "The format tokens has no --reasoning; these formats have:"),
        (("--format", "openai", "--status"), "The format openai has no --status; these formats have: specforge."),
        (("--format", "openai", "--no-tools"), "The format openai has no --no-tools"),
        (("--format", "openai", "--vocab-size", "9"), "The format openai has no --vocab-size; --format vocab has."),
        (("--format", "vocab", "--limit", "9"), "The format vocab has no --limit; it writes no rows."),
        (("--format", "openai", "--order", "random"), "choose one of completion, id."),
        (("--format", "openai", "--include", "failed"), "give rejected for all rejected records"),
        (
            ("--format", "openai", "--include", "rejected:truncatd"),
            "No record of chat was rejected as 'truncatd'; the reasons are: truncated_in_think, truncated, ",
        ),
        (("--format", "openai", "--yes"), "--yes belongs to --push ORG/NAME, which was not given."),
        (("--format", "openai", "--push", "chat", "--yes"), "give the dataset as ORG/NAME."),
        (("--format", "openai", "--push", "my-org/chat"), "there is no terminal to answer in; add --yes or --dry-run."),
        (("--format", "openai", "--push", "my-org/chat", "--yes"), "There is no token for the Hugging Face hub;"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refusals(desk: Desk, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str) -> None:
    """What cannot be is refused in one sentence before anything is written."""
    for name, value in desk.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(desk.path)
    result = CliRunner().invoke(cli, ["export", "chat", "--output", "x.jsonl", *words])
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
    assert not list(desk.path.glob("*x*"))


def test_a_dry_run_sends_nothing(desk: Desk) -> None:
    """--dry-run needs no token, writes the files, and shows what would be sent, private unless told otherwise."""
    words = ("export", "chat", "--format", "tokens", "--output", "x.jsonl", "--push", "my-org/chat", "--dry-run")
    told = desk.run(*words).stdout
    assert "To the private dataset my-org/chat on the Hugging Face hub:" in told
    assert "  data/x.jsonl (21 rows, " in told
    assert told.rstrip().endswith("Nothing was sent (--dry-run).")
    assert len(rows_of(desk.path / "x.jsonl")) == 21
    assert "To the PUBLIC dataset" in desk.run(*words, "--public", "--overwrite").stdout


def test_an_export_is_sent(desk: Desk) -> None:
    """With a token and --yes the files and the card are sent as one commit to a new private dataset."""
    pytest.importorskip("huggingface_hub")
    words = ("export", "chat", "--format", "tokens", "--output", "x.jsonl", "--push", "my-org/chat", "--yes")
    with running_hub() as hub:
        told = desk.run(*words, env={"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN})
        assert f"Sent to {hub.url}/datasets/my-org/chat." in told.stdout
        (created,) = hub.created
        assert (created["type"], created["organization"], created["name"]) == ("dataset", "my-org", "chat")
        assert created.get("visibility") == "private" or created.get("private") is True
        assert hub.files["data/x.jsonl"] == (desk.path / "x.jsonl").read_bytes()
        assert b"data/x.jsonl" in hub.files["README.md"]
        assert hub.tokens == {f"Bearer {TOKEN}"}
        assert TOKEN not in told.stdout + told.stderr
        _refused(desk, hub, words)


def _refused(desk: Desk, hub: Hub, words: tuple[str, ...]) -> None:
    """Check that a hub that refuses is one sentence, and the files stay."""
    hub.refuses = True
    told = desk.run(*words, "--overwrite", env={"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}, expect=1)
    assert told.stderr.startswith("producer: The hub did not take my-org/chat (")
    assert len(told.stderr.splitlines()) == 1
    assert (desk.path / "x.jsonl").exists()


@pytest.mark.parametrize(("answer", "end"), [("y\n", "Sent to "), ("n\n", "Nothing was sent.")])
def test_a_terminal_is_asked(desk: Desk, answer: str, end: str) -> None:
    """In a terminal, --push shows what it would send and asks."""
    pytest.importorskip("huggingface_hub")
    ours, theirs = pty.openpty()
    program = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"
    words = ("export", "chat", "--format", "tokens", "--output", "x.jsonl", "--push", "my-org/chat")
    try:
        with running_hub() as hub:
            env = subprocess_env({**desk.env, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN})
            os.write(ours, answer.encode())
            command = [sys.executable, "-c", program, *words]
            told = subprocess.run(command, stdin=theirs, capture_output=True, env=env, cwd=desk.path, check=False)
            sent = set(hub.files)
    finally:
        os.close(ours)
        os.close(theirs)
    assert told.returncode == 0, told.stderr
    assert end in told.stdout.decode()
    assert sent == ({"README.md", "data/x.jsonl"} if answer == "y\n" else set())


def test_an_unsound_file(desk: Desk) -> None:
    """The command ends with 1, a table with examples by row, and a verdict."""
    rows = [{"id": "a", "input_ids": [1, 99], "loss_mask": [0, 1]}, {"id": "a", "input_ids": [1], "loss_mask": [1, 1]}]
    (desk.path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = desk.run("validate", "bad.jsonl", "--vocab-size", "10", "--eos-id", "99", expect=1)
    assert told.stdout.splitlines() == [
        "bad.jsonl: 2 rows (tokens), 1 supervised tokens.",
        "Checked: lines, columns, types, ids, lengths, masks, the vocabulary, end tokens.",
        "Not checked: missing ids (give --dataset).",
        "FAIL         1   50.00 %  repeated_id: an earlier row has the same id.",
        "                row 2 (a)",
        "FAIL         1   50.00 %  lengths: input_ids and loss_mask are not equally long, or empty.",
        "                row 2 (a): 1 ids, 2 mask values",
        "FAIL         1   50.00 %  bad_token: a token id is no integer, negative or outside the vocabulary.",
        "                row 1 (a): 99 is outside a vocabulary of 10",
        "Unfit: repeated_id, lengths, bad_token.",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("none.jsonl",), "none.jsonl is not there"),
        (("x.jsonl", "--dataset", "nowhere"), "There is no dataset 'nowhere'"),
        (("x.jsonl", "--chat-template-kwargs", "{}"), "needs --tokenizer or --chat-template"),
    ],
)
def test_validate_refuses(desk: Desk, words: tuple[str, ...], said: str) -> None:
    """What cannot be validated is one sentence and exit code 2."""
    desk.run("export", "chat", "--format", "openai", "--output", "x.jsonl")
    told = desk.run("validate", *words, expect=2)
    assert said in told.stderr
    assert len(told.stderr.splitlines()) == 1
