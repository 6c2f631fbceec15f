"""Asks a model server until there is a completion: waits for permits, retries faults in place, counts attempts."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable

from app import logs
from app.errors import UsageError
from app.records import Attempt, Completion, Sample, sample_seed
from app.settings import GenerationSettings, WorkerSettings
from workers.clients.base import Answer, CallFailed, Request
from workers.discretion import words_for_logs
from workers.endpoint import Endpoint
from workers.endpoints import REFUSES_ALL, Endpoints, model_of
from workers.faults import Fault, FaultKind, Scope, backoff_s, make_fault
from workers.inquest import Finding, Inquest

logger = logging.getLogger(__name__)

KEPT_FAULTS = 16
"""Failed calls that a record tells of at most: the last ones."""
_MAX_EXCUSED = 20
"""Faults that a sample may meet without using up an attempt because they are likely not its own."""
_MAY_BE_THE_SERVERS = frozenset({FaultKind.SERVER_ERROR, FaultKind.CONNECTION_LOST})
_REFUND_S = 5.0
"""A connection that broke this long before the server proved unreachable broke because the server went down."""

OnFault = Callable[[FaultKind], None]
"""Told of each failed call."""
OnDeath = Callable[[], Awaitable[bool]]
"""Told of each death of a server that worked on a sample; returns whether the sample is a suspect now."""


class Suspected(Exception):  # noqa: N818 - it says what is the case
    """Servers died while the sample was asked, so often that it is to be asked apart from others."""


class Held(Exception):  # noqa: N818 - it says what is the case
    """The dataset's folder takes no records, so that an answer could not be recorded: nothing was asked."""


class ModelMissing(Exception):  # noqa: N818 - it says what is the case
    """The server does not have the model that the dataset asks for, and has others."""

    def __init__(self, model: str, endpoint: Endpoint, fault: Fault) -> None:
        super().__init__(
            f"{endpoint.shown} has no model {model!r} but {', '.join(endpoint.models)} (it said: {fault.message}); "
            "enqueue again with --model NAME --new-settings, or resume it when the server has the model"
        )


class ParametersRefusedError(UsageError):
    """The server would pass over, or refuse, parameters that the dataset asks with."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What asking a sample came to."""

    completion: Completion | None
    """None when the sample is given up."""
    fault: Fault | None
    """Why it is given up."""
    endpoint: str | None
    protocol: str | None
    attempts: int
    faults: list[Attempt]
    started_at: float
    finished_at: float
    latency_s: float | None
    request_id: str | None
    model: str | None
    seed: int | None
    backend: str | None = None


@dataclasses.dataclass
class Tries:
    """The failed calls of one sample so far."""

    started_at: float = dataclasses.field(default_factory=time.time)
    """Unix seconds."""
    calls: int = 0
    counted: int = 0
    excused: int = 0
    faults: list[Attempt] = dataclasses.field(default_factory=list)
    lost_at: float = 0.0
    """Monotonic time of a counted lost connection that may prove to be the server's death."""
    lost_to: str = ""
    """The endpoint that it was lost to."""
    refused_at: dict[str, float] = dataclasses.field(default_factory=dict)
    """By endpoint, the monotonic time of the first refusal that looked like one for everybody."""


@dataclasses.dataclass(frozen=True)
class _Begun:
    """Where and when a call began."""

    endpoint: Endpoint
    at: float
    back_at: float
    """What the endpoint said of its last return at that time; both in monotonic seconds."""


class Caller:
    """Turns a sample into an outcome; runs in the loop."""

    def __init__(self, endpoints: Endpoints, limits: WorkerSettings) -> None:
        self._endpoints = endpoints
        self._limits = limits
        self._inquest = Inquest()

    async def ask(
        self,
        sample: Sample,
        generation: GenerationSettings,
        *,
        on_death: OnDeath,
        on_fault: OnFault | None = None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Return a completion, or the fault for which the sample is given up.

        The permit is held from just before the call until its outcome is known, not while waiting to retry.
        Raises ModelMissing when the server has other models than the one that is asked for, ParametersRefusedError
        before a call with parameters that the server would not act on, Suspected when `on_death` says so, and Held
        instead of a call while `is_held` says so.
        """
        tries = Tries()
        avoid: Endpoint | None = None
        while True:
            endpoint = await self._endpoints.acquire(avoid)
            begun = _Begun(endpoint, time.monotonic(), endpoint.back_at)
            try:
                if is_held():
                    raise Held
                model = generation.model or await model_of(endpoint)
                request = request_of(sample, generation, model, call=tries.calls + 1)
                await endpoint.client.identify()
                if why := endpoint.client.refusal(request):
                    raise ParametersRefusedError(f"{endpoint.shown}: {why}")
                answer, fault = await self._call(endpoint, request, sample.id, tries)
                found = Finding.ALIVE if fault is None else await self._look_into(sample, tries, fault, begun)
            finally:
                # After the call's outcome is noted, so that the next call does not run into a server known to be down.
                self._endpoints.release(endpoint)
            tries.calls += 1
            if fault is not None and on_fault is not None:
                on_fault(fault.kind)
            if fault is not None and self._goes_on(sample, tries, fault, begun, found):
                if found is Finding.DIED and await on_death():
                    raise Suspected(f"{endpoint.shown} died while it worked on sample {sample.id}")
                await self._endpoints.pause(self._pause_s(fault, tries))
                avoid = endpoint
                continue
            return outcome_of(endpoint, request, tries, answer, fault, model=model)

    async def _call(
        self, endpoint: Endpoint, request: Request, sample_id: str, tries: Tries
    ) -> tuple[Answer | None, Fault | None]:
        """Call once and note how it went."""
        try:
            answer = await endpoint.complete(request)
        except CallFailed as failure:
            fault = failure.fault
            if fault.kind is FaultKind.NOT_FOUND and endpoint.models and request.model not in endpoint.models:
                # The server is well; it is the dataset that asks for the wrong model.
                raise ModelMissing(request.model, endpoint, fault) from failure
            fault = _its_own(fault, tries, endpoint)
            if fault.kind is not FaultKind.ENGINE_DEAD:  # a look tells first whether it is
                self._endpoints.failed(endpoint, fault, sample_id)
            return None, fault
        self._endpoints.succeeded(endpoint)
        return answer, None

    async def _look_into(self, sample: Sample, tries: Tries, fault: Fault, begun: _Begun) -> Finding:
        """Return what became of the server; one that died in the call before may show it only now."""
        endpoint = begun.endpoint
        if fault.kind is FaultKind.CONNECT:
            late = tries.lost_to == endpoint.name and time.monotonic() - tries.lost_at < _REFUND_S
            if late:
                tries.counted -= 1
                tries.lost_to = ""
            return Finding.DIED if late else Finding.ALIVE
        found = await self._inquest.look_into(endpoint, fault, started=begun.at, back_at=begun.back_at)
        if found is Finding.ALIVE and fault.kind is FaultKind.ENGINE_DEAD:
            # Another engine behind the address, or a new one already: no reason to stop everybody's work.
            self._endpoints.failed(endpoint, make_fault(FaultKind.SERVER_ERROR, fault.message), sample.id)
        elif found is not Finding.ALIVE and endpoint.back_at == begun.back_at:
            # No other call needs to run into it.
            self._endpoints.failed(endpoint, make_fault(FaultKind.CONNECT, f"it died: {fault.message}"), sample.id)
        return found

    def _goes_on(self, sample: Sample, tries: Tries, fault: Fault, begun: _Begun, found: Finding) -> bool:
        """Count the fault and tell whether the sample is asked once more."""
        if not fault.retry:
            return False
        endpoint = begun.endpoint
        tries.faults.append(Attempt(fault.kind, endpoint.name, time.time(), fault.message))
        sick = self._endpoints.is_sick(endpoint, begun.at, sample.id)
        if found is Finding.ALIVE and _counts(fault, tries, sick=sick):
            tries.counted += 1
            if fault.kind is FaultKind.CONNECTION_LOST:
                tries.lost_at, tries.lost_to = time.monotonic(), endpoint.name
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
            words_for_logs(fault.kind, fault.message, sample.messages, sample.tools),
            extra=logs.fields(
                "call_failed", sample=sample.id, fault=fault.kind, endpoint=endpoint.shown, call=tries.calls
            ),
        )
        return goes_on

    def _pause_s(self, fault: Fault, tries: Tries) -> float:
        """Return how many seconds to wait before the next call."""
        if fault.kind in {FaultKind.STALE_CONNECTION, FaultKind.LOST}:
            return 0.0
        if fault.retry_after_s is not None:
            return min(fault.retry_after_s, self._limits.retry_after_max_s) + random.random() * 0.5  # noqa: S311 jitter
        return backoff_s(
            len(tries.faults),
            first_s=self._limits.backoff_s,
            max_s=self._limits.backoff_max_s,
            random=random.random,
        )


def request_of(sample: Sample, generation: GenerationSettings, model: str | None, *, call: int) -> Request:
    """Return what a sample's call with that number, from 1 on, asks."""
    return Request(
        messages=sample.messages,
        tools=sample.tools,
        model=model or "default",
        sampling=generation.sampling(sample.id),
        seed=None if generation.seed is None else sample_seed(generation.seed, sample.id),
        request_id=f"{sample.id}-r{sample.round}-a{call}",
    )


def outcome_of(
    endpoint: Endpoint,
    request: Request,
    tries: Tries,
    answer: Answer | None,
    fault: Fault | None,
    *,
    model: str | None,
) -> Outcome:
    """Return what came of the last call, which ends now; `model` is the one asked for, where one is known."""
    return Outcome(
        completion=answer.completion if answer else None,
        fault=fault,
        endpoint=endpoint.shown,
        protocol=endpoint.client.name,
        attempts=tries.calls,
        faults=tries.faults[-KEPT_FAULTS:],
        started_at=tries.started_at,
        finished_at=time.time(),
        latency_s=answer.latency_s if answer else None,
        request_id=request.request_id,
        model=(answer.completion.model if answer else None) or model,
        seed=request.seed,
        backend=endpoint.client.backend.label,
    )


def _its_own(fault: Fault, tries: Tries, endpoint: Endpoint) -> Fault:
    """Return the fault as the sample's own where a server refuses this request alone, as a gateway's filter does.

    That shows when it is refused once more although calls were answered that began after its first refusal.
    """
    if fault.kind not in REFUSES_ALL:
        return fault
    first = tries.refused_at.setdefault(endpoint.name, time.monotonic())
    if endpoint.newest_answered <= first:
        return fault
    return dataclasses.replace(fault, scope=Scope.SAMPLE, counted=True)


def _counts(fault: Fault, tries: Tries, *, sick: bool) -> bool:
    """Tell whether the fault of a server that is there uses up an attempt, excusing a bounded number.

    Excused is what is likely not the sample's. A server that calls its engine dead and is there all the same may say
    so for ever, of this sample alone perhaps; the other faults of a whole server end with its return.
    """
    if fault.scope is not Scope.SAMPLE and fault.kind is not FaultKind.ENGINE_DEAD:
        return False
    excusable = not fault.counted or (fault.kind in _MAY_BE_THE_SERVERS and sick)
    if excusable and tries.excused < _MAX_EXCUSED:
        tries.excused += 1
        return False
    return True
