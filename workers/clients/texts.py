"""A model's whole text taken apart: reasoning, answer and tool calls, without changing a character of either."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

OPENING, CLOSING = "<think>", "</think>"

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_CHANNEL_START = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>(\w+)([^<]*)(?:<\|constrain\|>\w+)?<\|message\|>")
_CHANNEL_END = re.compile(r"<\|(?:end|return|call)\|>")
_FINAL = "final"
_TO_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_CALL_MARKUP = (
    "<tool_call>",
    "<tool_calls>",
    "[TOOL_CALLS]",
    "<function=",
    "<function_call>",
    "<|python_tag|>",
    "<|tool_call",
    "<\uff5ctool\u2581call",
    "<\uff5ctool\u2581calls",
)
"""How the calls of known model families begin; the last two are DeepSeek's."""


class Parts(NamedTuple):
    """A text taken apart."""

    reasoning: str | None
    content: str | None
    calls: list[dict[str, Any]] | None = None
    plain: bool = True
    """Whether reasoning and content say the whole text: think tags and nothing else was taken out."""


def split_think(content: str) -> tuple[str, str] | None:
    """Split content that a server without a reasoning parser returned whole into reasoning and content.

    Some templates put the opening tag into the prompt, so a lone closing tag splits too. Text is never changed, only
    the tags are taken out. None: there is nothing to split, or it is unclear where (several tags, or a closing tag
    in quotes), and then the tags stay for the verdict to see.
    """
    head, closing, tail = content.partition(CLOSING)
    if not closing or CLOSING in tail or OPENING in tail:
        return None
    before, opening, thoughts = head.partition(OPENING)
    if opening:
        return None if before.strip() or OPENING in thoughts else (thoughts, tail)
    quoted = head[-1:] in {"`", '"', "'"} and tail[:1] == head[-1:]
    return None if quoted else (head, tail)


def split_channels(text: str) -> Parts | None:
    """Split the channels that gpt-oss writes: `final` is the answer, `to=functions.NAME` a call, the rest thought.

    None: there are no channels, or text stands outside of them, and then the marks stay for the verdict to see. A
    text that was cut has its last channel open; without a `final` one it has no answer.
    """
    if _CHANNEL not in text or _MESSAGE not in text:
        return None
    thoughts: list[str] = []
    answers: list[str] = []
    calls: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        start = _CHANNEL_START.match(text, at)
        if start is None:
            return None
        end = _CHANNEL_END.search(text, start.end())
        body = text[start.end() : end.start() if end else len(text)]
        if _MESSAGE in body or _CHANNEL in body:
            return None
        called = _TO_FUNCTION.search(start.group(2))
        if called and end:
            calls.append(_call(called.group(1), body, len(calls)))
        else:
            (answers if start.group(1) == _FINAL else thoughts).append(body)
        at = end.end() if end else len(text)
    return Parts(
        "\n".join(filter(None, thoughts)) or None, "".join(answers) if answers else None, calls or None, plain=False
    )


def take_apart(text: str, *, opened: bool, tools: bool) -> Parts:
    """Take apart a text that no server has parsed.

    `opened`: the prompt ends inside a thought, so that a text without a closing tag is thought throughout, as is one
    that begins with an opening tag and never closes it. `tools`: calls of tools may stand in it.
    """
    if (channels := split_channels(text)) is not None:
        return channels
    if split := split_think(text):
        reasoning, content = split
        plain = text in {f"{reasoning}{CLOSING}{content}", f"{OPENING}{reasoning}{CLOSING}{content}"}
        parts = Parts(reasoning, content, plain=plain)
    elif CLOSING not in text and text.lstrip().startswith(OPENING):
        thought = text.lstrip().removeprefix(OPENING)
        parts = Parts(thought, None, plain=text == OPENING + thought)
    elif CLOSING not in text and opened:
        parts = Parts(text, None)
    else:
        parts = Parts(None, text)
    return _with_calls(parts) if tools and parts.content else parts


def holds_call_markup(content: str | None) -> bool:
    """Tell whether the markup of a tool call stands in the content."""
    return content is not None and any(mark in content for mark in _CALL_MARKUP)


def _with_calls(parts: Parts) -> Parts:
    """Read the calls of Qwen and Hermes models; one that is no sound JSON leaves all of them in the text."""
    content = parts.content or ""
    calls: list[dict[str, Any]] = []
    for found in _CALL.finditer(content):
        try:
            call = json.loads(found.group(1))
            arguments = call["arguments"] if "arguments" in call else call["parameters"]
            name = call["name"]
        except (ValueError, KeyError, TypeError):
            return parts
        if not isinstance(name, str):
            return parts
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(_call(name, text, len(calls)))
    if not calls:
        return parts
    rest = _CALL.sub("", content)
    return Parts(parts.reasoning, rest if rest.strip() else None, calls, plain=False)


def _call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
