"""What a model server says of its own load: the few lines of `/metrics` that matter here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

_MARGIN_S = 5.0
"""Seconds by which a server's numbers may lag behind what it does."""


_LONGEST_GAP_S = 20.0
"""Seconds between two readings that count at most, so that neither a gap nor a clock that jumps looks like idleness."""


class _Names(NamedTuple):
    """How one kind of server calls its gauges."""

    running: str
    waiting: str
    kv: Sequence[str]
    progress: Sequence[str] = ()
    """Counters that grow with every step of the engine, not only when a request ends."""


_SERVERS = (
    _Names(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        progress=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    ),
    _Names(running="sglang:num_running_reqs", waiting="sglang:num_queue_reqs", kv=("sglang:token_usage",)),
    _Names(
        running="llamacpp:requests_processing",
        waiting="llamacpp:requests_deferred",
        kv=("llamacpp:kv_cache_usage_ratio",),
    ),
)


class Gauges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A server's load by its own account, as one worker reads it for all; its JSON form is kept in Redis."""

    running: float
    """Requests that it works on."""
    waiting: float
    """Requests in its queue."""
    at: float
    """Unix seconds of the reading."""
    kv: float | None = None
    """Part of its key-value cache that is in use, 0 to 1."""
    progress: float | None = None
    """Tokens that it has processed since its start, where it counts them as it goes."""
    idle_s: float = 0.0
    """Seconds over which every reading found no request at all."""
    peak: float = 0.0
    """The most requests that a reading found: while it is 0 the server may not count at all."""

    @property
    def busy(self) -> float:
        """Requests that it knows of."""
        return self.running + self.waiting

    def after(self, before: Gauges | None) -> Gauges:
        """Return this reading with what only a row of readings shows."""
        if before is None:
            return msgspec.structs.replace(self, peak=self.busy)
        idle = self.busy == 0 == before.busy
        idle_s = before.idle_s + min(_LONGEST_GAP_S, max(0.0, self.at - before.at)) if idle else 0.0
        return msgspec.structs.replace(self, idle_s=idle_s, peak=max(before.peak, self.busy))

    def contradict(self, age_s: float, *, call_s: float) -> bool:
        """Tell whether a call that has run for `call_s` seconds and was answered now was not counted, though it ran.

        `age_s` is how old this reading is.
        """
        return self.busy == 0 and age_s > _MARGIN_S and call_s > age_s + _MARGIN_S


def parse(body: bytes, *, at: float) -> Gauges | None:
    """Return what a `/metrics` page says, summed over engines; None where it is no page of a server known here."""
    lines = body.decode("utf-8", "replace").splitlines()
    for names in _SERVERS:
        found = _values(lines, (names.running, names.waiting, *names.kv, *names.progress))
        if names.running not in found:
            continue
        counters = [sum(found[name]) for name in names.progress if name in found]
        usage = next((max(found[name]) for name in names.kv if name in found), None)
        return Gauges(
            running=sum(found[names.running]),
            waiting=sum(found.get(names.waiting, ())),
            at=at,
            kv=usage,
            progress=sum(counters) if counters else None,
        )
    return None


def _values(lines: Iterable[str], names: Sequence[str]) -> Mapping[str, list[float]]:
    """Return the values of the named series; other lines, most of a page, are not parsed."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - needed where calls are made

    wanted = "".join(f"{line}\n" for line in lines if line.startswith(tuple(names)))
    found: dict[str, list[float]] = {}
    try:
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                if sample.name in names and math.isfinite(sample.value):
                    found.setdefault(sample.name, []).append(float(sample.value))
    except ValueError:
        return {}
    return found
