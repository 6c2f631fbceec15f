"""What each fault of a plan does, and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import redis

from producer.ports import free_port
from tests.chaos.crew import Seat
from tests.chaos.damage import TAILS, as_writer
from tests.chaos.inputs import Input
from tests.chaos.plan import Fault, Step
from tests.chaos.world import LEASE_S, Flights, ModelHost, World

End = Callable[[], None]
_LAST_POISON = 0.9
"""Share of a run after which no further prompt joins that kills servers."""
_SECRET = "another"  # noqa: S105  a test's


class Skipped(Exception):  # noqa: N818 - it says what is the case
    """The fault cannot happen now: what it would hit is not there."""


class Begun(NamedTuple):
    """A fault that has begun."""

    words: str
    end: End = lambda: None


def inject(world: World, step: Step) -> Begun:
    """Begin a fault.

    Raises Skipped.
    """
    if step.fault in _SPOILT:
        return _spoil(world, step)
    return _ACTIONS[step.fault](world, step)


# Workers


def _pick_seat(world: World, step: Step, *, all_seats: bool = False) -> Seat:
    """Return a seat with a steady worker; the first seat's worker is never ended, so that its growth can be seen."""
    seats = [seat for seat in world.seats[0 if all_seats else 1 :] if seat.steady]
    if not seats:
        raise Skipped("no worker is there for it")
    return seats[step.choose(len(seats))]


def _kill_worker(world: World, step: Step) -> Begun:
    seat = _pick_seat(world, step)
    seat.pause()  # so that what it has in flight stands still while it is counted
    flights = world.in_flight(seat)
    seat.kill()
    world.may_repeat("kill", flights)
    return Begun(f"{seat.node} with {len(flights)} in flight", seat.refill)


def _stop_worker(world: World, step: Step) -> Begun:
    seat = _pick_seat(world, step)
    if not seat.ready:
        raise Skipped("the worker is still starting")
    seat.pause()  # as for a kill
    flights = world.in_flight(seat)
    # Before the signal reaches it, it may ask what it has just popped.
    flights = dataclasses.replace(flights, unknown=max(0, world.options.slots - len(flights.prompts)))
    seat.dismiss(*[signal.SIGTERM] * (2 if step.fault is Fault.STOP_WORKER_TWICE else 1))
    world.may_repeat("hand-back", flights)
    return Begun(f"{seat.node} with {len(flights)} in flight", seat.refill)


def _pause_worker(world: World, step: Step) -> Begun:
    seat = _pick_seat(world, step, all_seats=True)
    seat.pause()
    # A delivery is taken back after 3/4 of a lease in which nobody refreshed it; a refresh may be a while ago.
    flights = world.in_flight(seat) if step.lasts_s > LEASE_S / 2 else Flights()
    world.may_repeat("pause", flights)
    return Begun(f"{seat.node}, of whose samples {len(flights)} may be given to others", seat.resume)


# Producers


def _pick_input(world: World, step: Step) -> Input:
    if world.busy:
        raise Skipped("enough enqueues are running")
    return world.inputs[step.choose(len(world.inputs))]


def _kill_enqueue(world: World, step: Step) -> Begun:
    source = _pick_input(world, step)
    process = world.enqueue(source)

    def end() -> None:
        if process.running:
            process.kill()

    return Begun(f"of {source.dataset}, {step.lasts_s:.1f} s after its start", end)


def _three_enqueues(world: World, step: Step) -> Begun:
    source = _pick_input(world, step)
    for _ in range(3):
        world.enqueue(source)
    return Begun(f"of {source.dataset}")


# Model servers


def _pick_host(world: World, step: Step) -> ModelHost:
    hosts = [host for host in world.hosts if host.running and not host.paused and not host.moody]
    if not hosts:
        raise Skipped("no model server is well")
    return hosts[step.choose(len(hosts))]


def _kill_server(world: World, step: Step) -> Begun:
    host = _pick_host(world, step)
    host.kill()
    return Begun(host.name, host.start)


def _pause_server(world: World, step: Step) -> Begun:
    host = _pick_host(world, step)
    host.process.pause()
    host.paused = True

    def end() -> None:
        host.process.resume()
        host.paused = False

    return Begun(host.name, end)


def _poison(world: World, step: Step) -> Begun:
    """Let a prompt join the inputs that kills each server that is asked it, until it is set aside."""
    source = world.inputs[step.choose(len(world.inputs))]
    if any(one.poisons for one in world.inputs) and world.progress > _LAST_POISON:
        raise Skipped("it is late, and each costs several deaths")
    return Begun(f"{source.poison()!r}")


_SPOILT: Mapping[Fault, dict[str, Any]] = {
    Fault.ANSWER_503: {"status": 503, "message": "The request queue is full.", "delay_s": 0.02},
    Fault.ANSWER_500: {"status": 500, "message": "CUDA error: an illegal memory access", "delay_s": 0.05},
    Fault.ANSWER_429: {"status": 429, "headers": {"retry-after": "1"}, "delay_s": 0.02},
    Fault.ANSWER_DEAD: {"status": 503, "message": "EngineCore encountered an issue.", "delay_s": 0.02},
    Fault.ANSWER_GARBAGE: {"body": "<html><body>Welcome!</body></html>", "content_type": "text/html"},
    Fault.ANSWER_CUT: {"drop": "middle"},
    Fault.ANSWER_RESET: {"drop": "reset"},
    Fault.ANSWER_NEVER: {"hang": True},
}


def _spoil(world: World, step: Step) -> Begun:
    host = _pick_host(world, step)
    share = 0.25 + 0.75 * (10 * step.dice % 1)
    host.mood.write(share, _SPOILT[step.fault])
    host.moody = True

    def end() -> None:
        host.mood.clear()
        host.moody = False

    return Begun(f"by {host.name}, {share:.0%} of all", end)


# Redis


def _need_redis(world: World) -> None:
    if not world.redis.running or world.redis_paused:
        raise Skipped("Redis is away")


def _revive(world: World) -> None:
    if not world.redis.running:
        world.redis.start()


def _kill_redis(world: World, _step: Step) -> Begun:
    _need_redis(world)
    world.redis.kill()
    return Begun("", lambda: _revive(world))


def _empty_redis(world: World, _step: Step) -> Begun:
    _need_redis(world)
    seats = [seat for seat in world.seats if seat.process.running]
    awake = [seat for seat in seats if not seat.paused]
    for seat in awake:
        seat.pause()
    flights = world.in_flight(*seats)
    world.redis.kill()
    shutil.rmtree(world.redis.folder / "appendonlydir", ignore_errors=True)
    for seat in awake:
        seat.resume()
    world.may_repeat("emptied Redis", flights)

    def end() -> None:
        _revive(world)
        for source in world.inputs:
            world.enqueue(source)

    return Begun(f"with {len(flights)} in flight", end)


def _blip_redis(world: World, _step: Step) -> Begun:
    _need_redis(world)
    try:
        with contextlib.closing(world.client()) as client:
            count = client.client_kill_filter(_type="normal")
    except redis.RedisError:
        raise Skipped("Redis does not answer") from None
    return Begun(f"{count} connections")


def _pause_redis(world: World, _step: Step) -> Begun:
    _need_redis(world)
    if world.redis_full:
        raise Skipped("Redis is full, and could not be told that it may grow again")
    world.redis.process.pause()
    world.redis_paused = True

    def end() -> None:
        world.redis.process.resume()
        world.redis_paused = False

    return Begun("", end)


def _fill_redis(world: World, _step: Step) -> Begun:
    _need_redis(world)
    process = world.redis.process

    def bound(size: int) -> None:
        with contextlib.closing(world.client()) as client:
            client.config_set("maxmemory", size)

    def end() -> None:
        world.redis_full = False
        if world.redis.process is process and process.running:
            bound(0)

    bound(2**20)
    world.redis_full = True
    return Begun("", end)


def _readonly_redis(world: World, _step: Step) -> Begun:
    return _while_told(world, ("replicaof", "127.0.0.1", str(free_port())), ("replicaof", "no", "one"))


def _lock_redis(world: World, _step: Step) -> Begun:
    begun = _while_told(world, ("config", "set", "requirepass", _SECRET), ("config", "set", "requirepass", ""))
    with contextlib.suppress(redis.RedisError), contextlib.closing(world.client(_SECRET)) as client:
        client.client_kill_filter(_type="normal")  # who is connected stays so otherwise
    return begun


def _while_told(world: World, begin: Sequence[str], end: Sequence[str]) -> Begun:
    """Give Redis a command now and one at the end, unless it was restarted and has forgotten the first."""
    _need_redis(world)
    if world.redis_full:
        raise Skipped("Redis is full, and could not be told that it may grow again")
    process = world.redis.process

    def take_back() -> None:
        world.redis_full = False
        if world.redis.process is process and process.running:
            with contextlib.closing(world.client(_SECRET if "requirepass" in end else None)) as client:
                client.execute_command(*end)

    with contextlib.closing(world.client()) as client:
        client.execute_command(*begin)
    world.redis_full = True
    return Begun("", take_back)


# Files


def _damage_tail(world: World, step: Step) -> Begun:
    """Kill a worker and leave behind what it may have left in the file of accepted records."""
    dataset = world.inputs[step.choose(len(world.inputs))].dataset
    path = world.mill.out(dataset)
    if not path.exists() or path.stat().st_size < 10_000:
        raise Skipped("there are too few records")
    with _locked(path.parent):
        if not path.read_bytes().endswith(b"\n"):
            raise Skipped("the tail is damaged already")
        killed = _kill_worker(world, step)
        if step.fault is Fault.CUT_TAIL:
            last = json.loads(path.read_bytes().split(b"\n")[-2])
            world.may_repeat("cut record", Flights([last["messages"][-1]["content"]]))
        words = TAILS[step.fault](path, step)
    return Begun(f"{words} of {dataset}; killed {killed.words}", killed.end)


def _delete_index(world: World, step: Step) -> Begun:
    dataset = world.inputs[step.choose(len(world.inputs))].dataset
    index = world.mill.folder(dataset).index
    names = [index] if step.dice * 10 % 1 < 0.5 else sorted(index.parent.glob(f"{index.name}*"))
    for path in names:
        path.unlink(missing_ok=True)
    return Begun(f"of {dataset}: {', '.join(path.name for path in names)}")


def _rewrite_file(world: World, step: Step) -> Begun:
    """Save the accepted records anew, as an editor does: the same lines in another file."""
    path = world.mill.out(_pick_dataset(world, step))
    with _locked(path.parent):
        if not path.exists():
            raise Skipped("there are no records")
        copy = path.with_name("copy-of-records")
        try:
            shutil.copyfile(path, copy)
        except OSError as error:
            copy.unlink(missing_ok=True)
            raise Skipped(f"there is no room for a copy: {error.strerror}") from error
        copy.replace(path)
    return Begun(f"{path.parent.name}/{path.name}")


def _hold_lock(world: World, step: Step) -> Begun:
    folder = world.mill.folder(_pick_dataset(world, step)).path
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(folder))
        held = stack.pop_all()
    return Begun(f"of {folder.name}", held.close)


def _pick_dataset(world: World, step: Step) -> str:
    return world.inputs[step.choose(len(world.inputs))].dataset


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(as_writer(folder))
        except BlockingIOError:
            raise Skipped("somebody holds the folder's lock") from None
        except FileNotFoundError:
            raise Skipped("there is no folder yet") from None
        yield


def _run_command(world: World, step: Step) -> Begun:
    """Start a command on a dataset; some are killed at the end if they still run."""
    dataset = _pick_dataset(world, step)
    if not world.mill.folder(dataset).manifest.exists():
        raise Skipped("there is no dataset yet")
    words = ["verify", "--repair", dataset]
    if step.fault is Fault.KILL_EXPORT:
        words = [
            "export",
            dataset,
            "--format",
            "openai",
            "--overwrite",
            "--output",
            str(world.folder / f"{dataset}.jsonl"),
        ]
    process = world.command(*words)

    def end() -> None:
        if process.running and step.fault is not Fault.REPAIR:
            process.kill()

    return Begun(f"of {dataset}", end)


def _fill_disk(world: World, _step: Step) -> Begun:
    if not world.disk:
        raise Skipped("a small disk can only be mounted as root, where mounts are allowed")
    ballast = world.prepared / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return Begun(f"with {ballast.stat().st_size / 2**20:.0f} MiB", lambda: ballast.unlink(missing_ok=True))


_ACTIONS: Mapping[Fault, Callable[[World, Step], Begun]] = {
    Fault.KILL_WORKER: _kill_worker,
    Fault.STOP_WORKER: _stop_worker,
    Fault.STOP_WORKER_TWICE: _stop_worker,
    Fault.PAUSE_WORKER: _pause_worker,
    Fault.FREEZE_WORKER: _pause_worker,
    Fault.KILL_ENQUEUE: _kill_enqueue,
    Fault.THREE_ENQUEUES: _three_enqueues,
    Fault.KILL_SERVER: _kill_server,
    Fault.PAUSE_SERVER: _pause_server,
    Fault.POISON: _poison,
    Fault.KILL_REDIS: _kill_redis,
    Fault.EMPTY_REDIS: _empty_redis,
    Fault.BLIP_REDIS: _blip_redis,
    Fault.PAUSE_REDIS: _pause_redis,
    Fault.FILL_REDIS: _fill_redis,
    Fault.READONLY_REDIS: _readonly_redis,
    Fault.LOCK_REDIS: _lock_redis,
    Fault.DELETE_INDEX: _delete_index,
    Fault.REWRITE_FILE: _rewrite_file,
    Fault.HOLD_LOCK: _hold_lock,
    Fault.REPAIR: _run_command,
    Fault.KILL_REPAIR: _run_command,
    Fault.KILL_EXPORT: _run_command,
    Fault.FILL_DISK: _fill_disk,
    **dict.fromkeys(TAILS, _damage_tail),
}
