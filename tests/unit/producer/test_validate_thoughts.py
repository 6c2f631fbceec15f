"""The lost-thought check, with templates that keep, drop, blank and double the thoughts of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producer.validate.problems import Problem
from producer.validate.renderer import Renderer, load_renderer
from producer.validate.report import Report
from producer.validate.run import Rules, validate
from tests.support.exports import TOOL, USER
from tests.support.templates import DEEPSEEK, KIMI, KIMI_OPENED, MARKED, OPENED, QWEN3, QWEN25, STRICT

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

REASONING, CONTENT = "First I count\n  the apples. ", "There are 42.\n"
FIELD = {"role": "assistant", "content": CONTENT, "reasoning_content": REASONING}
INLINE = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{CONTENT}", "weight": 1}
KIMI_INLINE = {"role": "assistant", "content": f"<think>{REASONING}</think>{CONTENT}", "weight": 1}
PLAIN = {"role": "assistant", "content": CONTENT, "reasoning_content": ""}
HISTORY = [USER, {"role": "assistant", "content": "Yes?", "reasoning_content": "Early."}, USER]
CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Zürich", "n": 3}'}}
CALLS = {"role": "assistant", "content": "", "reasoning_content": REASONING, "tool_calls": [CALL]}


def _renderer(folder: Path, template: str, **arguments: Any) -> Renderer:
    path = folder / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return load_renderer(None, path, arguments, trust_remote_code=False)


def _check(folder: Path, template: str, *answers: dict[str, Any], threshold: float = 0.0) -> Report:
    rows = [
        {"id": str(number), "messages": [*HISTORY, answer], "tools": json.dumps([TOOL])}
        for number, answer in enumerate(answers)
    ]
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return validate([path], Rules(threshold=threshold), renderer=_renderer(folder, template))


@pytest.mark.parametrize(
    ("template", "answer", "problem"),
    [
        (QWEN3, FIELD, None),
        (QWEN3, INLINE, None),
        (QWEN3, KIMI_INLINE, None),
        (QWEN3, PLAIN, None),
        (QWEN3, CALLS, None),
        (OPENED, FIELD, None),
        (OPENED, INLINE, None),
        (QWEN25, FIELD, Problem.LOST_REASONING),
        (QWEN25, INLINE, None),
        (DEEPSEEK, FIELD, Problem.LOST_REASONING),
        (DEEPSEEK, INLINE, Problem.LOST_REASONING),
        (DEEPSEEK, PLAIN, None),
        (KIMI, FIELD, Problem.EMPTY_THOUGHT),
        (KIMI, KIMI_INLINE, Problem.DOUBLED_THOUGHT),
        (KIMI, PLAIN, None),
        (KIMI_OPENED, FIELD, Problem.EMPTY_THOUGHT),
        (KIMI_OPENED, KIMI_INLINE, Problem.DOUBLED_THOUGHT),
        (MARKED, FIELD, None),
        ("{{ messages[-1].reasoning_content }}", FIELD, Problem.LOST_CONTENT),
        ("{{ messages[-1].content }}", CALLS, Problem.LOST_REASONING),
        (QWEN25, CALLS, Problem.ESCAPED_ARGUMENTS),
    ],
)
def test_what_becomes_of_thoughts(
    tmp_path: Path, template: str, answer: dict[str, Any], problem: Problem | None
) -> None:
    """A template that trains on something else than the answer is named by what it does; others pass."""
    report = _check(tmp_path, template, answer)
    if problem is None:
        assert dict(report.findings.counts) == {}
        assert report.is_sound
    else:
        assert report.findings.counts[problem] == 1
        assert not report.is_sound


def test_lost_calls(tmp_path: Path) -> None:
    """A template that does not know tool calls loses them, and one that writes other arguments too."""
    for template in ("{{ messages[-1].reasoning_content }}", QWEN3.replace("call.function.arguments", "'{}'")):
        assert _check(tmp_path, template, CALLS).findings.counts[Problem.LOST_TOOL_CALL] == 1


def test_a_refusing_template(tmp_path: Path) -> None:
    """Conversations that the template refuses are counted, with its words."""
    rows = [{"id": "a", "messages": [{"role": "system", "content": "Be brief."}, USER, PLAIN], "tools": "null"}]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(rows[0]) + "\n")
    report = validate([path], Rules(), renderer=_renderer(tmp_path, STRICT))
    assert report.findings.counts == {Problem.NOT_RENDERED: 1}
    assert "System role not supported" in report.findings.examples[Problem.NOT_RENDERED][0].detail
    assert not report.is_sound


def test_the_threshold(tmp_path: Path) -> None:
    """Lost thoughts are tolerated up to the threshold's share of rows."""
    answers = [PLAIN] * 98 + [FIELD] * 2
    assert _check(tmp_path, DEEPSEEK, *answers, threshold=0.02).is_sound
    report = _check(tmp_path, DEEPSEEK, *answers, threshold=0.019)
    assert not report.is_sound
    assert "FAIL         2    2.00 %  lost_reasoning: " in "\n".join(report.sentences())
    assert [example.number for example in report.findings.examples[Problem.LOST_REASONING]] == [99, 100]


def test_template_arguments(tmp_path: Path) -> None:
    """Arguments for the template change what is rendered."""
    template = "{% if keep %}{{ messages[-1].reasoning_content }}{% endif %}{{ messages[-1].content }}"
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": [USER, FIELD], "tools": "null"}) + "\n")
    for keep in (True, False):
        assert validate([path], Rules(), renderer=_renderer(tmp_path, template, keep=keep)).is_sound is keep


def test_marks_of_answers(tmp_path: Path) -> None:
    """A template without generation marks is pointed out: some trainers would learn nothing from it."""
    words = "no {% generation %} marks"
    assert words in "\n".join(_check(tmp_path, QWEN3, FIELD).sentences())
    assert words not in "\n".join(_check(tmp_path, MARKED, FIELD).sentences())


@pytest.mark.parametrize("shape", ["conversations", "senders", "completions"])
def test_every_shape_is_rendered(tmp_path: Path, shape: str) -> None:
    """Thoughts are looked for in every shape of conversation."""
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": INLINE["content"]}]
    rows = {
        "conversations": {"id": "a", "conversations": [USER, FIELD]},
        "senders": {"id": "a", "conversations": turns},
        "completions": {"id": "a", "prompt": [USER], "completion": [FIELD]},
    }
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(rows[shape]) + "\n")
    assert validate([path], Rules(), renderer=_renderer(tmp_path, QWEN3)).is_sound
    lost = validate([path], Rules(), renderer=_renderer(tmp_path, DEEPSEEK))
    assert lost.findings.counts == {Problem.LOST_REASONING: 1}
