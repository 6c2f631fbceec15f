"""A real Hugging Face tokenizer whose ids are those of the fake model server's token endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from producer.simulator.tokens import END, MARKS, START, decode, encode
from tests.support.templates import QWEN3
from workers.rendering import Tokenizer, Tokenizers


def make_byte_tokenizer(folder: Path, *, template: str = QWEN3) -> Path:
    """Write the tokenizer with a chat template of Qwen's kind, and return its folder."""
    import tokenizers  # noqa: PLC0415 - heavy, and only some tests have it
    import transformers  # noqa: PLC0415 - same

    inner: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_bytes(), merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    # Tags of thought are tokens of their own, but not special ones, as in real reasoning models.
    for mark in MARKS:
        inner.add_tokens([tokenizers.AddedToken(mark, normalized=False, special=mark in {START, END})])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, chat_template=template)
    made.save_pretrained(folder)
    return folder


def _bytes() -> dict[str, int]:
    """Return the characters that stand for the bytes in byte-level vocabularies: each byte's id is its value."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


class PlainByteTokenizer:
    """The same ids without a library: what the product needs of a Hugging Face tokenizer, and ChatML."""

    chat_template = "ChatML"
    eos_token_id = MARKS[END]
    name_or_path = ""

    def __init__(self, *, opens_thought: bool = False) -> None:
        self._opens_thought = opens_thought
        self.asked: list[dict[str, Any]] = []
        """The options of each rendering."""

    def apply_chat_template(self, turns: list[dict[str, Any]], *, tokenize: bool, **options: Any) -> str:
        """Return the conversation as text."""
        assert not tokenize
        self.asked.append({"turns": turns, **options})
        if any(turn["role"] == "forbidden" for turn in turns):
            raise ValueError("Unexpected role: forbidden")
        text = "".join(f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in turns)
        return f"{text}{START}assistant\n" + ("<think>\n" if self._opens_thought else "")

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Return the ids of a text."""
        assert not add_special_tokens
        return {"input_ids": encode(text)}

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Return the text of ids."""
        assert not clean_up_tokenization_spaces
        special = {MARKS[START], MARKS[END]} if skip_special_tokens else set()
        return decode([id_ for id_ in ids if id_ not in special])


def loaded_tokenizers(
    tokenizer: PlainByteTokenizer | None = None, *, model: str = "toy-model", named: bool = False
) -> Tokenizers:
    """Return a process's tokenizers, of which the model's is loaded; `named`: as MILL_TOKENIZER names it."""
    made = Tokenizers(model if named else None)
    made._loaded[model] = Tokenizer(tokenizer or PlainByteTokenizer(), model)
    return made
