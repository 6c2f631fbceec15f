"""Answers as each model server sends them, and every field of the completion that each must become.

Written after the servers' sources and recorded answers: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM, transformers serve
5.24, llama.cpp, llama-cpp-python, LiteLLM and OpenRouter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@dataclasses.dataclass(frozen=True)
class Shape:
    """One answer."""

    name: str
    backend: str
    """As records carry it; empty: not recognised."""
    body: Any
    """The decoded body; bytes where it is no JSON."""
    fields: dict[str, Any] | None = None
    """What differs from an empty completion; None where it is a fault."""
    fault: str = ""
    tools: bool = False
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)


def sent_usage(prompt: int | None = 3, completion: int | None = 4, **more: Any) -> dict[str, Any]:
    """Return a usage object as servers send it."""
    total = (prompt or 0) + (completion or 0)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **more}


def kept_usage(prompt: int | None = 3, completion: int | None = 4, **more: Any) -> dict[str, Any]:
    """Return the counts that a record keeps of it."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "reasoning_tokens": None, "cached_tokens": None}
    return {**counts, **more}


def vllm_body(
    message: dict[str, Any] | None = None, *, top: dict[str, Any] | None = None, **choice: Any
) -> dict[str, Any]:
    """Return an answer of vLLM."""
    said = {"role": "assistant", "content": "Hello.", "refusal": None, "annotations": None, "audio": None}
    said |= {"function_call": None, "reasoning": None, **(message or {})}
    one = {
        "index": 0,
        "message": said,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
    }
    whole = {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{**one, **choice}],
    }
    rest = {"usage": {**sent_usage(), "prompt_tokens_details": None}, "prompt_logprobs": None, "prompt_token_ids": None}
    return {**whole, **rest, "kv_transfer_params": None, **(top or {})}


def sglang_body(
    message: dict[str, Any] | None = None, *, top: dict[str, Any] | None = None, **choice: Any
) -> dict[str, Any]:
    """Return an answer of SGLang's OpenAI endpoint."""
    said = {"role": "assistant", "content": "Hello.", "reasoning_content": None, "tool_calls": None, **(message or {})}
    one = {"index": 0, "message": said, "logprobs": None, "finish_reason": "stop", "matched_stop": 2}
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [{**one, **choice}]}
    usage = {**sent_usage(), "prompt_tokens_details": None, "reasoning_tokens": 0}
    return {**whole, "usage": usage, "metadata": {"weight_version": "default"}, **(top or {})}


def llama_body(
    message: dict[str, Any] | None = None, *, verbose: dict[str, Any] | None = None, **choice: Any
) -> dict[str, Any]:
    """Return an answer of llama.cpp, with what `verbose` adds where it is given."""
    said = {"role": "assistant", "content": "Hello.", **(message or {})}
    one = {"finish_reason": "stop", "index": 0, "message": said, **choice}
    usage = sent_usage(prompt_tokens_details={"cached_tokens": 0})
    whole = {"choices": [one], "created": 1, "model": "m", "system_fingerprint": "b1-x", "object": "chat.completion"}
    seen = {"index": 0, "content": "Hello.", "tokens": [5, 6, 7, 2], "stop": True, "stop_type": "eos"}
    shown = {} if verbose is None else {"__verbose": {**seen, **verbose}}
    return {**whole, "usage": usage, "id": "chatcmpl-x", **shown, "timings": {"predicted_n": 4}}


def other_body(message: dict[str, Any], *, finish: Any = "stop", **top: Any) -> dict[str, Any]:
    """Return an answer in OpenAI's own form."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **top}


SAID = {"content": "Hello.", "finish_reason": "stop", "usage": kept_usage(), "model": "m", "response_id": "x"}
VLLM_SAID = {**SAID, "response_id": "chatcmpl-x"}
SGLANG_SAID = {**SAID, "stop_reason": 2, "usage": kept_usage(reasoning_tokens=0)}
LLAMA_SAID = {**VLLM_SAID, "usage": kept_usage(cached_tokens=0)}
IDS = {"ids": "server", "ids_end": "eos"}
BOTH_IDS = {"prompt_token_ids": [1, 2, 3], "output_ids": [5, 6, 7, 2]}
_HARMONY = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
_HARMONY_CALL = (
    "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)

VLLM = [
    Shape("plain", "vllm", vllm_body(), VLLM_SAID),
    Shape(
        "reasoning",
        "vllm",
        vllm_body({"reasoning": "So."}),
        {**VLLM_SAID, "reasoning": "So.", "reasoning_field": "reasoning"},
    ),
    Shape(
        "before its reasoning was renamed",
        "vllm",
        vllm_body({"reasoning_content": "So."}),
        {**VLLM_SAID, "reasoning": "So.", "reasoning_field": "reasoning_content"},
    ),
    Shape(
        "reasoning tokens are counted with a parser",
        "vllm",
        vllm_body(top={"usage": sent_usage(completion_tokens_details={"reasoning_tokens": 2})}),
        {**VLLM_SAID, "usage": kept_usage(reasoning_tokens=2)},
    ),
    Shape(
        "cached tokens where it tells them",
        "vllm",
        vllm_body(top={"usage": sent_usage(prompt_tokens_details={"cached_tokens": 1})}),
        {**VLLM_SAID, "usage": kept_usage(cached_tokens=1)},
    ),
    Shape(
        "exact ids",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 2], top={"prompt_token_ids": [1, 2, 3]}),
        {**VLLM_SAID, **IDS, **BOTH_IDS},
    ),
    Shape(
        "cut: the ids end with no end token",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 8], finish_reason="length"),
        {**VLLM_SAID, "finish_reason": "length", "output_ids": [5, 6, 7, 8], "ids": "server", "ids_end": "none"},
    ),
    Shape(
        "ended by a stop string",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 8], stop_reason="END"),
        {**VLLM_SAID, "stop_reason": "END", "output_ids": [5, 6, 7, 8], "ids": "server", "ids_end": "stop"},
    ),
    Shape(
        "ended by another end token of the model",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 9], stop_reason=9),
        {**VLLM_SAID, "stop_reason": 9, "output_ids": [5, 6, 7, 9], **IDS},
    ),
    Shape(
        "ended by a stop token of ours",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 9], stop_reason=9),
        {**VLLM_SAID, "stop_reason": 9, "output_ids": [5, 6, 7, 9], "ids": "server", "ids_end": "stop"},
        sampling={"stop_token_ids": [9]},
    ),
    Shape(
        "fewer output ids than it counted",
        "vllm",
        vllm_body(token_ids=[5, 6, 7], top={"prompt_token_ids": [1, 2, 3]}),
        {
            **VLLM_SAID,
            "prompt_token_ids": [1, 2, 3],
            "ids": "server",
            "notes": ["output_ids left out: the server gave 3 ids and counted 4 tokens"],
        },
    ),
    Shape(
        "fewer prompt ids than it counted",
        "vllm",
        vllm_body(token_ids=[5, 6, 7, 2], top={"prompt_token_ids": [1, 2]}),
        {
            **VLLM_SAID,
            "output_ids": [5, 6, 7, 2],
            **IDS,
            "notes": ["prompt_token_ids left out: the server gave 2 ids and counted 3 tokens"],
        },
    ),
    Shape(
        "cut within its thought",
        "vllm",
        vllm_body({"content": None, "reasoning": "So"}, finish_reason="length"),
        {**VLLM_SAID, "content": None, "reasoning": "So", "reasoning_field": "reasoning", "finish_reason": "length"},
    ),
    Shape(
        "ended by itself, and its parser found no end of the thought",
        "vllm",
        vllm_body({"content": None, "reasoning": "Hello."}),
        {**VLLM_SAID, "content": None, "reasoning": "Hello.", "reasoning_field": "reasoning"},
    ),
    Shape(
        "no parser: both tags in the content",
        "vllm",
        vllm_body({"content": "<think>\nSo.\n</think>\n\nHello."}),
        {**VLLM_SAID, "content": "\n\nHello.", "reasoning": "\nSo.\n", "reasoning_field": "content"},
    ),
    Shape(
        "no parser, and the prompt opened the thought",
        "vllm",
        vllm_body({"content": "So.</think>Hello."}),
        {**VLLM_SAID, "reasoning": "So.", "reasoning_field": "content"},
    ),
    Shape(
        "white space before the tag is kept in the whole text",
        "vllm",
        vllm_body({"content": "\n<think>So.</think>Hello."}),
        {**VLLM_SAID, "reasoning": "So.", "reasoning_field": "content", "raw": "\n<think>So.</think>Hello."},
    ),
    Shape(
        "no parser, cut within its thought",
        "vllm",
        vllm_body({"content": "<think>So"}, finish_reason="length"),
        {**VLLM_SAID, "content": "<think>So", "finish_reason": "length"},
    ),
    Shape(
        "a tag leaked into the content",
        "vllm",
        vllm_body({"content": "so</think>yes", "reasoning": "So."}),
        {**VLLM_SAID, "content": "so</think>yes", "reasoning": "So.", "reasoning_field": "reasoning"},
    ),
    Shape(
        "gpt-oss without a parser",
        "vllm",
        vllm_body({"content": _HARMONY}),
        {**VLLM_SAID, "content": "Yes.", "reasoning": "So.", "reasoning_field": "content", "raw": _HARMONY},
    ),
    Shape(
        "gpt-oss, cut within its thought",
        "vllm",
        vllm_body({"content": "<|channel|>analysis<|message|>So"}, finish_reason="length"),
        {
            **VLLM_SAID,
            "content": None,
            "reasoning": "So",
            "reasoning_field": "content",
            "finish_reason": "length",
            "raw": "<|channel|>analysis<|message|>So",
        },
    ),
    Shape(
        "gpt-oss without a parser: a call in its channel",
        "vllm",
        vllm_body({"content": _HARMONY_CALL}),
        {
            **VLLM_SAID,
            "content": None,
            "reasoning": "So.",
            "reasoning_field": "content",
            "tool_calls": [{**CALL, "id": "call_0"}],
            "raw": _HARMONY_CALL,
        },
        tools=True,
    ),
    Shape(
        "gpt-oss, one mark of a channel left in the content",
        "vllm",
        vllm_body({"content": "<|channel|>final Yes."}),
        {**VLLM_SAID, "content": "<|channel|>final Yes."},
    ),
    Shape("gpt-oss that says nothing (vllm#41902)", "vllm", vllm_body({"content": None}), fault="empty_answer"),
    Shape(
        "tool calls",
        "vllm",
        vllm_body({"content": None, "tool_calls": [CALL]}, finish_reason="tool_calls"),
        {**VLLM_SAID, "content": None, "tool_calls": [CALL], "finish_reason": "tool_calls"},
        tools=True,
    ),
    Shape(
        "tool calls that no parser read",
        "vllm",
        vllm_body({"content": CALL_TEXT}),
        {**VLLM_SAID, "content": CALL_TEXT, "unparsed_calls": True},
        tools=True,
    ),
    Shape(
        "an answer about tool calls, with no tools offered",
        "vllm",
        vllm_body({"content": CALL_TEXT}),
        {**VLLM_SAID, "content": CALL_TEXT},
    ),
    Shape(
        "text beside tool calls, and a thought before them",
        "vllm",
        vllm_body({"content": "I look.", "reasoning": "So.", "tool_calls": [CALL]}, finish_reason="tool_calls"),
        {
            **VLLM_SAID,
            "content": "I look.",
            "reasoning": "So.",
            "reasoning_field": "reasoning",
            "tool_calls": [CALL],
            "finish_reason": "tool_calls",
        },
        tools=True,
    ),
    Shape(
        "the end token alone: it says nothing",
        "vllm",
        vllm_body({"content": ""}, token_ids=[2], top={"usage": sent_usage(3, 1)}),
        {**VLLM_SAID, "content": "", "usage": kept_usage(completion=1), **IDS, "output_ids": [2]},
    ),
    Shape(
        "no room for a single token",
        "vllm",
        vllm_body({"content": ""}, finish_reason="length", top={"usage": sent_usage(3, 0)}),
        {**VLLM_SAID, "content": "", "finish_reason": "length", "usage": kept_usage(completion=0)},
    ),
    Shape("aborted by the engine, with status 200", "vllm", vllm_body(finish_reason="abort"), fault="aborted"),
    Shape("ended by the repetition detector", "vllm", vllm_body(finish_reason="repetition"), fault="unfinished"),
    Shape("no finish reason", "vllm", vllm_body(finish_reason=None), fault="unfinished"),
    Shape("a finish reason that nobody knows", "vllm", vllm_body(finish_reason="paused"), fault="unfinished"),
]
