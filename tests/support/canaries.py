"""Model servers and their canaries as a look has seen them, made up for what is said of them."""

from __future__ import annotations

from typing import Any

from app.preflight import CANARY, Canary, Server

URL = "http://gpu1:8000"
THOUGHT: dict[str, Any] = {"reasoning_field": "reasoning", "reasoning_chars": 9}
"""Fields of a canary that thought."""


def canary(id_: str = CANARY, **fields: Any) -> Canary:
    """Return an accepted canary with exact ids, unless told otherwise."""
    plain = {
        "verdict": "accepted",
        "latency_s": 2.0,
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 100,
        "content_chars": 40,
        "output_ids": True,
        "prompt_ids": True,
        "ids_end": "eos",
        "record_bytes": 1000,
    }
    return Canary(id=id_, **{**plain, **fields})


def server(*canaries: Canary, **fields: Any) -> Server:
    """Return a vLLM server that is up."""
    plain = {
        "url": URL,
        "state": "up",
        "backend": "vllm 0.33.0",
        "shown": "vLLM 0.33.0",
        "models": ["m"],
        "model": "m",
        "context": 4096,
        "canaries": list(canaries),
    }
    return Server(**{**plain, **fields})
