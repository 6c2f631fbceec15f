"""The work list in Redis: what waits, what is in flight, what got lost. It may vanish; the files are the truth."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import redis.exceptions

from app.broker import Client, text
from app.clock import RedisClock
from app.lane import Lane, Taken, decode_sample
from app.payloads import Payloads
from app.places import Keys, folder_name, is_extraction, queue_name
from app.records import Kind, Sample
from app.tally import Done, Tally

_SCAN = 1000


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
    ages: Sequence[float] = ()
    """Seconds for which each sample in flight has been taken, the oldest first."""
    paused: str | None = None


class Queue:
    """Every command that promptmill itself sends about datasets; Celery's own traffic aside."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._lane = Lane(client, keys)
        self._payloads = Payloads(client, keys)
        self._clock = RedisClock()
        self.tally = Tally(client, keys, now=self.now)

    def now(self) -> float:
        """Return Unix seconds by Redis' clock, which every machine's workers share."""
        return self._clock.read(self.client)

    def reckon_now(self) -> float:
        """Return the same without asking Redis, by its last answer; by this machine's clock until it has answered."""
        return self._clock.now()

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

    def payloads(self, dataset: str, ids: Sequence[str]) -> dict[str, Sample]:
        """Return the waiting samples of those ids."""
        if not ids:
            return {}
        values = cast("list[bytes | None]", self.client.hmget(self.keys.prompts(dataset), list(ids)))
        return {id_: decode_sample(value) for id_, value in zip(ids, values, strict=True) if value is not None}

    def asked_again(self, dataset: str, ids: Sequence[str]) -> dict[str, Kind]:
        """Return those ids that are being asked again, and what they are on disk."""
        found = dict[str, Kind]()
        for kind in (Kind.FAILED, Kind.REJECTED) if ids else ():
            answers = cast("list[int]", self.client.smismember(self.keys.again(dataset, kind), list(ids)))
            found.update((id_, kind) for id_, there in zip(ids, answers, strict=True) if there)
        return found

    def put(
        self,
        dataset: str,
        samples: Sequence[Sample],
        again: Mapping[str, Kind] | None = None,
        *,
        replace: bool = False,
    ) -> list[str]:
        """Store payloads; return the ids whose round was not there yet.

        `again` names ids on disk as failed or rejected. A later round takes the place of an earlier one, which is on
        disk. `replace` puts a new payload in the place of a waiting one of the same round; a sample that is being
        asked is recorded as it was asked.
        """
        if not samples:
            return []
        if not self.client.hlen(self.keys.prompts(dataset)):
            self.tally.begin(dataset)
        return self._payloads.put(dataset, samples, again or {}, replace=replace)

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
        return self._lane.take(dataset, sample_id, owner)

    def release(self, dataset: str, sample_id: str, owner: str) -> None:
        """Give a sample back that `owner` took and did not record."""
        self._lane.release(dataset, sample_id, owner)

    def blame(self, dataset: str, sample_id: str, owner: str) -> bool:
        """Count the death of a model server that worked on a sample of `owner`; tell whether it is a suspect now.

        A suspect is given back: it is to be asked in the lane.
        """
        return self._lane.blame(dataset, sample_id, owner)

    def crash(self, dataset: str, sample_id: str) -> int:
        """Count an unexpected error while a sample was asked; return how many there were."""
        return int(self.client.hincrby(self.keys.crashes(dataset), sample_id, 1))

    def finish(self, dataset: str, done: Iterable[Done], *, at: float | None = None) -> None:
        """Drop the payloads of recorded samples and count each that had one; to be called again when a reply is lost.

        The payload of a later round than the recorded one stays.
        """
        if items := list(done):
            self._payloads.finish(dataset, items, second=int(self.now() if at is None else at))

    def forget(self, dataset: str, ids: Iterable[str] | Mapping[str, int]) -> None:
        """Drop the payloads of samples that turned out to be recorded already, and count nothing.

        `ids` may say for each the round that is recorded; the payload of a later one stays.
        """
        self._payloads.forget(dataset, ids)

    # Pausing

    def pause(self, dataset: str, why: str) -> None:
        """Stop workers from taking the dataset's tickets."""
        self.client.hset(self.keys.paused, dataset, why)
        self.tally.mark_pause(dataset)

    def resume(self, dataset: str) -> None:
        """Let workers take the dataset's tickets again; what went wrong before is forgiven."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hdel(self.keys.paused, dataset)
            pipe.delete(self.keys.crashes(dataset))
            pipe.execute()
        self.tally.mark_resume(dataset)

    def queues(self, *, extract: bool = False) -> tuple[set[str], set[str]]:
        """Return the Celery queues that workers shall read, and those of paused datasets.

        `extract`: those of datasets of hidden states, for the workers that make them; else all others.
        """
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hkeys(self.keys.datasets)
            pipe.hkeys(self.keys.paused)
            known, paused = pipe.execute()
        stopped = {queue_name(name) for name in map(text, paused) if is_extraction(name) == extract}
        return {queue_name(name) for name in map(text, known) if is_extraction(name) == extract} - stopped, stopped

    # Looking

    def waiting(self, dataset: str) -> Waiting:
        """Return what Redis holds of the dataset."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hlen(self.keys.prompts(dataset))
            pipe.hgetall(self.keys.flights(dataset))
            pipe.scard(self.keys.again(dataset, Kind.FAILED))
            pipe.scard(self.keys.again(dataset, Kind.REJECTED))
            pipe.hget(self.keys.paused, dataset)
            prompts, flights, failed, rejected, paused = pipe.execute()
        there = self.waiting_ids(dataset, [text(id_) for id_ in flights])
        starts = [read_flight(value) for id_, value in flights.items() if text(id_) in there]
        alive = self.living({owner for owner, _start in starts})
        now = self.now()
        flying = (now - start for owner, start in starts if owner in alive)
        ages = tuple(sorted((max(0.0, age) for age in flying), reverse=True))
        return Waiting(
            prompts=prompts,
            in_flight=len(ages),
            orphaned=len(starts) - len(ages),
            again_failed=failed,
            again_rejected=rejected,
            ages=ages,
            paused=text(paused) or None,
        )

    def flights(self, dataset: str) -> dict[str, str]:
        """Return the samples that were taken and not given back or recorded yet, and who took each."""
        values = cast("dict[bytes, bytes]", self.client.hgetall(self.keys.flights(dataset)))
        return {text(id_): read_flight(value)[0] for id_, value in values.items()}

    def drop_flights(self, dataset: str, ids: Sequence[str]) -> None:
        """Forget who asks those ids."""
        if ids:
            self.client.hdel(self.keys.flights(dataset), *ids)

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
            new = pipe.execute()[1]
        if new:
            self.tally.mark_change()

    def part(self, owner: str) -> None:
        """Tell that a worker has ended."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.delete(self.keys.worker(owner))
            pipe.srem(self.keys.workers, owner)
            known = pipe.execute()[1]
        if known:
            self.tally.mark_change()

    def workers(self) -> list[dict[str, Any]]:
        """Return the heartbeats of the living workers, by owner."""
        owners = sorted(text(owner) for owner in cast("set[bytes]", self.client.smembers(self.keys.workers)))
        if not owners:
            return []
        values = cast("list[bytes | None]", self.client.mget([self.keys.worker(owner) for owner in owners]))
        gone = [owner for owner, value in zip(owners, values, strict=True) if value is None]
        # Whoever looks needs no Redis that takes writes: a full one, or a replica, is looked at all the more.
        with contextlib.suppress(redis.exceptions.ResponseError):
            if gone and self.client.srem(self.keys.workers, *gone):
                self.tally.mark_change()
        beats = zip(owners, values, strict=True)
        return [{"owner": owner, **msgspec.json.decode(value)} for owner, value in beats if value is not None]

    def begin_runs(self) -> None:
        """Start every dataset's rates anew: the first worker came up."""
        for dataset in self.datasets():
            self.tally.begin(dataset)

    def take_turn(self, name: str, owner: str, *, for_s: float) -> bool:
        """Tell whether a periodic duty falls to `owner` now; nobody else gets it for `for_s` seconds."""
        return take_turn(self.client, self.keys.turn(name), owner, for_s=for_s)

    def bound(self) -> int | None:
        """Return how many requests in flight per model server a person has set for all workers; None: no such."""
        value = cast("bytes | None", self.client.get(self.keys.bound))
        return int(value) if value is not None and value.isdigit() else None

    def set_bound(self, n: int | None) -> None:
        """Set that bound, in the place of MILL_MAX_IN_FLIGHT, or with None leave it to MILL_MAX_IN_FLIGHT again.

        Workers keep to it within about a second; what runs beyond it is let finish.
        Raises ValueError for a bound below 1.
        """
        if n is None:
            self.client.delete(self.keys.bound)
            return
        if n < 1:
            raise ValueError(f"a bound of {n} requests in flight would stop all work")
        self.client.set(self.keys.bound, n)

    # Losing

    def without_ticket(self, dataset: str, *, thorough: bool = False) -> set[str]:
        """Return the ids that have a payload but no ticket, queued or delivered.

        A ticket that moves while this looks can be missed, so only an id that is found twice, some seconds apart,
        is lost. Cheap while the counts agree: unless `thorough`, the queue is read only when it holds too few tickets,
        and tickets of samples that do not wait any more can hide others' loss until workers have taken them.
        """
        delivered = self._delivered_ids(dataset)
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hlen(self.keys.prompts(dataset))
            pipe.llen(self.keys.queue(dataset))
            prompts, queued = pipe.execute()
        if not prompts or (not thorough and prompts <= queued + len(delivered)):
            return set()
        ids = cast("list[bytes]", self.client.hkeys(self.keys.prompts(dataset)))
        missing = {text(id_) for id_ in ids} - delivered
        for message in self._scan_tickets(dataset):
            missing.discard(_sample_id_of(message, dataset))
        # A delivery that was acked by its copy may still be asked by a living worker.
        owners = self.flights(dataset)
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


def take_turn(client: Client, key: str, owner: str, *, for_s: float, longest_s: float | None = None) -> bool:
    """Tell whether a turn falls to `owner` now; nobody else gets it for `for_s` seconds.

    A turn with more than `longest_s` (`for_s` unless given) to go was taken before Redis' clock was set back, and is
    over.
    """
    for_ms = max(1, int(for_s * 1000))
    if client.set(key, owner, nx=True, px=for_ms):
        return True
    if client.pttl(key) <= (longest_s or for_s) * 1000:
        return False
    client.set(key, owner, px=for_ms)
    return True


def read_flight(value: bytes) -> tuple[str, float]:
    """Return who asks a sample and since when, in Unix seconds, out of the hash of flights."""
    owner, _, start = text(value).rpartition("|")
    return owner, float(start or 0)


def _sample_id_of(message: Mapping[str, Any], dataset: str) -> str:
    """Return the sample id of a ticket: its task id is `<dataset>:<sample id>`."""
    task_id = str(message.get("headers", {}).get("id", ""))
    return task_id.removeprefix(f"{dataset}:")


def task_id(dataset: str, sample_id: str) -> str:
    """Return the Celery task id of a ticket."""
    return f"{dataset}:{sample_id}"
