"""The answers of proxies and of the servers beside vLLM, SGLang and llama.cpp, and answers that are none."""

from __future__ import annotations

from tests.support.answer_shapes import SAID, Shape, kept_usage, other_body, sent_usage, vllm_body

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
        "OpenRouter: a summary and a text among the details",
        "openrouter",
        other_body(
            {
                "content": "Hello.",
                "reasoning": None,
                "reasoning_details": [
                    {"type": "reasoning.summary", "summary": "So. "},
                    {"type": "reasoning.text", "text": "Yes.", "signature": None},
                ],
            },
            usage=sent_usage(completion_tokens_details={"reasoning_tokens": 2}, cost=0.1),
        ),
        {
            **SAID,
            "reasoning": "So. Yes.",
            "reasoning_field": "reasoning_details",
            "usage": kept_usage(reasoning_tokens=2),
        },
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
        "content in parts of text",
        "",
        other_body({"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]}, usage=sent_usage()),
        SAID,
    ),
    Shape(
        "content in parts, one of them an image",
        "",
        other_body({"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}),
        fault="bad_answer",
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
