"""Exports through the trainers' own readers.

Their pins do not agree with this project's: `pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
specforge==0.2.0`, and `pip install loguru accelerate` beside the extras torch and train. Tests of a trainer that is not
installed are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from app.records import Usage
from producer.export.base import FormatOptions, Reasoning
from producer.export.run import export
from producer.export.vocabulary import export_vocabulary
from tests.support import tiny_model
from tests.support.exports import LOOK_UP, TOOL, USER, ledger_with, record, rows_of
from tests.support.processes import run_command
from tests.support.templates import QWEN3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]
VOCAB = 300
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "look_up"}
_SPECULATORS = "import sys; from speculators.__main__ import app; sys.argv[0] = 'speculators'; app()"


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@_needs("speculators")
def test_speculators_takes_token_rows_and_counts_as_we_do(tmp_path: Path) -> None:
    """Its prepare-data takes a tokens export unchanged, and its token_freq.pt is what token-freq writes."""
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")
    records = [
        record(
            f"s{number:03d}",
            prompt_token_ids=list(range(5 + number % 7)),
            output_ids=[(number * 31 + step * 17) % VOCAB for step in range(10 + number % 20)],
            usage=Usage(),
        )
        for number in range(40)
    ]
    tiny_model.main(tmp_path / "model")
    with ledger_with(tmp_path / "d", records) as ledger:
        export(ledger, format="tokens", output=tmp_path / "x.jsonl")
        export_vocabulary(ledger, format="token-freq", output=tmp_path / "freq.pt", vocab_size=None)
        export_vocabulary(ledger, format="vocab", output=tmp_path / "vocab.pt", vocab_size=VOCAB, draft_vocab_size=100)
    command = [sys.executable, "-c", _SPECULATORS, "prepare-data", "--model", "model", "--data", "x.jsonl"]
    command += ["--output", "prepared", "--seq-length", "512", "--num-preprocessing-workers", "1"]
    command += ["--minimum-valid-tokens", "4", "--no-skip-token-freq"]
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    finished = run_command(command, env=env, cwd=tmp_path, timeout_s=170)
    assert finished.code == 0, finished.stdout + finished.stderr

    taken = datasets.load_from_disk(str(tmp_path / "prepared"))
    as_sent = [(tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in rows_of(tmp_path / "x.jsonl")]
    as_read = [(tuple(map(int, row["input_ids"])), tuple(map(int, row["loss_mask"]))) for row in taken]
    assert Counter(as_read) == Counter(as_sent)
    theirs = torch.load(tmp_path / "prepared" / "token_freq.pt", weights_only=True)
    assert theirs == torch.load(tmp_path / "freq.pt", weights_only=True)

    mapping = pytest.importorskip("speculators.train.vocab_mapping")
    d2t, t2d = mapping.build_vocab_mappings_from_distribution(theirs, 100, VOCAB)
    ours = torch.load(tmp_path / "vocab.pt", weights_only=True)
    assert torch.equal(ours["d2t"], d2t)
    assert torch.equal(ours["t2d"], t2d)


THOUGHT = "<think>\nLet me think hard.\n</think>\n\nYes, gladly!<|im_end|>\n"
BLANK = "<think>\n\n</think>\n\nYes, gladly!<|im_end|>\n"


@_needs("specforge")
@pytest.mark.parametrize(
    ("case", "learned"),
    [
        (("tokens", None, None), "".join(map(chr, range(ord("#"), ord("F"))))),
        (("specforge", Reasoning.INLINE, "qwen"), THOUGHT),
        (("specforge", Reasoning.INLINE, "qwen3-thinking"), THOUGHT),
        (("specforge", Reasoning.FIELD, "qwen3-thinking"), THOUGHT),
        (("specforge", Reasoning.FIELD, "qwen"), BLANK),
    ],
)
def test_what_specforge_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, Reasoning | None, str | None], learned: str
) -> None:
    """SpecForge takes every row, and trains on the text that docs/exports.md says, thoughts lost or kept."""
    name, reasoning, template = case
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    builder = pytest.importorskip("specforge.data.prompt_builder")
    tokenizer = tiny_model._tokenizer()
    tokenizer.chat_template = QWEN3
    ids = tokenizer.encode("".join(map(chr, range(ord("#"), ord("F")))))
    fields = {"reasoning": "Let me think hard.", "content": "Yes, gladly!", "output_ids": ids, "usage": Usage()}
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [LOOK_UP]}, RESULT]
    records = [record("a", **fields), record("b", messages=asked, tools=[TOOL], **fields)]
    with ledger_with(tmp_path / "d", records) as ledger:
        export(ledger, format=name, output=tmp_path / "x.jsonl", options=FormatOptions(reasoning=reasoning))
    tasks = builder.prepare_prompt_tasks(
        str(tmp_path / "x.jsonl"),
        tokenizer,
        chat_template=template,
        max_length=512,
        is_preformatted=False,
        train_only_last_turn=False,
        cache_dir=None,
        cache_key=None,
        num_proc=1,
    )
    assert len(tasks) == 2
    for task in tasks:
        payload = task["payload"]
        pairs = zip(payload["input_ids"], payload["loss_mask"], strict=True)
        assert tokenizer.decode([int(id_) for id_, mask in pairs if int(mask)]).endswith(learned)
