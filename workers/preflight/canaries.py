"""Real requests with a dataset's real settings, and what would be recorded of their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from app import settings
from app.places import public_url
from app.preflight import CANARY, Canary, Job, Server, Thought
from app.records import Kind, Record, Sample, encode_line
from app.settings import GenerationSettings, ServerSettings
from workers.caller import Tries, outcome_of, request_of
from workers.clients.base import Answer, CallFailed
from workers.clients.make import make_client
from workers.endpoint import Endpoint
from workers.faults import Fault, FaultKind, make_fault
from workers.outcomes import make_record
from workers.rendering import Tokenizers

_QUESTION = "What is the capital of France? Answer in one short sentence."
_KWARGS = "chat_template_kwargs"
_SWITCHES = ("enable_thinking", "thinking")
"""What templates call it: Qwen and its kin the first, DeepSeek and Kimi the second; they pass over the other."""
_DATASET = "doctor"


async def ask_all(servers: Sequence[Server], job: Job, at: ServerSettings, tokenizers: Tokenizers) -> None:
    """Ask the servers that are up, each at the same time, and add what came to what is known of them.

    Raises MillError where nothing can be asked, as for want of a tokenizer.
    """
    urls = {public_url(url): url for url in at.model_urls}
    up = [server for server in servers if server.state == "up"]
    samples = job.canaries or []
    shares = [samples[number :: len(up)] for number in range(len(up))]
    connections = job.at_once + 2
    endpoints = [
        Endpoint(url, make_client(url, at, tokenizers, max_connections=connections))
        for url in (urls[server.url] for server in up)
    ]
    await asyncio.gather(
        *(_ask_one(server, endpoint, share, job) for server, endpoint, share in zip(up, endpoints, shares, strict=True))
    )


async def _ask_one(server: Server, endpoint: Endpoint, samples: Sequence[Sample], job: Job) -> None:
    """Ask one server its canaries, and close its client."""
    content = next(iter(job.generations.values()))
    try:
        await endpoint.client.identify()
        desk = _Desk(endpoint, server, job)
        generation = settings.generation_from_content(content)
        built_in = Sample(id=CANARY, messages=[{"role": "user", "content": _QUESTION}])
        begun = time.monotonic()
        server.canaries = await desk.ask([built_in, *samples], generation)
        server.in_flight = desk.busy_s / (time.monotonic() - begun)
        if server.switches_thinking and server.canaries[0].verdict != Kind.FAILED:
            on, off = (_with_thinking(content, wanted=wanted) for wanted in (True, False))
            pair = await asyncio.gather(desk.ask([built_in], on), desk.ask([built_in], off))
            server.thought = Thought(on=pair[0][0], off=pair[1][0])
    finally:
        await endpoint.client.close()


def _with_thinking(content: Mapping[str, Any], *, wanted: bool) -> GenerationSettings:
    kwargs = {**(content.get(_KWARGS) or {}), **dict.fromkeys(_SWITCHES, wanted)}
    return settings.generation_from_content({**content, _KWARGS: kwargs})


class _Desk:
    """Asks one server, a bounded number of questions at a time."""

    def __init__(self, endpoint: Endpoint, server: Server, job: Job) -> None:
        self._endpoint, self._server, self._job = endpoint, server, job
        self._slots = asyncio.Semaphore(job.at_once)
        self.busy_s = 0.0
        """Seconds of all requests together."""

    async def ask(self, samples: Sequence[Sample], generation: GenerationSettings) -> list[Canary]:
        """Return what came of each sample, in their order."""
        return await asyncio.gather(*(self._ask(sample, generation) for sample in samples))

    async def _ask(self, sample: Sample, generation: GenerationSettings) -> Canary:
        async with self._slots:
            model = generation.model or next(iter(self._server.models), None)
            request = request_of(sample, generation, model, call=1)
            tries, begun = Tries(calls=1), time.monotonic()
            answer: Answer | None = None
            fault: Fault | None = None
            try:
                async with asyncio.timeout(self._job.canary_timeout_s):
                    answer = await self._endpoint.client.complete(request)
            except CallFailed as failure:
                fault = failure.fault
            except TimeoutError:
                message = f"no answer within {self._job.canary_timeout_s:g} s (--timeout, MILL_REQUEST_TIMEOUT_S)"
                fault = make_fault(FaultKind.TIMEOUT, message)
            finally:
                self.busy_s += time.monotonic() - begun
        outcome = outcome_of(self._endpoint, request, tries, answer, fault, model=model)
        return _canary(make_record(_DATASET, sample, outcome, generation, worker=_DATASET))


def _canary(record: Record) -> Canary:
    """Return what a record shows of its request."""
    return Canary(
        id=record.id,
        verdict=record.verdict.value,
        reason=record.reason,
        error=record.error,
        latency_s=record.latency_s,
        finish_reason=record.finish_reason,
        prompt_tokens=record.usage.prompt_tokens,
        completion_tokens=record.usage.completion_tokens,
        reasoning_tokens=record.usage.reasoning_tokens,
        reasoning_field=record.reasoning_field,
        content_chars=len(record.content or ""),
        reasoning_chars=len(record.reasoning or ""),
        prompt_ids=record.prompt_token_ids is not None,
        output_ids=record.output_ids is not None,
        ids_end=record.ids_end,
        ids_check=record.ids_check,
        notes=record.notes,
        raw=record.raw is not None,
        tools=bool(record.tools),
        tool_calls=len(record.tool_calls or ()),
        record_bytes=len(encode_line(record)),
    )
