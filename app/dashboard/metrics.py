"""Writes a look at the run in Prometheus' text format; nothing is remembered from one look to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app import __version__
from app.dashboard.metrics_names import FAMILIES, Family, Type
from app.histogram import Histogram, upper_bound
from app.snapshot import Eta, Part, Snapshot, State
from app.tally import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BUCKETS = range(-10, 37, 2)
"""Buckets of a latency that are told: every second one from 0.1 s to 3,981 s; neighbours differ by 58 %."""
LENGTH_BUCKETS = range(0, 53, 2)
"""The same of an answer's length: from 1 to 158,489 tokens."""
BREAKER_STATES = ("up", "down", "paused")

Row = tuple[tuple[str, ...], float | None]
"""The values of a series' labels, in the family's order, and its number; None: it is not told."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look at the run."""

    snapshot: Snapshot
    redis_up: bool = False
    stats: Mapping[str, Stats] = dataclasses.field(default_factory=dict)
    """Dataset -> what Redis has counted of it; empty without Redis."""
    paused: frozenset[str] | None = None
    """Datasets that are held back; None without Redis."""
    redis_memory: int | None = None
    """Bytes."""
    redis_memory_max: int | None = None
    """Bytes; None where there is no bound, too."""
    disk_free: int | None = None
    """Bytes; None where the results' disk cannot be looked at."""
    disk_size: int | None = None


def exposition(reading: Reading) -> bytes:
    """Return the page that Prometheus reads."""
    return generate_latest(ReadingCollector(reading))


class ReadingCollector(Collector):
    """Tells one reading in the words of prometheus_client."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have something to tell, in their documented order."""
        reading = self._reading
        rows: dict[str, Iterable[Row]] = dict(_of_all(reading))
        for told in (_of_datasets(reading.snapshot.datasets), _of_redis(reading), _of_endpoints(reading.snapshot)):
            rows.update(told)
        metrics = {name: _plain(FAMILIES[name], told) for name, told in rows.items()}
        latencies = {name: one.latency for name, one in reading.stats.items()}
        lengths = {name: one.lengths for name, one in reading.stats.items()}
        metrics["request_seconds"] = _histogram(FAMILIES["request_seconds"], latencies, LATENCY_BUCKETS)
        metrics["completion_tokens"] = _histogram(FAMILIES["completion_tokens"], lengths, LENGTH_BUCKETS)
        yield from (metrics[name] for name in FAMILIES if metrics[name].samples)


def _plain(family: Family, rows: Iterable[Row]) -> Metric:
    kind = CounterMetricFamily if family.type is Type.COUNTER else GaugeMetricFamily
    metric = kind(family.full_name, family.meaning, labels=family.labels)
    for labels, value in rows:
        if value is not None:
            metric.add_metric(labels, value)
    return metric


def _histogram(family: Family, by_dataset: Mapping[str, Histogram], told: range) -> Metric:
    metric = HistogramMetricFamily(family.full_name, family.meaning, labels=family.labels)
    for dataset, histogram in by_dataset.items():
        metric.add_metric([dataset], _cumulative(histogram, told), histogram.total)
    return metric


def _cumulative(histogram: Histogram, told: range) -> list[tuple[str, float]]:
    """Return (upper bound, values up to it) for each bucket that is told, and for all values."""
    counts = histogram.counts.items()
    bounds = [(str(upper_bound(last)), float(sum(n for bucket, n in counts if bucket <= last))) for last in told]
    return [*bounds, ("+Inf", float(histogram.count))]


# Rows of each family


def _of_datasets(parts: Mapping[str, Part]) -> Iterator[tuple[str, Iterable[Row]]]:
    def each(value: str, of: str = "") -> list[Row]:
        return [((name,), getattr(getattr(part, of) if of else part, value)) for name, part in parts.items()]

    yield "dataset_samples", [row for name, part in parts.items() for row in _outcomes(name, part)]
    yield "dataset_refused_rows", each("refused", "counts")
    yield "dataset_output_tokens", each("total", "tokens")
    yield "last_record_timestamp_seconds", each("last_record_at")
    yield "queue_depth", each("queued", "counts")
    yield "in_flight", each("in_flight", "counts")
    yield "missing", each("missing", "counts")
    yield "orphaned", each("orphaned", "counts")
    yield "oldest_in_flight_seconds", each("oldest_in_flight_s")
    yield "stalled_since_timestamp_seconds", each("stalled_since")
    states = tuple(State)
    yield "dataset_state", [row for name, part in parts.items() for row in _one_of(name, part.state, states)]
    yield "eta_seconds", [((name, *labels), s) for name, part in parts.items() for labels, s in _eta(part.eta)]


def _outcomes(dataset: str, part: Part) -> Iterator[Row]:
    counts = part.counts
    told = {"accepted": counts.accepted, "rejected": counts.rejected, "failed": counts.failed, "none": counts.left}
    for outcome, n in told.items():
        yield (dataset, outcome), n


def _eta(eta: Eta) -> Iterator[Row]:
    for bound, seconds in (("low", eta.low_s), ("expected", eta.seconds), ("high", eta.high_s)):
        yield (bound,), seconds


def _of_redis(reading: Reading) -> Iterator[tuple[str, Iterable[Row]]]:
    stats, paused = reading.stats, reading.paused
    yield "samples_total", [row for name, one in stats.items() for row in _settled(name, one)]
    yield "output_tokens_total", [((name,), one.tokens) for name, one in stats.items()]
    yield "prompt_tokens_total", [((name,), one.prompt_tokens) for name, one in stats.items()]
    yield "call_faults_total", [((name, kind), n) for name, one in stats.items() for kind, n in one.faults.items()]
    held = () if paused is None else [((name,), float(name in paused)) for name in reading.snapshot.datasets]
    yield "dataset_paused", held
    yield "redis_up", [((), float(reading.redis_up))]
    yield "redis_memory_bytes", [((), reading.redis_memory)]
    yield "redis_memory_max_bytes", [((), reading.redis_memory_max)]


def _settled(dataset: str, stats: Stats) -> Iterator[Row]:
    for outcome, n in (("accepted", stats.accepted), ("rejected", stats.rejected), ("failed", stats.failed)):
        yield (dataset, outcome), n


def _of_endpoints(snapshot: Snapshot) -> Iterator[tuple[str, Iterable[Row]]]:
    endpoints = snapshot.endpoints
    yield "endpoint_info", [((one.name, one.url), 1.0) for one in endpoints]
    yield "endpoint_in_flight", [((one.name,), one.in_flight) for one in endpoints]
    yield "in_flight_limit", [((one.name,), one.bound) for one in endpoints]
    yield "endpoint_latency_seconds", [((one.name,), one.latency_s) for one in endpoints]
    yield "breaker_state", [row for one in endpoints for row in _one_of(one.name, one.state, BREAKER_STATES)]


def _one_of(name: str, state: str, states: Sequence[str]) -> Iterator[Row]:
    # A worker of another version may know a state more.
    for one in dict.fromkeys((*states, state)):
        yield (name, one), float(one == state)


def _of_all(reading: Reading) -> Iterator[tuple[str, Iterable[Row]]]:
    snapshot = reading.snapshot
    workers = snapshot.workers if snapshot.broker.reachable else None
    yield "disk_free_bytes", [((), reading.disk_free)]
    yield "disk_size_bytes", [((), reading.disk_size)]
    yield "all_eta_seconds", list(_eta(snapshot.totals.eta))
    yield "workers", [((), None if workers is None else len(workers))]
    yield "worker_slots", [((), _sum(workers, "slots"))]
    yield "worker_slots_busy", [((), _sum(workers, "busy"))]
    yield "snapshot_timestamp_seconds", [((), snapshot.at)]
    yield "build_info", [((__version__,), 1.0)]


def _sum(workers: Sequence[Mapping[str, object]] | None, field: str) -> int | None:
    if workers is None:
        return None
    return sum(n for worker in workers if isinstance(n := worker.get(field), int))
