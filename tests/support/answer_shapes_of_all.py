"""The answers of SGLang and llama.cpp, and the table of all servers' answers."""

from __future__ import annotations

import json

from tests.support.answer_shapes import (
    BOTH_IDS,
    CALL,
    CALL_TEXT,
    IDS,
    LLAMA_SAID,
    SGLANG_SAID,
    VLLM,
    Shape,
    kept_usage,
    llama_body,
    sent_usage,
    sglang_body,
)
from tests.support.answer_shapes_others import OTHERS

SGLANG = [
    Shape("plain", "sglang", sglang_body(), SGLANG_SAID),
    Shape(
        "reasoning",
        "sglang",
        sglang_body({"reasoning_content": "So."}, top={"usage": sent_usage(reasoning_tokens=2)}),
        {
            **SGLANG_SAID,
            "reasoning": "So.",
            "reasoning_field": "reasoning_content",
            "usage": kept_usage(reasoning_tokens=2),
        },
    ),
    Shape(
        "exact ids",
        "sglang",
        sglang_body(prompt_token_ids=[1, 2, 3], response_token_ids=[5, 6, 7, 2]),
        {**SGLANG_SAID, **IDS, **BOTH_IDS},
    ),
    Shape(
        "ids without the end token that it says it matched",
        "sglang",
        sglang_body(response_token_ids=[5, 6, 7, 8]),
        {**SGLANG_SAID, "output_ids": [5, 6, 7, 8], "ids": "server", "ids_end": "none"},
    ),
    Shape(
        "ended by a stop string",
        "sglang",
        sglang_body(matched_stop="END", response_token_ids=[5, 6, 7, 8]),
        {**SGLANG_SAID, "stop_reason": "END", "output_ids": [5, 6, 7, 8], "ids": "server", "ids_end": "stop"},
    ),
    Shape(
        "cut within its thought",
        "sglang",
        sglang_body({"content": "", "reasoning_content": "So"}, finish_reason="length", matched_stop=None),
        {
            **SGLANG_SAID,
            "content": "",
            "reasoning": "So",
            "reasoning_field": "reasoning_content",
            "finish_reason": "length",
            "stop_reason": None,
        },
    ),
    Shape(
        "its parser took the answer for thought",
        "sglang",
        sglang_body({"content": "", "reasoning_content": "Hello."}),
        {**SGLANG_SAID, "content": "", "reasoning": "Hello.", "reasoning_field": "reasoning_content"},
    ),
    Shape(
        "tool calls",
        "sglang",
        sglang_body({"content": "", "tool_calls": [CALL]}, finish_reason="tool_calls", matched_stop=None),
        {**SGLANG_SAID, "content": "", "tool_calls": [CALL], "finish_reason": "tool_calls", "stop_reason": None},
        tools=True,
    ),
    Shape(
        "Kimi: no parser, and the prompt opened the thought",
        "sglang",
        sglang_body({"content": "So.</think>Hello."}),
        {**SGLANG_SAID, "reasoning": "So.", "reasoning_field": "content"},
    ),
    Shape(
        "Kimi: two ends of a thought: it is unclear where the answer begins",
        "sglang",
        sglang_body({"content": "So.</think>No.</think>Hello."}),
        {**SGLANG_SAID, "content": "So.</think>No.</think>Hello."},
    ),
    Shape(
        "cached tokens where it tells them",
        "sglang",
        sglang_body(top={"usage": sent_usage(prompt_tokens_details={"cached_tokens": 2}, reasoning_tokens=0)}),
        {**SGLANG_SAID, "usage": kept_usage(cached_tokens=2, reasoning_tokens=0)},
    ),
    Shape(
        "arguments of a call as an object",
        "sglang",
        sglang_body(
            {"content": "", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            finish_reason="tool_calls",
            matched_stop=None,
        ),
        {**SGLANG_SAID, "content": "", "tool_calls": [CALL], "finish_reason": "tool_calls", "stop_reason": None},
        tools=True,
    ),
    Shape(
        "withheld by a filter",
        "sglang",
        sglang_body({"content": "He"}, finish_reason="content_filter"),
        {
            **SGLANG_SAID,
            "content": "He",
            "finish_reason": "content_filter",
        },
    ),
    Shape("aborted", "sglang", sglang_body(finish_reason="abort"), fault="aborted"),
    Shape(
        "a flat error about its context with status 200",
        "sglang",
        {
            "object": "error",
            "message": "The input (9 tokens) is longer than the model's context length (8 tokens).",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
        fault="context_overflow",
    ),
    Shape(
        "a flat error with status 200",
        "sglang",
        {"object": "error", "message": "it failed", "type": "InternalServerError", "param": None, "code": 500},
        fault="bad_answer",
    ),
]

LLAMA = [
    Shape("plain", "llama.cpp", llama_body(), LLAMA_SAID),
    Shape("exact ids", "llama.cpp", llama_body(verbose={}), {**LLAMA_SAID, **IDS, "output_ids": [5, 6, 7, 2]}),
    Shape(
        "cut",
        "llama.cpp",
        llama_body(verbose={"stop_type": "limit", "tokens": [5, 6, 7, 8]}, finish_reason="length"),
        {**LLAMA_SAID, "finish_reason": "length", "output_ids": [5, 6, 7, 8], "ids": "server", "ids_end": "none"},
    ),
    Shape(
        "reasoning, and the whole text says no more",
        "llama.cpp",
        llama_body({"reasoning_content": "So."}, verbose={"content": "<think>So.</think>Hello."}),
        {
            **LLAMA_SAID,
            **IDS,
            "reasoning": "So.",
            "reasoning_field": "reasoning_content",
            "output_ids": [5, 6, 7, 2],
        },
    ),
    Shape(
        "reasoning, trimmed by its parser: the whole text is kept",
        "llama.cpp",
        llama_body({"reasoning_content": "So."}, verbose={"content": "<think>\nSo.\n</think>\n\nHello."}),
        {
            **LLAMA_SAID,
            **IDS,
            "reasoning": "So.",
            "reasoning_field": "reasoning_content",
            "output_ids": [5, 6, 7, 2],
            "raw": "<think>\nSo.\n</think>\n\nHello.",
        },
    ),
    Shape(
        "tool calls, and the text that they were read from",
        "llama.cpp",
        llama_body({"content": None, "tool_calls": [CALL]}, verbose={"content": CALL_TEXT}, finish_reason="tool_calls"),
        {
            **LLAMA_SAID,
            **IDS,
            "content": None,
            "tool_calls": [CALL],
            "finish_reason": "tool_calls",
            "output_ids": [5, 6, 7, 2],
            "raw": CALL_TEXT,
        },
        tools=True,
    ),
    Shape(
        "a thought that the prompt opened, cut before its end: it is no answer",
        "llama.cpp",
        llama_body(
            {"content": "So"},
            verbose={"content": "So", "prompt": "<|im_start|>assistant\n<think>\n", "tokens": [5, 6, 7, 8]},
            finish_reason="length",
        ),
        {
            **LLAMA_SAID,
            "content": None,
            "reasoning": "So",
            "reasoning_field": "content",
            "finish_reason": "length",
            "output_ids": [5, 6, 7, 8],
            "ids": "server",
            "ids_end": "none",
        },
    ),
    Shape(
        "an error with status 200",
        "llama.cpp",
        {"error": {"code": 400, "message": "the request exceeds the available context size", "type": "x"}},
        fault="context_overflow",
    ),
]

CHAT_SHAPES = [*VLLM, *SGLANG, *LLAMA, *OTHERS]

REASONS = {
    ("vllm", "cut: the ids end with no end token"): "truncated",
    ("vllm", "cut within its thought"): "truncated_in_think",
    ("vllm", "ended by itself, and its parser found no end of the thought"): "answer_in_reasoning",
    ("vllm", "no parser, cut within its thought"): "truncated_in_think",
    ("vllm", "a tag leaked into the content"): "think_leak",
    ("vllm", "gpt-oss, cut within its thought"): "truncated_in_think",
    ("vllm", "gpt-oss, one mark of a channel left in the content"): "think_leak",
    ("vllm", "tool calls that no parser read"): "unparsed_calls",
    ("vllm", "the end token alone: it says nothing"): "empty",
    ("vllm", "no room for a single token"): "truncated",
    ("sglang", "cut within its thought"): "truncated_in_think",
    ("sglang", "its parser took the answer for thought"): "answer_in_reasoning",
    ("sglang", "Kimi: two ends of a thought: it is unclear where the answer begins"): "think_leak",
    ("sglang", "withheld by a filter"): "content_filter",
    ("llama.cpp", "cut"): "truncated",
    ("llama.cpp", "a thought that the prompt opened, cut before its end: it is no answer"): "truncated_in_think",
}
"""Why those are rejected that are, where the dataset sets no rules."""


def body_of(shape: Shape) -> bytes:
    """Return the bytes that the server sends."""
    return shape.body if isinstance(shape.body, bytes) else json.dumps(shape.body).encode()
