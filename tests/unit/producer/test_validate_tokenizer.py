"""Validation with a real tokenizer: its vocabulary, its end token, its template, and lengths in tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from producer.validate.problems import Problem
from producer.validate.renderer import Renderer, load_renderer
from producer.validate.report import Report
from producer.validate.run import Rules, validate
from producer.validate.tokens import TokenRules
from tests.support import tiny_model
from tests.support.exports import USER

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

INLINE = {"role": "assistant", "content": "<think>\nLet me think.\n</think>\n\nYes, gladly!"}
FIELD = {"role": "assistant", "content": "Yes, gladly!", "reasoning_content": "Let me think."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny model's tokenizer, and a second end token in its generation config."""
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tiny_model._tokenizer()
    tokenizer.save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.pad_token_id]}))
    return made


def _load(folder: Path) -> Renderer:
    return load_renderer(str(folder), None, {}, trust_remote_code=False)


def _check(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **limits: Any) -> Report:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = _load(folder)
    ends = renderer.end_tokens()
    rules = Rules(
        TokenRules(vocab_size=renderer.vocab_size, end_ids=frozenset(ends), **limits), frozenset(ends.values())
    )
    return validate([path], rules, renderer=renderer)


def test_end_tokens(folder: Path) -> None:
    """Answers may end with the tokenizer's end token and with those of the generation config."""
    assert set(_load(folder).end_tokens().values()) == {"<|im_end|>", "<|endoftext|>"}


def test_token_rows(folder: Path, tmp_path: Path) -> None:
    """Ids beyond the tokenizer's vocabulary and answers without its end token are found."""
    renderer = _load(folder)
    assert renderer.vocab_size is not None
    (end,) = (id_ for id_, text in renderer.end_tokens().items() if text == "<|im_end|>")
    masks = {"loss_mask": [0, 1, 1]}
    rows = [
        {"id": "a", "input_ids": [5, 6, end], **masks},
        {"id": "b", "input_ids": [5, renderer.vocab_size, end], **masks},
        {"id": "c", "input_ids": [5, 6, 7], **masks},
    ]
    found = _check(folder, tmp_path, rows).findings
    assert found.counts == {Problem.BAD_TOKEN: 1, Problem.NO_END_TOKEN: 1}
    assert [found.examples[problem][0].id for problem in (Problem.BAD_TOKEN, Problem.NO_END_TOKEN)] == ["b", "c"]


def test_conversations(folder: Path, tmp_path: Path) -> None:
    """Its template keeps inline thoughts, and loses those in a field."""
    for answer, lost in [(INLINE, {}), (FIELD, {Problem.LOST_REASONING: 1})]:
        row = {"id": "a", "messages": [USER, answer], "tools": "null"}
        assert _check(folder, tmp_path, [row]).findings.counts == lost


def test_lengths_in_tokens(folder: Path, tmp_path: Path) -> None:
    """With --max-length conversations are counted in tokens as rendered."""
    row = {"id": "a", "messages": [USER, INLINE], "tools": "null"}
    length = _load(folder).count(_load(folder).text(row["messages"], None, asks=False))  # type: ignore[arg-type]
    assert length is not None
    assert _check(folder, tmp_path, [row], max_length=length).is_sound
    assert _check(folder, tmp_path, [row], max_length=length - 1).findings.counts == {Problem.TOO_LONG: 1}


def test_no_tokenizer_there(tmp_path: Path) -> None:
    """A folder without a tokenizer is refused in one sentence."""
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_renderer(str(tmp_path), None, {}, trust_remote_code=False)
