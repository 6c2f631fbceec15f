"""Keeps `services.json`: which background processes were started here, and which of them still run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.places import StateDir
from producer import local_broker, processes
from producer.processes import Process


class Services(msgspec.Struct, frozen=True):
    """The processes that were started here and still run."""

    workers: tuple[Process, ...] = ()
    """The oldest first; those that drain are among them."""
    concurrency: int = 0
    """Slots of each worker."""
    settings: str = ""
    """A digest of the settings that the workers were started with."""
    log_format: str = ""
    """How the workers write their logs, where `up` was told; empty: as MILL_LOG_FORMAT says."""
    flower: Process | None = None
    flower_url: str = ""
    beside: tuple[Process, ...] = ()
    """Other processes that end with these services, such as a model server for trying things out."""
    broker: Process | None = None
    """The embedded server; none where MILL_REDIS_URL names one, or where it is down."""

    @property
    def working(self) -> tuple[Process, ...]:
        """The workers that take new samples."""
        return tuple(worker for worker in self.workers if not worker.draining)

    @property
    def all(self) -> tuple[Process, ...]:
        """Every process, in the order in which they are to be stopped."""
        flower = (self.flower,) if self.flower else ()
        broker = (self.broker,) if self.broker else ()
        return (*flower, *self.workers, *self.beside, *broker)


def read(state: StateDir) -> Services:
    """Return what was started here and still runs; a later process with the same id does not count."""
    try:
        recorded = msgspec.json.decode(state.services.read_bytes(), type=Services)
    except (FileNotFoundError, msgspec.DecodeError):
        recorded = Services()
    flower = recorded.flower if recorded.flower and processes.is_alive(recorded.flower) else None
    embedded = local_broker.recorded(state)
    broker = embedded.process(state) if embedded else None
    return msgspec.structs.replace(
        recorded,
        workers=_alive(recorded.workers),
        flower=flower,
        flower_url=recorded.flower_url if flower else "",
        beside=_alive(recorded.beside),
        broker=broker if broker and processes.is_alive(broker) else None,
    )


def write(state: StateDir, services: Services) -> None:
    """Replace what is recorded."""
    local_broker.write_private(state.services, msgspec.json.format(msgspec.json.encode(services)) + b"\n")


def minus(now: Services, before: Services) -> Services:
    """Return what runs now and did not run before."""
    old = set(before.all)
    return msgspec.structs.replace(
        now,
        workers=tuple(worker for worker in now.workers if worker not in old),
        flower=now.flower if now.flower not in old else None,
        beside=tuple(process for process in now.beside if process not in old),
        broker=now.broker if now.broker not in old else None,
    )


def _alive(recorded: Sequence[Process]) -> tuple[Process, ...]:
    return tuple(process for process in recorded if processes.is_alive(process))
