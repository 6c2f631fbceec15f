"""The answers of all other servers than vLLM, and the table of them all."""

from __future__ import annotations

import json

from tests.support.answer_shapes import (
    BOTH_IDS,
    CALL,
    CALL_TEXT,
    IDS,
    LLAMA_SAID,
    SAID,
    SGLANG_SAID,
    VLLM,
    Shape,
    kept_usage,
    llama_body,
    other_body,
    sent_usage,
    sglang_body,
    vllm_body,
)

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
    Shape("aborted", "sglang", sglang_body(finish_reason="abort"), fault="aborted"),
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

OTHERS = [
    Shape(
        "TensorRT-LLM: both names of the reasoning",
        "tensorrt-llm",
        other_body(
            {"content": "Hello.", "reasoning": "So.", "reasoning_content": "So.", "tool_calls": []}, usage=sent_usage()
        ),
        {**SAID, "reasoning": "So.", "reasoning_field": "reasoning"},
    ),
    Shape(
        "TensorRT-LLM: the ids of the prompt alone",
        "tensorrt-llm",
        other_body({"content": "Hello."}, usage=sent_usage(), prompt_token_ids=[1, 2, 3]),
        {**SAID, "prompt_token_ids": [1, 2, 3], "ids": "server"},
    ),
    Shape(
        "TensorRT-LLM: a finish reason of its own",
        "tensorrt-llm",
        other_body({"content": "Hello."}, finish="timeout", usage=sent_usage()),
        fault="unfinished",
    ),
    Shape(
        "transformers serve: reasoning after an opened thought",
        "transformers",
        other_body({"content": "Hello.", "reasoning_content": "So."}, usage=sent_usage()),
        {**SAID, "reasoning": "So.", "reasoning_field": "reasoning_content"},
    ),
    Shape("transformers serve: its error", "transformers", {"error": "CB worker is dead: x"}, fault="bad_answer"),
    Shape(
        "LiteLLM: thinking blocks beside the reasoning",
        "litellm",
        other_body(
            {
                "content": "Hello.",
                "reasoning_content": "So.",
                "thinking_blocks": [{"type": "thinking", "thinking": "So."}],
            },
            usage=sent_usage(),
        ),
        {**SAID, "reasoning": "So.", "reasoning_field": "reasoning_content"},
    ),
    Shape(
        "OpenRouter: reasoning and its details",
        "openrouter",
        other_body(
            {"content": "Hello.", "reasoning": "So.", "reasoning_details": [{"type": "reasoning.text", "text": "So."}]},
            usage=sent_usage(),
            provider="P",
        ),
        {**SAID, "reasoning": "So.", "reasoning_field": "reasoning"},
    ),
    Shape(
        "OpenRouter: details alone, some of them encrypted",
        "openrouter",
        other_body(
            {"content": "Hello.", "reasoning_details": [{"summary": "So."}, {"type": "x", "data": "c2VjcmV0"}]},
            usage=sent_usage(),
        ),
        {**SAID, "reasoning": "So.", "reasoning_field": "reasoning_details"},
    ),
    Shape(
        "OpenRouter: an error with status 200",
        "openrouter",
        {"error": {"code": 429, "message": "Rate limited upstream", "metadata": {}}},
        fault="overloaded",
    ),
    Shape(
        "OpenRouter: an error inside the choice",
        "openrouter",
        {"id": "x", "choices": [{"error": {"code": 502, "message": "upstream"}, "message": {"content": ""}}]},
        fault="bad_answer",
    ),
    Shape(
        "OpenRouter: finish reason error",
        "openrouter",
        other_body({"content": "Hel"}, finish="error"),
        fault="unfinished",
    ),
    Shape(
        "llama-cpp-python: no counts of details",
        "",
        other_body({"content": "Hello."}, usage=sent_usage()),
        SAID,
    ),
    Shape(
        "Mistral's content in parts",
        "",
        other_body(
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]},
                    {"type": "text", "text": "Hello."},
                ]
            },
            usage=sent_usage(),
        ),
        {**SAID, "reasoning": "So.", "reasoning_field": "content"},
    ),
    Shape(
        "no usage: counts are unknown, and ids are taken as they are",
        "",
        {**other_body({"content": "Hello."}), "prompt_token_ids": [1, 2]},
        {**SAID, "usage": kept_usage(None, None), "prompt_token_ids": [1, 2], "ids": "server"},
    ),
    Shape(
        "an unknown server's output ids: how they end is not known",
        "",
        {**vllm_body(token_ids=[5, 6, 7, 2]), "id": "x"},
        {**SAID, "output_ids": [5, 6, 7, 2], "ids": "server"},
    ),
    Shape("HTML with status 200", "", b"<html><body>busy</body></html>", fault="bad_answer"),
    Shape("an empty body", "", b"", fault="bad_answer"),
    Shape("JSON cut in the middle", "", b'{"choices": [{"message": {"content": "He', fault="bad_answer"),
    Shape("no choices", "", other_body({"content": ""}) | {"choices": []}, fault="bad_answer"),
    Shape("choices null (a proxy's error)", "", {"id": None, "choices": None, "model": None}, fault="bad_answer"),
    Shape(
        "U+0000 in the text", "", other_body({"content": "a\x00b"}, usage=sent_usage()), {**SAID, "content": "a\x00b"}
    ),
]

CHAT_SHAPES = [*VLLM, *SGLANG, *LLAMA, *OTHERS]


def body_of(shape: Shape) -> bytes:
    """Return the bytes that the server sends."""
    return shape.body if isinstance(shape.body, bytes) else json.dumps(shape.body).encode()
