"""Templates: samples as the model's own chat template writes them, and one sentence where that cannot be."""

from __future__ import annotations

import pathlib
import sys

import pytest

from app.errors import UsageError
from producer import template
from producer.tokenizers import TemplateRefusedError

CHATML = (
    "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if messages[0].role == 'system' and messages | length == 1 %}{{ raise_exception('no user turn') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


@pytest.fixture
def chatml(tmp_path: pathlib.Path) -> str:
    """Write a template that shows tools, calls with their arguments as an object, and an option of its own."""
    pytest.importorskip("transformers")
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML, encoding="utf-8")
    return str(path)


def test_a_template_file(chatml: str) -> None:
    """Messages, tools and calls are rendered up to where the model begins to answer."""
    render = template.load(chatml)
    messages = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]

    assert render(messages, TOOLS) == (
        "tools: get_weather\n<|user|>Oslo?<|assistant|>get_weather(Oslo)<|tool|>3<|assistant|>"
    )
    assert messages[1]["tool_calls"] == [CALL]
    assert template.load(chatml, {"thinking": True})([messages[0]], None) == "<|user|>Oslo?<|assistant|><think>"


def test_a_conversation_that_the_template_refuses(chatml: str) -> None:
    """The template's own words are told."""
    with pytest.raises(TemplateRefusedError, match="no user turn"):
        template.load(chatml)([{"role": "system", "content": "x"}], None)


def test_a_folder_without_a_tokenizer(tmp_path: pathlib.Path) -> None:
    """A model that cannot be loaded is one sentence that names what can be given."""
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=r"no tokenizer can be loaded .* give a \.jinja file, a folder or a hub id"):
        template.load(str(tmp_path))


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers the sentence says what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'promptmill\[train\]'"):
        template.load("any/model")
