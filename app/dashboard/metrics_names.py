"""The names of all metrics, each with type, unit, labels and meaning."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

PREFIX: Final = "promptmill_"


class Type(enum.StrEnum):
    """What a metric's number means to Prometheus."""

    COUNTER = "counter"
    """Only grows, or begins anew at 0: what Redis has counted since it has known the dataset."""
    GAUGE = "gauge"
    """As it is now. Counts of what is on disk are gauges, because a retry or a repair makes some of them smaller."""
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    """Without the prefix; a counter's ends in `_total`."""
    type: Type
    unit: str
    """What its number counts; empty for a number without a unit."""
    labels: tuple[str, ...]
    meaning: str
    """One line of help."""

    @property
    def full_name(self) -> str:
        """The name that queries use; a histogram's series have `_bucket`, `_count` and `_sum` behind it."""
        return f"{PREFIX}{self.name}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        ends = ("_bucket", "_count", "_sum") if self.type is Type.HISTOGRAM else ("",)
        return tuple(f"{self.full_name}{end}" for end in ends)


def _counter(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name, Type.COUNTER, unit, labels, meaning)


def _gauge(name: str, unit: str, labels: tuple[str, ...], meaning: str) -> Family:
    return Family(name, Type.GAUGE, unit, labels, meaning)


def _histogram(name: str, unit: str, meaning: str) -> Family:
    return Family(name, Type.HISTOGRAM, unit, _DATASET, meaning)


_DATASET = ("dataset",)
_ENDPOINT = ("endpoint",)

_ALL: Final = (
    # What is on disk: known without Redis too.
    _gauge(
        "dataset_samples",
        "samples",
        ("dataset", "outcome"),
        "Samples by the outcome that is on disk (accepted, rejected, failed); none: without a final record.",
    ),
    _gauge("dataset_refused_rows", "rows", _DATASET, "Input rows that never became samples."),
    _gauge("dataset_output_tokens", "tokens", _DATASET, "Completion tokens of the accepted samples on disk."),
    _gauge("last_record_timestamp_seconds", "seconds", _DATASET, "When the newest sample on disk was finished."),
    _gauge("disk_free_bytes", "bytes", (), "Free space where the results are written."),
    _gauge("disk_size_bytes", "bytes", (), "Size of that disk."),
    # What Redis has counted.
    _counter("samples_total", "samples", ("dataset", "outcome"), "Samples recorded as accepted, rejected or failed."),
    _counter("output_tokens_total", "tokens", _DATASET, "Completion tokens of accepted samples."),
    _counter("prompt_tokens_total", "tokens", _DATASET, "Prompt tokens of answered samples."),
    _counter("call_faults_total", "calls", ("dataset", "fault"), "Failed calls by kind of fault, repeated ones too."),
    _histogram("request_seconds", "seconds", "How long answered calls took, waiting for a permit not included."),
    _histogram("completion_tokens", "tokens", "Completion tokens of each accepted sample."),
    # What waits and what moves.
    _gauge("queue_depth", "samples", _DATASET, "Samples that wait in Redis."),
    _gauge("in_flight", "samples", _DATASET, "Samples that a living worker has taken."),
    _gauge("missing", "samples", _DATASET, "Samples neither recorded nor in Redis."),
    _gauge("orphaned", "samples", _DATASET, "Of the queue, samples whose worker died; they come back by themselves."),
    _gauge("oldest_in_flight_seconds", "seconds", _DATASET, "For how long a worker has had the oldest of them."),
    _gauge("dataset_paused", "", _DATASET, "1 while the dataset is paused, else 0."),
    _gauge("dataset_state", "", ("dataset", "state"), "1 for the state that the dataset is in, 0 for all others."),
    _gauge("stalled_since_timestamp_seconds", "seconds", _DATASET, "Since when nothing moves; absent while it does."),
    _gauge(
        "eta_seconds",
        "seconds",
        ("dataset", "bound"),
        "Until nothing of the dataset is left: low, expected, high; absent while nobody can know.",
    ),
    _gauge("all_eta_seconds", "seconds", ("bound",), "The same for all datasets together, paused ones left out."),
    # Model servers, workers, Redis and the look itself.
    _gauge("endpoint_info", "", ("endpoint", "url"), "1; tells a model server's URL, without credentials."),
    _gauge("endpoint_in_flight", "requests", _ENDPOINT, "Requests in flight to a model server, of all workers."),
    _gauge("in_flight_limit", "requests", _ENDPOINT, "How many of them the workers keep to together."),
    _gauge("endpoint_latency_seconds", "seconds", _ENDPOINT, "Mean of the last answers' latencies."),
    _gauge("breaker_state", "", ("endpoint", "state"), "1 for the state of a model server: up, down or paused."),
    _gauge("workers", "workers", (), "Living workers."),
    _gauge("worker_slots", "samples", (), "Samples that all workers together can take at once."),
    _gauge("worker_slots_busy", "samples", (), "Slots that hold a sample."),
    _gauge("redis_up", "", (), "1 if Redis answered this look, else 0."),
    _gauge("redis_memory_bytes", "bytes", (), "Memory that Redis uses."),
    _gauge("redis_memory_max_bytes", "bytes", (), "Its maxmemory; absent where it has none."),
    _gauge("snapshot_timestamp_seconds", "seconds", (), "When these numbers were read."),
    _gauge("build_info", "", ("version",), "1; tells the version of promptmill."),
)

FAMILIES: Final = {family.name: family for family in _ALL}
"""Every metric by its name without the prefix, in the order in which they are told."""
