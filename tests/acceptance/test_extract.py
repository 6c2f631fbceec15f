"""Hidden states from the command line to the trainer's files, through real workers with a tiny target model."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Kind
from producer.simulator.server import ModelServer
from tests.support.exports import record
from tests.support.jsonl_check import check_jsonl
from tests.support.kill_points import Point, assert_killed, worker_that_dies
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.tiny_states import HIDDEN, VOCABULARY, fill, make_target_model, records, reference
from workers.extract.model import require_packages

_RUN_S = 90.0
_HIDDEN = "chat.hidden"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the target model once."""
    return make_target_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def extractor(mill: Mill) -> Mill:
    """Return the product with workers that make hidden states on the CPU."""
    mill.env.update(MILL_EXTRACT="1", MILL_DEVICE="cpu", OMP_NUM_THREADS="1")
    return mill


def _lines(mill: Mill, kind: Kind = Kind.ACCEPTED) -> list[dict[str, Any]]:
    return list(check_jsonl(mill.folder(_HIDDEN).lines(kind)).records)


def _finish(mill: Mill, count: int) -> None:
    mill.wait_recorded(count, _HIDDEN, timeout_s=_RUN_S)
    mill.wait_idle(_HIDDEN)


def _assert_complete(mill: Mill, ids: list[str]) -> None:
    """Every id is recorded once, its file is there, and the books balance."""
    lines = _lines(mill)
    assert collections.Counter(line["id"] for line in lines) == collections.Counter(ids)
    for line in lines:
        assert (mill.folder(_HIDDEN).path / "states" / line["file"]).stat().st_size == line["bytes"]
    assert mill.run("verify", _HIDDEN).stdout.startswith(f"{_HIDDEN}: complete")
    assert "0 missing, 0 damaged" in mill.run("extract", _HIDDEN, "--check").stdout


@pytest.mark.slow
def test_every_accepted_answer_becomes_a_file(extractor: Mill, target: Path) -> None:
    """One task each; the file holds the states of exactly the ids that were sampled; a second run finds all done."""
    import torch  # noqa: PLC0415  heavy
    import transformers  # noqa: PLC0415  same

    mill, made = extractor, records(12)
    fill(mill.prepared, made)
    said = mill.run("extract", "chat", "--model", str(target), "--dtype", "fp32", "--batch-tokens", "150")
    tokens = sum(len(one.prompt_token_ids or []) + len(one.output_ids or []) for one in made)
    assert f"12 samples of {tokens:,} tokens, at {4 * 4 * HIDDEN + 16:,} bytes each, need about" in said.stdout
    assert "read 12, refused 0, already made 0, already queued 0, queued 12" in said.stdout
    assert "start some with producer up --extract" in said.stderr
    worker = mill.worker(concurrency=8)
    _finish(mill, 12)

    _assert_complete(mill, [one.id for one in made])
    model = transformers.AutoModel.from_pretrained(target).eval()
    by_id = {line["id"]: line for line in _lines(mill)}
    for one in made[:3]:
        line = by_id[one.id]
        ids = [*(one.prompt_token_ids or []), *(one.output_ids or [])]
        read = torch.load(mill.folder(_HIDDEN).path / "states" / line["file"], weights_only=True)
        states, _before_norm = reference(model, ids)
        assert read["input_ids"].tolist() == ids
        torch.testing.assert_close(read["hidden_state"][0], states[-1], atol=1e-5, rtol=0)
        wanted = torch.cat([states[2], states[4], states[5]], dim=1)
        torch.testing.assert_close(read["aux_hidden_state"][0], wanted, atol=1e-5, rtol=0)
        assert (line["tokens"], line["layers"], line["dtype"]) == (len(ids), [2, 4, 5], "fp32")
        assert line["usage"]["completion_tokens"] == len(one.output_ids or [])

    again = mill.run("extract", "chat").stdout
    assert "already made 12, already queued 0, queued 0" in again
    fill(mill.prepared, records(14)[12:])
    assert "already made 12, already queued 0, queued 2" in mill.run("extract", "chat").stdout
    _finish(mill, 14)
    assert worker.stop() == 0


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("point", [Point.BEFORE_WRITE, Point.AFTER_FSYNC, Point.BEFORE_ACK])
def test_a_killed_worker_costs_no_sample_and_doubles_none(extractor: Mill, target: Path, point: Point) -> None:
    """Wherever SIGKILL meets it between the file and the ack, another worker goes on and every id is recorded once."""
    mill, made = extractor, records(10)
    fill(mill.prepared, made)
    mill.run("extract", "chat", "--model", str(target), "--batch-tokens", "60")
    assert_killed(worker_that_dies(mill, point, nth=2), timeout_s=_RUN_S)
    assert mill.recorded(_HIDDEN) < 10
    mill.worker()
    _finish(mill, 10)
    _assert_complete(mill, [one.id for one in made])


@pytest.mark.slow
def test_lost_and_damaged_files_are_made_again(extractor: Mill, target: Path) -> None:
    """A plain run finds missing files, --check reads all and tells of changed ones, --repair makes those anew, too."""
    mill, made = extractor, records(6)
    fill(mill.prepared, made)
    mill.run("extract", "chat", "--model", str(target))
    mill.worker()
    _finish(mill, 6)
    files = {line["id"]: mill.folder(_HIDDEN).path / "states" / line["file"] for line in _lines(mill)}
    files["s000"].unlink()
    whole = files["s001"].read_bytes()
    files["s001"].write_bytes(whole[:-30] + bytes(30))

    checked = mill.run("extract", "chat", "--check", expect=1)
    assert "read 6 files: 4 are as recorded, 1 missing, 1 damaged" in checked.stdout
    assert f"{files['s001']}: its content has changed" in checked.stderr
    went_on = mill.run("extract", "chat")
    assert f"{files['s000']}: it is not there" in went_on.stderr
    assert "already made 5, already queued 0, queued 1" in went_on.stdout
    _finish(mill, 6)
    assert "moved 1 record to quarantine.jsonl" in mill.run("extract", "chat", "--repair").stderr
    _finish(mill, 6)
    _assert_complete(mill, [one.id for one in made])


@pytest.mark.slow
def test_speculators_finds_its_rows_beside_the_states(extractor: Mill, target: Path, tmp_path: Path) -> None:
    """Row i of the arrow files holds the ids of hs_i.safetensors, also after the source has grown."""
    import datasets  # noqa: PLC0415  heavy
    import safetensors.torch  # noqa: PLC0415  same

    mill, made = extractor, records(5)
    fill(mill.prepared, made[:3])
    output = tmp_path / "out"
    options = ("--layout", "speculators", "--output", str(output))
    mill.run("extract", "chat", "--model", str(target), *options)
    fill(mill.prepared, made[3:])
    assert f"wrote 5 rows for speculators to {output}" in mill.run("extract", "chat").stdout
    mill.worker()
    _finish(mill, 5)

    rows = datasets.load_from_disk(str(output))
    assert rows.format["type"] == "torch"
    assert sorted(rows.column_names) == ["input_ids", "loss_mask", "seq_len"]
    for number, one in enumerate(made):
        read = safetensors.torch.load_file(output / "hidden_states" / f"hs_{number}.safetensors")
        prompt, answer = one.prompt_token_ids or [], one.output_ids or []
        assert read["token_ids"].tolist() == rows[number]["input_ids"].tolist() == [*prompt, *answer]
        assert rows[number]["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(answer)
        assert rows[number]["seq_len"] == len(prompt) + len(answer)
        assert read["hidden_states"].shape == (len(prompt) + len(answer), 4, HIDDEN)


@pytest.mark.slow
def test_one_command_starts_a_worker_in_the_background(mill: Mill, target: Path) -> None:
    """`up --extract` starts workers of hidden states without any model server, once; `down` stops them."""
    mill.env.update(MILL_DEVICE="cpu", OMP_NUM_THREADS="1")
    fill(mill.prepared, records(3))
    try:
        assert "started: extract1" in mill.run("up", "--extract", "--no-flower", timeout_s=_RUN_S).stdout
        assert "no worker that makes" not in mill.run("extract", "chat", "--model", str(target)).stderr
        _finish(mill, 3)
        assert "run already" in mill.run("up", "--extract", "--no-flower").stdout
    finally:
        assert "extract1" in mill.run("down").stdout


@pytest.mark.slow
def test_text_is_tokenised_anew_only_if_told_to(extractor: Mill, target: Path) -> None:
    """--retokenize makes marked states of records without ids; one whose thought gets lost fails, and is retried."""
    mill, question = extractor, [{"role": "user", "content": "Is it raining?"}]
    text = {"prompt_token_ids": None, "output_ids": None, "messages": question, "reasoning": "Let me see."}
    fill(mill.prepared, [record("ids"), record("text", content="No.", **text)])
    fill(mill.prepared, [record("lost", content="forgetful", **text)])
    assert "refused 2" in mill.run("extract", "chat", "--model", str(target)).stdout
    mill.worker()
    _finish(mill, 1)
    went_on = mill.run("extract", "chat", "--retokenize", "--new-settings").stdout
    assert "refused 0, already made 1, already queued 0, queued 2" in went_on
    _finish(mill, 3)
    assert {line["id"]: line["retokenized"] for line in _lines(mill)} == {"ids": False, "text": True}
    assert [(line["id"], line["reason"]) for line in _lines(mill, Kind.FAILED)] == [("lost", "lost_thought")]
    assert "queued 1 failed samples again" in mill.run("retry", _HIDDEN).stdout
    wait_until(lambda: len(_lines(mill, Kind.FAILED)) == 2, _RUN_S, "a second try")
    assert [line["round"] for line in _lines(mill, Kind.FAILED)] == [0, 1]
    counts = mill.counts(_HIDDEN)
    assert (counts["accepted"], counts["failed"], counts["left"], counts["refused"]) == (2, 1, 0, 0)


@pytest.mark.slow
def test_a_model_that_a_worker_cannot_load_pauses_the_dataset(extractor: Mill, target: Path, tmp_path: Path) -> None:
    """No sample fails for it: the dataset waits with the reason, and goes on once the model is there."""
    mill = extractor
    fill(mill.prepared, records(4))
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_bytes((target / "config.json").read_bytes())
    mill.run("extract", "chat", "--model", str(copy))
    worker = mill.worker()
    worker.wait_for_output("dataset chat.hidden is paused", _RUN_S)
    assert "cannot be loaded" in " ".join(mill.run("status", _HIDDEN, expect=None).stdout.split())
    assert mill.recorded(_HIDDEN) == 0
    for file in target.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    mill.run("resume", _HIDDEN)
    _finish(mill, 4)
    assert mill.counts(_HIDDEN)["failed"] == 0


def _shape(folder: Path, **fields: int) -> Path:
    folder.mkdir()
    shape = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCABULARY, **fields}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_what_cannot_be_taken_is_refused_with_reason_and_numbers(mill: Mill, tmp_path: Path) -> None:
    """Records without exact ids, that are too long, or of another vocabulary are named in refused.jsonl and counted."""
    made = [
        record("fine"),
        record("no-ids", prompt_token_ids=None, output_ids=None),
        record("long", prompt_token_ids=[1] * 90, output_ids=[2, 3]),
        record("foreign", prompt_token_ids=[VOCABULARY], output_ids=[2, 3]),
    ]
    fill(mill.prepared, made)
    model = _shape(tmp_path / "m", max_position_embeddings=64)
    said = mill.run("extract", "chat", "--model", str(model))
    assert "read 4, refused 3, already made 0, already queued 0, queued 1" in said.stdout
    assert "refused: no_exact_ids 1, too_long 1, outside_vocabulary 1" in said.stderr
    details = {line["id"]: line["detail"] for line in _lines(mill, Kind.REFUSED)}
    assert details["long"] == "92 tokens (prompt 90, answer 2), and at most 64 are taken"
    counts = mill.counts(_HIDDEN)
    assert (counts["read"], counts["refused"], counts["samples"], counts["queued"]) == (4, 3, 1, 1)
    assert "verify" not in mill.run("verify", _HIDDEN, expect=1).stderr


def test_other_settings_have_to_be_meant(mill: Mill, tmp_path: Path) -> None:
    """A second run with another precision is refused with the difference, and done with --new-settings."""
    fill(mill.prepared, records(2))
    model = str(_shape(tmp_path / "m"))
    mill.run("extract", "chat", "--model", model)
    refused = mill.run("extract", "chat", "--dtype", "fp32", expect=2)
    assert "bf16" in refused.stderr
    assert "--new-settings" in refused.stderr
    assert "already queued 2" in mill.run("extract", "chat", "--dtype", "fp32", "--new-settings").stdout
    larger = str(_shape(tmp_path / "larger", num_hidden_layers=12))
    mill.run("extract", "chat", "--model", larger, "--new-settings")
    plan = json.loads(mill.folder(_HIDDEN).manifest.read_text())["settings"][-1]["content"]["extract"]
    assert (plan["layers"], plan["num_layers"], plan["dtype"]) == ([2, 6, 9], 12, "fp32")


def test_an_extraction_of_another_name_knows_its_source(mill: Mill, tmp_path: Path) -> None:
    """Named by itself it goes on with its source and its settings; it cannot be made for another source."""
    fill(mill.prepared, records(2))
    fill(mill.prepared, records(1), dataset="other")
    mill.run("extract", "chat", "--model", str(_shape(tmp_path / "m")), "--into", "eight.hidden", "--dtype", "fp32")
    went_on = mill.run("extract", "eight.hidden").stdout
    assert "eight.hidden: read 2, refused 0, already made 0, already queued 2" in went_on
    assert "not of other" in mill.run("extract", "other", "--into", "eight.hidden", expect=2).stderr
    assert "does not exist yet" in mill.run("extract", "new.hidden", expect=2).stderr


def test_wrong_usage_is_one_sentence(mill: Mill, tmp_path: Path) -> None:
    """A missing model, name, dataset or disk is told without a traceback; nothing is queued."""
    fill(mill.prepared, records(2))
    model = str(_shape(tmp_path / "m"))
    for words, said in (
        (("chat",), "Give the target model's folder with --model PATH"),
        (("chat", "--model", "org/name"), "is not the folder of a model"),
        (("chat", "--model", model, "--into", "states"), "has to end in .hidden"),
        (("chat", "--model", model, "--layers", "9,10,11"), "9 is none of the model's layers"),
        (("nothing", "--model", model), "There is no dataset 'nothing'"),
    ):
        finished = mill.run("extract", *words, expect=2)
        assert said in finished.stderr
        assert "Traceback" not in finished.stderr
    small = _shape(tmp_path / "huge", hidden_size=10**12)
    too_much = mill.run("extract", "chat", "--model", str(small), expect=1)
    assert "go on with --force" in too_much.stderr
    assert not mill.folder(_HIDDEN).lines(Kind.PENDING).exists()
    taken = mill.enqueue(["Hi"], dataset="new.hidden", expect=2)
    assert "producer extract" in taken.stderr


def test_workers_that_ask_servers_leave_hidden_states_alone(mill: Mill, model_server: Any, tmp_path: Path) -> None:
    """A worker without MILL_EXTRACT reads prompts only; the samples of hidden states stay queued."""
    server: ModelServer = model_server()
    fill(mill.prepared, records(3))
    mill.run("extract", "chat", "--model", str(_shape(tmp_path / "m")))
    mill.enqueue(["One", "Two"], dataset="case")
    mill.worker()
    mill.wait_recorded(2)
    wait_until(lambda: mill.counts()["in_flight"] == 0, 20, "the prompts' end")
    assert mill.counts(_HIDDEN)["queued"] == 3
    said = " ".join(mill.run("status", _HIDDEN, expect=None).stdout.split())
    assert "No worker is running; start some with producer up --extract." in said
    assert len(server.requests) == 2


def test_a_worker_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to start in one sentence, with the package's extra."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"needs torch, .*pip install 'promptmill\[extract\]'"):
        require_packages()
