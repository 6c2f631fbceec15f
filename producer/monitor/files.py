"""Fills in, out of the files, what a snapshot lacks without Redis: what a worker last wrote into `progress.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from app.places import dataset_folder
from app.snapshot import SCHEMA_VERSION, Counts, Part, Rate, Rates, Snapshot, State

FRESH_S = 30.0
"""Seconds for which the numbers that a worker wrote are shown as they are: it may well go on writing them."""
_decode = msgspec.json.Decoder(Snapshot).decode


def read_progress(prepared: Path, dataset: str) -> Snapshot | None:
    """Return what was last written for a dataset; None where there is nothing, or it has another form."""
    try:
        told = _decode(dataset_folder(prepared, dataset).progress.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return told if told.schema == SCHEMA_VERSION and dataset in told.datasets else None


def fill_in(snapshot: Snapshot, prepared: Path) -> tuple[Snapshot, float | None]:
    """Return a snapshot that was taken without Redis, filled in, and when the newest filling was written.

    Records are counted in the files of now. While what a worker wrote is fresh it is shown whole; later only what stays
    true: latency, lengths and failed calls so far. Rates, ETA, servers and workers are then unknown.
    """
    told = {name: one for name in snapshot.datasets if (one := read_progress(prepared, name)) is not None}
    newest = max(told.values(), key=lambda one: one.at, default=None)
    if newest is None:
        return snapshot, None
    parts = {
        name: _fill_part(part, told[name], now=snapshot.at) if name in told else part
        for name, part in snapshot.datasets.items()
    }
    fresh = snapshot.at - newest.at <= FRESH_S
    totals = _sum(list(parts.values()), snapshot.totals)
    filled = msgspec.structs.replace(
        snapshot,
        totals=totals,
        datasets=parts,
        workers=newest.workers if fresh else [],
        endpoints=newest.endpoints if fresh else [],
    )
    return filled, newest.at


def _sum(parts: Sequence[Part], totals: Part) -> Part:
    """Return the totals of the filled parts: their sums, and of an only one everything."""
    if len(parts) == 1:
        return msgspec.structs.replace(parts[0], notes=totals.notes)
    sums = {}
    for field in Counts.__struct_fields__:
        values: list[int | None] = [getattr(part.counts, field) for part in parts]
        sums[field] = None if None in values else sum(value or 0 for value in values)
    samples, left = sums["samples"] or 0, sums["left"] or 0
    return msgspec.structs.replace(
        totals,
        state=next(state for state in State if any(part.state is state for part in parts)),
        counts=Counts(**cast("dict[str, int]", sums)),
        percent=math.floor(1000 * (samples - left) / samples) / 10 if samples else None,
        rates=Rates(
            now=_add([part.rates.now for part in parts]), five_minutes=_add([part.rates.five_minutes for part in parts])
        ),
    )


def _add(rates: Sequence[Rate]) -> Rate:
    """Return the sum of what is known."""
    known = [rate for rate in rates if rate.samples_per_s is not None]
    if not known:
        return Rate()
    return Rate(
        samples_per_s=sum(rate.samples_per_s or 0.0 for rate in known),
        tokens_per_s=sum(rate.tokens_per_s or 0.0 for rate in known),
        rejected_per_s=sum(rate.rejected_per_s or 0.0 for rate in known),
        failed_per_s=sum(rate.failed_per_s or 0.0 for rate in known),
        window_s=max((rate.window_s or 0.0 for rate in known), default=None),
    )


def _fill_part(part: Part, told: Snapshot, *, now: float) -> Part:
    then = next(iter(told.datasets.values()))
    if not part.counts.left:  # then nothing waits, whoever is asked
        nothing = msgspec.structs.replace(part.counts, queued=0, in_flight=0, missing=0, orphaned=0)
        part = msgspec.structs.replace(part, counts=nothing)
    if part.counts.left and now - told.at <= FRESH_S:
        return then
    return msgspec.structs.replace(
        part,
        latency=then.latency,
        tokens=msgspec.structs.replace(part.tokens, p95=then.tokens.p95, buckets=then.tokens.buckets),
        call_faults=then.call_faults,
        run_started_at=then.run_started_at,
    )
