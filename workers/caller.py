"""Asks a model server until there is a completion: waits for permits, retries faults in place, counts attempts."""

from __future__ import annotations

import dataclasses
import logging
import random
import time

from app.records import Attempt, Completion, Sample, sample_seed
from app.settings import GenerationSettings, WorkerSettings
from workers.clients.base import Answer, CallFailed, Request
from workers.endpoints import Endpoint, Endpoints, model_of
from workers.faults import Fault, FaultKind, Scope, backoff_s

logger = logging.getLogger(__name__)

_KEPT_FAULTS = 16
_MAX_EXCUSED = 20
"""Faults that a sample may meet without using up an attempt because they are likely not its own."""
_MAY_BE_THE_SERVERS = frozenset({FaultKind.SERVER_ERROR, FaultKind.CONNECTION_LOST})
_REFUND_S = 5.0
"""A connection that broke this long before the server proved unreachable broke because the server went down."""


class ModelMissing(Exception):  # noqa: N818 - it says what is the case
    """The server does not have the model that the dataset asks for, and has others."""

    def __init__(self, model: str, endpoint: Endpoint, fault: Fault) -> None:
        super().__init__(
            f"{endpoint.shown} has no model {model!r} but {', '.join(endpoint.models)} (it said: {fault.message}); "
            "enqueue again with --model NAME --new-settings, or resume it when the server has the model"
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What asking a sample came to."""

    completion: Completion | None
    """None when the sample is given up."""
    fault: Fault | None
    """Why it is given up."""
    endpoint: str
    protocol: str
    attempts: int
    faults: list[Attempt]
    started_at: float
    finished_at: float
    latency_s: float | None
    request_id: str
    model: str | None
    seed: int | None


@dataclasses.dataclass
class _Tries:
    """The failed calls of one sample so far."""

    calls: int = 0
    counted: int = 0
    excused: int = 0
    faults: list[Attempt] = dataclasses.field(default_factory=list)
    lost_at: float = 0.0
    """Monotonic time of a counted lost connection that may prove to be the server's death."""


class Caller:
    """Turns a sample into an outcome; runs in the loop."""

    def __init__(self, endpoints: Endpoints, limits: WorkerSettings) -> None:
        self._endpoints = endpoints
        self._limits = limits

    async def ask(self, sample: Sample, generation: GenerationSettings) -> Outcome:
        """Return a completion, or the fault for which the sample is given up.

        The permit is held from just before the call until its answer is in, not while waiting to retry.
        Raises ModelMissing when the server has other models than the one that is asked for.
        """
        tries, started_at = _Tries(), time.time()
        seed = None if generation.seed is None else sample_seed(generation.seed, sample.id)
        avoid: Endpoint | None = None
        while True:
            endpoint = await self._endpoints.acquire(avoid)
            call_started = time.monotonic()
            model, request_id = generation.model, f"{sample.id}-r{sample.round}-a{tries.calls + 1}"
            try:
                model = model or await model_of(endpoint)
                request = Request(
                    messages=sample.messages,
                    tools=sample.tools,
                    model=model or "default",
                    sampling=generation.sampling(),
                    seed=seed,
                    request_id=request_id,
                )
                answer, fault = await self._call(endpoint, request, sample.id)
            finally:
                # After the call's outcome is noted, so that the next call does not run into a server known to be down.
                self._endpoints.release(endpoint)
            tries.calls += 1
            if fault is not None and self._goes_on(sample, tries, fault, endpoint, call_started):
                await self._endpoints.pause(self._pause_s(fault, tries))
                avoid = endpoint
                continue
            return Outcome(
                completion=answer.completion if answer else None,
                fault=fault,
                endpoint=endpoint.shown,
                protocol=endpoint.client.name,
                attempts=tries.calls,
                faults=tries.faults[-_KEPT_FAULTS:],
                started_at=started_at,
                finished_at=time.time(),
                latency_s=answer.latency_s if answer else None,
                request_id=request_id,
                model=(answer.completion.model if answer else None) or model,
                seed=seed,
            )

    async def _call(self, endpoint: Endpoint, request: Request, sample_id: str) -> tuple[Answer | None, Fault | None]:
        """Call once and note how it went."""
        try:
            answer = await endpoint.client.complete(request)
        except CallFailed as failure:
            fault = failure.fault
            if fault.kind is FaultKind.NOT_FOUND and endpoint.models and request.model not in endpoint.models:
                # The server is well; it is the dataset that asks for the wrong model.
                raise ModelMissing(request.model, endpoint, fault) from failure
            self._endpoints.failed(endpoint, fault, sample_id)
            return None, fault
        self._endpoints.succeeded(endpoint)
        return answer, None

    def _goes_on(self, sample: Sample, tries: _Tries, fault: Fault, endpoint: Endpoint, call_started: float) -> bool:
        """Count the fault and tell whether the sample is asked once more."""
        if not fault.retry:
            return False
        tries.faults.append(Attempt(fault.kind, endpoint.name, time.time(), fault.message))
        now = time.monotonic()
        if fault.kind is FaultKind.CONNECT and tries.lost_at and now - tries.lost_at < _REFUND_S:
            tries.counted -= 1
            tries.lost_at = 0.0
        if _counts(fault, tries, sick=self._endpoints.is_sick(endpoint, call_started, sample.id)):
            tries.counted += 1
            if fault.kind is FaultKind.CONNECTION_LOST:
                tries.lost_at = now
        goes_on = tries.counted < self._limits.max_attempts
        logger.log(
            logging.INFO if goes_on else logging.WARNING,
            "sample %s: %s at %s (call %d, %d of %d attempts used): %s",
            sample.id,
            fault.kind,
            endpoint.name,
            tries.calls,
            tries.counted,
            self._limits.max_attempts,
            fault.message,
        )
        return goes_on

    def _pause_s(self, fault: Fault, tries: _Tries) -> float:
        """Return how many seconds to wait before the next call."""
        if fault.kind is FaultKind.STALE_CONNECTION:
            return 0.0
        if fault.retry_after_s is not None:
            return min(fault.retry_after_s, self._limits.retry_after_max_s) + random.random() * 0.5  # noqa: S311 jitter
        return backoff_s(
            len(tries.faults),
            first_s=self._limits.backoff_s,
            max_s=self._limits.backoff_max_s,
            random=random.random,
        )


def _counts(fault: Fault, tries: _Tries, *, sick: bool) -> bool:
    """Tell whether the fault uses up an attempt, excusing a bounded number that are likely not the sample's."""
    if fault.scope is not Scope.SAMPLE:
        return False
    excusable = not fault.counted or (fault.kind in _MAY_BE_THE_SERVERS and sick)
    if excusable and tries.excused < _MAX_EXCUSED:
        tries.excused += 1
        return False
    return True
