"""The work list in Redis: what waits, what is in flight, what got lost. It may vanish; the files are the truth."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, cast

import msgspec
import redis.client

from app.broker import Client, text
from app.places import Keys, folder_name, queue_name
from app.records import Kind, Sample

_SCAN = 1000
_RATE_KEEP_S = 900
"""Seconds of per-second tallies that are kept."""

_decode_sample = msgspec.json.Decoder(Sample).decode


@dataclasses.dataclass(frozen=True)
class Taken:
    """The answer to a worker that wants to ask a sample."""

    state: str
    """gone, held, paused, new, mine or orphan (see take.lua)."""
    sample: Sample | None = None
    deaths: int = 0
    """Owners that died while asking it."""

    @property
    def ours(self) -> bool:
        """Whether this worker may ask it."""
        return self.sample is not None


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What Redis holds of one dataset."""

    prompts: int = 0
    """Payloads: samples queued or in flight."""
    in_flight: int = 0
    """Samples that a living worker is asking."""
    orphaned: int = 0
    """Samples whose worker died; they come back when its lease runs out."""
    again_failed: int = 0
    """Of `prompts`, those on disk as failed (being asked again)."""
    again_rejected: int = 0
    oldest_in_flight_s: float | None = None
    paused: str | None = None
    session: float | None = None
    """Unix seconds at which the present run of work began."""


@dataclasses.dataclass(frozen=True)
class Done:
    """A sample that is on disk, for the books in Redis."""

    id: str
    kind: Kind
    tokens: int = 0


class Queue:
    """Every command that promptmill itself sends about datasets; Celery's own traffic aside."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._take = client.register_script(_script("take"))
        self._release = client.register_script(_script("release"))

    # Filling

    def register(self, dataset: str, fingerprint: str, settings: Mapping[str, Any]) -> None:
        """Make the dataset known and carry its generation settings with it."""
        with self.client.pipeline() as pipe:
            pipe.hset(self.keys.datasets, dataset, folder_name(dataset))
            value = {fingerprint: msgspec.json.encode(settings), "current": fingerprint}
            pipe.hset(self.keys.settings(dataset), mapping=cast("Mapping[Any, Any]", value))
            pipe.execute()

    def settings(self, dataset: str, fingerprint: str) -> dict[str, Any] | None:
        """Return the generation settings of that fingerprint."""
        value = cast("bytes | None", self.client.hget(self.keys.settings(dataset), fingerprint))
        return None if value is None else cast("dict[str, Any]", msgspec.json.decode(value))

    def waiting_ids(self, dataset: str, ids: Sequence[str]) -> set[str]:
        """Return which of the ids have a payload."""
        if not ids:
            return set()
        with self.client.pipeline(transaction=False) as pipe:
            for id_ in ids:
                pipe.hexists(self.keys.prompts(dataset), id_)
            return {id_ for id_, there in zip(ids, pipe.execute(), strict=True) if there}

    def put(
        self,
        dataset: str,
        samples: Sequence[Sample],
        again: Mapping[str, Kind] | None = None,
        *,
        replace: bool = False,
    ) -> list[str]:
        """Store payloads; return the ids that were not there yet.

        `again` names ids on disk as failed or rejected. `replace` puts a new payload in the place of a waiting one;
        a sample that is being asked is recorded as it was asked.
        """
        if not samples:
            return []
        session = self.keys.session(dataset)
        if not self.client.hlen(self.keys.prompts(dataset)):
            self.client.set(session, repr(time.time()))
        with self.client.pipeline(transaction=False) as pipe:
            for sample in samples:
                pipe.hsetnx(self.keys.prompts(dataset), sample.id, msgspec.json.encode(sample).decode("utf-8"))
            for kind in (Kind.FAILED, Kind.REJECTED):
                ids = [id_ for id_, before in (again or {}).items() if before is kind]
                if ids:
                    pipe.sadd(self.keys.again(dataset, kind), *ids)
            fresh = pipe.execute()
        waiting = [sample for sample, new in zip(samples, fresh, strict=False) if not new]
        if replace and waiting:
            payloads = {sample.id: msgspec.json.encode(sample).decode("utf-8") for sample in waiting}
            self.client.hset(self.keys.prompts(dataset), mapping=cast("Mapping[Any, Any]", payloads))
        return [sample.id for sample, new in zip(samples, fresh, strict=False) if new]

    def pause_reason(self, dataset: str) -> str | None:
        """Return why the dataset is paused, if it is."""
        return text(cast("bytes | None", self.client.hget(self.keys.paused, dataset))) or None

    def depth(self, dataset: str | None = None) -> int:
        """Return how many prompts Redis holds, of one dataset or of all."""
        names = [dataset] if dataset else self.datasets()
        with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hlen(self.keys.prompts(name))
            return sum(pipe.execute())

    def datasets(self) -> list[str]:
        """Return the known datasets' names."""
        return sorted(text(name) for name in cast("dict[bytes, bytes]", self.client.hgetall(self.keys.datasets)))

    # Working

    def take(self, dataset: str, sample_id: str, owner: str) -> Taken:
        """Take a sample for `owner`, or say why not."""
        keys = [
            self.keys.prompts(dataset),
            self.keys.flights(dataset),
            self.keys.deaths(dataset),
            self.keys.paused,
        ]
        args = [sample_id, owner, self.keys.worker(""), dataset]
        state, *rest = cast("list[Any]", self._take(keys=keys, args=args))
        if not rest:
            return Taken(text(state))
        return Taken(text(state), _decode_sample(rest[0]), int(rest[1]))

    def release(self, dataset: str, sample_id: str, owner: str) -> None:
        """Give a sample back that `owner` took and did not record."""
        self._release(keys=[self.keys.flights(dataset)], args=[sample_id, owner])

    def crash(self, dataset: str, sample_id: str) -> int:
        """Count an unexpected error while a sample was asked; return how many there were."""
        return int(self.client.hincrby(self.keys.crashes(dataset), sample_id, 1))

    def finish(self, dataset: str, done: Iterable[Done], *, at: float | None = None) -> None:
        """Drop the payloads of recorded samples and add them to the rates."""
        items = list(done)
        if not items:
            return
        ids = [item.id for item in items]
        second = int(time.time() if at is None else at)
        tally = Counter(f"{second}:{item.kind}" for item in items)
        tally[f"{second}:tokens"] = sum(item.tokens for item in items if item.kind is Kind.ACCEPTED)
        with self.client.pipeline(transaction=False) as pipe:
            self._drop(pipe, dataset, ids)
            for field, amount in tally.items():
                if amount:
                    pipe.hincrby(self.keys.rates(dataset), field, amount)
            pipe.execute()

    def forget(self, dataset: str, ids: Sequence[str]) -> None:
        """Drop the payloads of samples that turned out to be recorded already."""
        if not ids:
            return
        with self.client.pipeline(transaction=False) as pipe:
            self._drop(pipe, dataset, ids)
            pipe.execute()

    def _drop(self, pipe: redis.client.Pipeline, dataset: str, ids: Sequence[str]) -> None:
        keys = self.keys
        for key in (keys.prompts(dataset), keys.flights(dataset), keys.deaths(dataset), keys.crashes(dataset)):
            pipe.hdel(key, *ids)
        for kind in (Kind.FAILED, Kind.REJECTED):
            pipe.srem(self.keys.again(dataset, kind), *ids)

    # Pausing

    def pause(self, dataset: str, why: str) -> None:
        """Stop workers from taking the dataset's tickets."""
        self.client.hset(self.keys.paused, dataset, why)

    def resume(self, dataset: str) -> None:
        """Let workers take the dataset's tickets again; what went wrong before is forgiven."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hdel(self.keys.paused, dataset)
            pipe.delete(self.keys.crashes(dataset))
            pipe.execute()

    def queues(self) -> tuple[set[str], set[str]]:
        """Return the Celery queues that workers shall read, and those of paused datasets."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hkeys(self.keys.datasets)
            pipe.hkeys(self.keys.paused)
            known, paused = pipe.execute()
        stopped = {queue_name(text(name)) for name in paused}
        return {queue_name(text(name)) for name in known} - stopped, stopped

    # Looking

    def waiting(self, dataset: str) -> Waiting:
        """Return what Redis holds of the dataset."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hlen(self.keys.prompts(dataset))
            pipe.hvals(self.keys.flights(dataset))
            pipe.scard(self.keys.again(dataset, Kind.FAILED))
            pipe.scard(self.keys.again(dataset, Kind.REJECTED))
            pipe.hget(self.keys.paused, dataset)
            pipe.get(self.keys.session(dataset))
            prompts, flights, failed, rejected, paused, session = pipe.execute()
        starts = [_flight(value) for value in flights]
        alive = self.living({owner for owner, _start in starts})
        flying = [start for owner, start in starts if owner in alive]
        return Waiting(
            prompts=prompts,
            in_flight=len(flying),
            orphaned=len(starts) - len(flying),
            again_failed=failed,
            again_rejected=rejected,
            oldest_in_flight_s=max(0.0, time.time() - min(flying)) if flying else None,
            paused=text(paused) or None,
            session=float(session) if session else None,
        )

    def living(self, owners: Iterable[str]) -> set[str]:
        """Return which of those workers have a heartbeat."""
        wanted = sorted(owners)
        if not wanted:
            return set()
        values = cast("list[Any]", self.client.mget([self.keys.worker(owner) for owner in wanted]))
        return {owner for owner, value in zip(wanted, values, strict=True) if value is not None}

    def beat(self, owner: str, heartbeat: Mapping[str, Any], *, ttl_s: float) -> None:
        """Tell that a worker lives; it counts as dead `ttl_s` seconds later."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.set(self.keys.worker(owner), msgspec.json.encode(heartbeat).decode(), px=int(ttl_s * 1000))
            pipe.sadd(self.keys.workers, owner)
            pipe.execute()

    def part(self, owner: str) -> None:
        """Tell that a worker has ended."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.delete(self.keys.worker(owner))
            pipe.srem(self.keys.workers, owner)
            pipe.execute()

    def workers(self) -> list[dict[str, Any]]:
        """Return the heartbeats of the living workers, by owner."""
        owners = sorted(text(owner) for owner in cast("set[bytes]", self.client.smembers(self.keys.workers)))
        if not owners:
            return []
        values = cast("list[bytes | None]", self.client.mget([self.keys.worker(owner) for owner in owners]))
        gone = [owner for owner, value in zip(owners, values, strict=True) if value is None]
        if gone:
            self.client.srem(self.keys.workers, *gone)
        beats = zip(owners, values, strict=True)
        return [{"owner": owner, **msgspec.json.decode(value)} for owner, value in beats if value is not None]

    def rates(self, dataset: str) -> dict[int, dict[str, int]]:
        """Return per-second tallies: unix second -> {kind or "tokens": amount}."""
        seconds: dict[int, dict[str, int]] = {}
        values = cast("dict[bytes, bytes]", self.client.hgetall(self.keys.rates(dataset)))
        for field, amount in values.items():
            second, _, what = text(field).partition(":")
            seconds.setdefault(int(second), {})[what] = int(amount)
        return seconds

    def trim_rates(self, dataset: str) -> None:
        """Forget tallies older than 15 minutes."""
        oldest = time.time() - _RATE_KEEP_S
        fields = cast("list[bytes]", self.client.hkeys(self.keys.rates(dataset)))
        old = [field for field in fields if int(text(field).partition(":")[0]) < oldest]
        if old:
            self.client.hdel(self.keys.rates(dataset), *old)

    def begin_session(self) -> None:
        """Start every dataset's rates anew: the first worker came up."""
        for dataset in self.datasets():
            self.client.set(self.keys.session(dataset), repr(time.time()))

    def take_turn(self, name: str, owner: str, *, for_s: float) -> bool:
        """Tell whether a periodic duty falls to `owner` now; nobody else gets it for `for_s` seconds."""
        return bool(self.client.set(self.keys.turn(name), owner, nx=True, px=max(1, int(for_s * 1000))))

    # Losing

    def without_ticket(self, dataset: str) -> set[str]:
        """Return the ids that have a payload but no ticket, queued or delivered.

        A ticket that moves while this looks can be missed, so only an id that is found twice, some seconds apart,
        is lost. Cheap while the counts agree: the queue is read only when it holds too few tickets.
        """
        delivered = self._delivered_ids(dataset)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hlen(self.keys.prompts(dataset))
            pipe.llen(self.keys.queue(dataset))
            prompts, queued = pipe.execute()
        if prompts <= queued + len(delivered):
            return set()
        ids = cast("list[bytes]", self.client.hkeys(self.keys.prompts(dataset)))
        missing = {text(id_) for id_ in ids} - delivered
        for message in self._scan_tickets(dataset):
            missing.discard(_sample_id_of(message, dataset))
        # A delivery that was acked by its copy may still be asked by a living worker.
        flights = cast("dict[bytes, bytes]", self.client.hgetall(self.keys.flights(dataset)))
        owners = {text(id_): _flight(value)[0] for id_, value in flights.items()}
        alive = self.living(set(owners.values()))
        return {id_ for id_ in missing if owners.get(id_) not in alive}

    def _delivered_ids(self, dataset: str) -> set[str]:
        ids = set()
        for value in cast("list[bytes]", self.client.hvals(self.keys.unacked)):
            message, _exchange, routing_key = json.loads(value)
            if routing_key == queue_name(dataset):
                ids.add(_sample_id_of(message, dataset))
        return ids

    def _scan_tickets(self, dataset: str) -> Iterator[dict[str, Any]]:
        # From the far end, where new tickets come in, towards the end that workers pop.
        start = 0
        while page := cast("list[bytes]", self.client.lrange(self.keys.queue(dataset), start, start + _SCAN - 1)):
            yield from map(json.loads, page)
            start += len(page)


def _script(name: str) -> str:
    return resources.files("app").joinpath(f"lua/{name}.lua").read_text(encoding="utf-8")


def _flight(value: bytes) -> tuple[str, float]:
    owner, _, start = text(value).rpartition("|")
    return owner, float(start or 0)


def _sample_id_of(message: Mapping[str, Any], dataset: str) -> str:
    """Return the sample id of a ticket: its task id is `<dataset>:<sample id>`."""
    task_id = str(message.get("headers", {}).get("id", ""))
    return task_id.removeprefix(f"{dataset}:")


def task_id(dataset: str, sample_id: str) -> str:
    """Return the Celery task id of a ticket."""
    return f"{dataset}:{sample_id}"
