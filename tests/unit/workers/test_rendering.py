"""Prompts are rendered as model servers render them, with the model's own tokenizer and template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.extraction import SourceRecord
from producer.simulator.tokens import MARKS, decode, encode
from tests.support.byte_tokenizer import PlainByteTokenizer, make_byte_tokenizer
from tests.support.templates import OPENED, STRICT
from tests.unit.app.test_extraction import plan
from workers.extract.model import ModelUnusableError
from workers.extract.tokens import Retokenizer
from workers.rendering import PromptRefusedError, Tokenizer, Tokenizers, load

USER = {"role": "user", "content": "Hi \U0001f305 <think>"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def rendered(*messages: dict[str, Any], sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the template was given."""
    loaded = PlainByteTokenizer()
    Tokenizer(loaded, "toy").render(messages, None, sampling or {})
    return loaded.asked[0]


def test_messages_reach_the_template_as_servers_hand_them_on() -> None:
    """Text parts are one text, null is empty, the arguments of calls are objects, and thoughts have one name."""
    asked = rendered(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "So.", "tool_calls": [CALL]},
    )
    first, second = asked["turns"]
    assert first["content"] == "a\nb"
    assert (second["content"], second["reasoning_content"]) == ("", "So.")
    assert second["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert asked["add_generation_prompt"] is True
    assert CALL["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "high"},
            {"reasoning_effort": "high", "enable_thinking": True, "thinking": True},
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_options_reach_the_template(sampling: dict[str, Any], options: dict[str, Any]) -> None:
    """The template's options are the dataset's; an effort turns thinking on or off unless an option says otherwise."""
    asked = rendered(USER, sampling=sampling)
    assert {name: asked[name] for name in asked if name not in {"turns", "tools", "add_generation_prompt"}} == options


def test_options_that_are_none_are_refused() -> None:
    """Options of the wrong type, which a request's further fields may hold, are refused as servers refuse them."""
    with pytest.raises(PromptRefusedError, match="chat_template_kwargs is no JSON object"):
        rendered(USER, sampling={"chat_template_kwargs": "enable_thinking"})


def test_an_opened_thought_is_seen() -> None:
    """A prompt that ends with an opening tag begins the answer inside a thought."""
    for opens in (False, True):
        prompt = Tokenizer(PlainByteTokenizer(opens_thought=opens), "toy").render([USER], None, {})
        assert prompt.opens_thought is opens


def test_what_is_no_text_is_refused() -> None:
    """Images cannot be rendered here; the sentence says what could send them."""
    with pytest.raises(PromptRefusedError, match="MILL_PROTOCOL=auto"):
        rendered({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


# With the library


def test_a_real_tokenizer_gives_the_templates_text(tmp_path: Path) -> None:
    """The ids of a rendered prompt decode to the template's text; its end token is known, and so is the template."""
    pytest.importorskip("transformers")
    tokenizer = load(str(make_byte_tokenizer(tmp_path)))
    prompt = tokenizer.render([USER], None, {})
    expected = "<|im_start|>user\nHi \U0001f305 <think><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.ids) == expected
    assert prompt.ids == encode(expected)
    assert tokenizer.decode(prompt.ids, skip_special=True) == "user\nHi \U0001f305 <think>\nassistant\n"
    assert tokenizer.end_ids == {MARKS["<|im_end|>"]}
    other = load(str(make_byte_tokenizer(tmp_path / "other", template=OPENED)))
    assert other.fingerprint != tokenizer.fingerprint
    assert other.render([USER], None, {}).opens_thought
    assert decode(other.render([USER], None, {}).ids).endswith("<think>\n")


def test_the_generation_config_names_more_end_tokens(tmp_path: Path) -> None:
    """Models with several end tokens list them beside the tokenizer's."""
    pytest.importorskip("transformers")
    folder = make_byte_tokenizer(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 256]}', encoding="utf-8")
    assert load(str(folder)).end_ids == {256, 257}


def test_the_templates_own_words_are_told(tmp_path: Path) -> None:
    """A conversation that the template refuses is refused with its words."""
    pytest.importorskip("transformers")
    tokenizer = load(str(make_byte_tokenizer(tmp_path, template=STRICT)))
    with pytest.raises(PromptRefusedError, match="System role not supported"):
        tokenizer.render([{"role": "system", "content": "x"}, USER], None, {})


def test_a_tokenizer_is_loaded_once(tmp_path: Path) -> None:
    """All calls of a process share one tokenizer, loaded when it is first needed, and tell its template."""
    pytest.importorskip("transformers")
    tokenizers = Tokenizers(str(make_byte_tokenizer(tmp_path)))
    assert tokenizers.fingerprints == {}

    async def story() -> set[int]:
        return {id(one) for one in await asyncio.gather(*(tokenizers.of("any model") for _ in range(8)))}

    assert len(asyncio.run(story())) == 1
    [(name, fingerprint)] = tokenizers.fingerprints.items()
    assert (name, len(fingerprint)) == (str(tmp_path), 16)


@pytest.mark.parametrize("template", ["", None])
def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path, template: Any) -> None:
    """A tokenizer that cannot render chats, and one that is not there, are told in one sentence with the setting."""
    pytest.importorskip("transformers")
    folder = make_byte_tokenizer(tmp_path, template=template)
    with pytest.raises(UsageError, match=r"has no chat template; set MILL_TOKENIZER"):
        load(str(folder))
    with pytest.raises(UsageError, match=r"cannot be loaded \(.*\); set MILL_TOKENIZER"):
        load(str(tmp_path / "nowhere"))


def test_a_retokenizer_says_that_a_tokenizer_is_broken(tmp_path: Path) -> None:
    """A tokenizer.json that cannot be understood, for which the library raises a bare Exception, is one sentence."""
    pytest.importorskip("transformers")
    folder = make_byte_tokenizer(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "model": {"type": "none"}}), encoding="utf-8")
    record = SourceRecord(id="a", messages=[USER], content="No.")
    with pytest.raises(
        ModelUnusableError, match=r"^The tokenizer of .* cannot be loaded: data did not match [^\n]+\.$"
    ):
        Retokenizer().sequence(record, plan(model=str(folder), retokenize=True))


def test_without_the_library_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers a worker names the extra that brings it."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'promptmill\[train\]'"):
        load("any")


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("no JSON", "no JSON"),
        ("[" * 200_000, "[" * 200_000),
    ],
)
def test_arguments_are_objects_where_they_can_be(given: object, rendered: object) -> None:
    """A call without arguments has an empty object, as model servers give templates; what nobody can read stays."""
    loaded = PlainByteTokenizer()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    Tokenizer(loaded, "plain").render([{"role": "assistant", "content": "", "tool_calls": [call]}], None, {})
    assert loaded.asked[0]["turns"][0]["tool_calls"][0]["function"]["arguments"] == rendered
