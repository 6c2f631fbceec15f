"""What the command line and the workers' floor say to each other before a run: what to look at, and what was seen."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from app.records import Sample

State = Literal["up", "down", "silent", "refuses", "unwell"]
"""It answers; it cannot be reached; no answer in time; it refuses our key; it answers with another error."""
Code = Literal["model", "context", "parameters", "protocol"]

CANARY = "canary"
"""The id of the sample that is always asked."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be looked at; the servers themselves are those of the settings."""

    generations: dict[str, dict[str, Any]]
    """The generation settings of each dataset, as manifests hold them."""
    timeout_s: float
    """Seconds for all the looks that generate nothing."""
    canaries: list[Sample] | None = None
    """Samples to ask besides the one that is always asked, with the first dataset's settings; None: ask nothing."""
    canary_timeout_s: float = 300.0
    """Seconds for each answer."""
    at_once: int = 32
    """Requests in flight at each server at most."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a dataset's requests would be wasted, or not even be sent."""

    code: Code
    finding: str
    """What is the case, as the start of a sentence."""
    remedy: str
    """What to do, in the imperative."""


class Canary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that was made for real, and what its record would be."""

    id: str
    verdict: str
    """`accepted`, `rejected` or `failed`."""
    reason: str | None = None
    error: str | None = None
    latency_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    reasoning_field: str | None = None
    content_chars: int = 0
    reasoning_chars: int = 0
    prompt_ids: bool = False
    output_ids: bool = False
    ids_end: str | None = None
    ids_check: str | None = None
    notes: list[str] = []
    raw: bool = False
    tools: bool = False
    """Whether tools were offered."""
    tool_calls: int = 0
    record_bytes: int = 0


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """The built-in canary, asked with thinking switched on and off."""

    on: Canary
    off: Canary


class Server(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model server as it was seen."""

    url: str
    """Without user and password."""
    state: State
    words: str = ""
    """Why it is not up."""
    backend: str | None = None
    shown: str = ""
    models: list[str] = []
    model: str | None = None
    """The one that the first dataset would ask."""
    context: int | None = None
    """Tokens of prompt and answer together."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of this machine's; None: it does not tell the time."""
    template: str | None = None
    """Fingerprint of its chat template, where it shows it."""
    switches_thinking: bool = False
    """Whether it is known to take options of the chat template."""
    refusals: dict[str, list[Refusal]] = {}
    """By dataset."""
    canaries: list[Canary] = []
    in_flight: float = 0.0
    """Requests in flight on average while the canaries were asked."""
    thought: Thought | None = None


class Files(msgspec.Struct, frozen=True):
    """Open files of one worker that fills the bound of every server."""

    slots: int
    needed: int
    hard: int | None
    """None: no limit."""


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was seen."""

    servers: list[Server]
    trouble: str | None = None
    """Why the canaries could not be asked."""
    max_in_flight: int = 0
    files: Files | None = None
    tokenizer: str | None = None
    """The name of the tokenizer that ids and prompts are checked with, where the settings name one."""
    template: str | None = None
    """Fingerprint of that tokenizer's chat template."""
