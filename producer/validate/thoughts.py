"""The lost-thought check: whether what the model thought and said is in the text that a trainer trains on.

A chat template decides what becomes of an answer's reasoning: some blank the thoughts of finished turns, some put an
empty thought before them, some do not know the field. A trainer notices none of it. Here the conversation is rendered
as the trainer does it, the part behind the prompt is taken, and reasoning, content and tool calls are looked for in it.
White space does not count, because templates normalise it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from producer.validate.problems import Problem
from producer.validate.renderer import Renderer
from producer.validate.shapes import Conversation, content_of, reasoning_of

_EMPTY_THOUGHT = "<think></think>"
_SHOWN_CHARS = 60
_ROUNDS_BACK = 200
"""How many characters before the first difference a think tag of the prompt may begin."""


def check_thoughts(conversation: Conversation, renderer: Renderer) -> Iterator[tuple[Problem, str]]:
    """Yield what of the last message is not trained on as it is; raises TemplateRefusedError."""
    answer = conversation.messages[-1]
    learned = _squeezed(learned_text(conversation, renderer))
    reasoning = _squeezed(reasoning_of(answer))
    there = reasoning in learned
    if reasoning and not there:
        yield (Problem.EMPTY_THOUGHT if _EMPTY_THOUGHT in learned else Problem.LOST_REASONING), _shown(learned)
    elif reasoning and f"{_EMPTY_THOUGHT}<think>" in learned:
        yield Problem.DOUBLED_THOUGHT, _shown(learned)
    content = _squeezed(content_of(answer))
    if content and content not in learned:
        yield Problem.LOST_CONTENT, _shown(learned)
    yield from _check_calls(answer.get("tool_calls") or [], learned)


def learned_text(conversation: Conversation, renderer: Renderer) -> str:
    """Return what the rendered conversation has behind the prompt, the prompt's own open think tag included."""
    messages, tools = conversation.messages, conversation.tools
    whole = renderer.text(messages, tools, asks=False)
    prompt = renderer.text(messages[:-1], tools, asks=True) if len(messages) > 1 else ""
    shared = _shared(whole, prompt)
    # The opening tag stands in the prompt of some templates; trainers begin at the assistant's header, before it.
    opened = whole.rfind("<think>", max(0, shared - _ROUNDS_BACK), shared)
    if opened >= 0 and "</think>" not in whole[opened:shared]:
        return whole[opened:]
    return whole[shared:]


def _shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    least, most = 0, min(len(first), len(second))
    while least < most:
        middle = (least + most + 1) // 2
        if first[:middle] == second[:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _check_calls(calls: Sequence[Any], learned: str) -> Iterator[tuple[Problem, str]]:
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        name, arguments = str(function.get("name", "")), function.get("arguments")
        if isinstance(arguments, str) and _is_escaped(arguments, learned):
            yield Problem.ESCAPED_ARGUMENTS, f"{name}: {_shown(json.dumps(arguments))}"
        elif name not in learned or not all(_holds(learned, leaf) for leaf in _leaves(_parsed(arguments))):
            yield Problem.LOST_TOOL_CALL, f"{name}: {_shown(learned)}"


def _is_escaped(arguments: str, learned: str) -> bool:
    """Tell whether a text of arguments was written as a JSON string instead of an object."""
    quoted = [json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)]
    return '"' in arguments and any(_squeezed(one) in learned for one in quoted)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers inside a call's arguments."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _holds(learned: str, leaf: str) -> bool:
    forms = (leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1])
    return any(_squeezed(form) in learned for form in forms)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")
