"""What the fake model server says of itself: its models, its facts and its metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from producer.simulator.rules import ServerOptions


def models_page(options: ServerOptions) -> dict[str, Any]:
    """Return `/v1/models`: the one model."""
    model = {
        "id": options.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": options.dialect,
        "root": options.model,
        "parent": None,
        "max_model_len": options.max_model_len,
    }
    return {"object": "list", "data": [model]}


def server_info(options: ServerOptions) -> dict[str, Any]:
    """Return SGLang's `/server_info`."""
    model = options.model
    states = [{"last_gen_throughput": 0.0, "memory_usage": {}}]
    return {"version": "0.5.23", "model_path": model, "tokenizer_path": model, "internal_states": states}


def metrics_page(options: ServerOptions, *, in_flight: int, running: int, tokens: Mapping[str, int]) -> bytes:
    """Return vLLM's `/metrics`; `tokens` counts those of prompts (`prompt`) and answers (`generation`)."""
    labels = f'{{engine="0",model_name="{options.model}"}}'
    values = {
        "num_requests_running": running,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": min(1.0, in_flight / 1000),
        "prompt_tokens_total": tokens["prompt"],
        "generation_tokens_total": tokens["generation"],
    }
    return "".join(f"vllm:{name}{labels} {float(value)}\n" for name, value in values.items()).encode()
