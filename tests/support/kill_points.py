"""Run the real worker or `producer` in a process that kills itself with SIGKILL at a named point of its work.

    python -m tests.support.kill_points --point before-write --nth 3 -- worker -c 4
    python -m tests.support.kill_points --point enqueue-mid-publish -- producer enqueue rows.jsonl --dataset d

The process that dies is the product itself: only the one function at the point is wrapped, before anything starts.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.mill import Mill
from tests.support.processes import ManagedProcess


class Point(enum.StrEnum):
    """Where the process dies."""

    AFTER_POP = "after-pop"
    """A message has left its queue, and kombu has not noted it as delivered yet."""
    BEFORE_WRITE = "before-write"
    """The model has answered; nothing is written yet."""
    INSIDE_WRITE = "inside-write"
    """Half of the bytes are in the file."""
    AFTER_FSYNC = "after-fsync"
    """The lines are durable; the index does not know them."""
    BEFORE_BOOKS = "before-books"
    """The index knows the lines; Redis has not heard of them."""
    BEFORE_ACK = "before-ack"
    """The payload is gone from Redis; the delivery is not acked."""
    ENQUEUE_BEFORE_PUT = "enqueue-before-put"
    """The samples are on disk; Redis knows nothing of them."""
    ENQUEUE_BEFORE_PUBLISH = "enqueue-before-publish"
    """Redis has the payloads and no ticket."""
    ENQUEUE_MID_PUBLISH = "enqueue-mid-publish"
    """Half of the tickets are on the queue."""
    ENQUEUE_AFTER_PUBLISH = "enqueue-after-publish"
    """A batch is queued; the next one is not begun."""
    IN_REBUILD = "in-rebuild"
    """The index takes in lines; its transaction is open."""
    IN_EXPORT = "in-export"
    """Rows are written; the file has not taken its name yet."""
    BEFORE_RENAME = "before-rename"
    """A new file is whole and durable; the old one still has its name."""
    AFTER_RENAME = "after-rename"
    """The new file has the old one's name; the index does not know it."""
    REPAIR_BEGINS_COPY = "repair-begins-copy"
    """The copy of a file is made and empty."""
    REPAIR_IN_COPY = "repair-in-copy"
    """Some lines are copied."""
    REPAIR_BEFORE_QUARANTINE = "repair-before-quarantine"
    """The copy is written; what it lacks is nowhere else yet."""
    REPAIR_BEFORE_FORGET = "repair-before-forget"
    """The files are mended; Redis' stale books are not."""
    RECLASSIFY_IN_COPY = "reclassify-in-copy"
    """Some records are written with their new verdicts, into the prepared files."""
    RECLASSIFY_BEFORE_JOURNAL = "reclassify-before-journal"
    """The prepared files are whole and durable; nothing says that they count."""
    RECLASSIFY_BEFORE_BOOKS = "reclassify-before-books"
    """The files are the new ones; Redis has not heard of it."""


WRITE_POINTS = (Point.BEFORE_WRITE, Point.INSIDE_WRITE, Point.AFTER_FSYNC, Point.BEFORE_BOOKS, Point.BEFORE_ACK)
"""The points of a sample's way from the answer to the ack, in order."""
REPAIR_POINTS = (
    (Point.REPAIR_BEGINS_COPY, 1),
    (Point.REPAIR_IN_COPY, 3),
    (Point.REPAIR_BEFORE_QUARANTINE, 1),
    (Point.INSIDE_WRITE, 1),
    (Point.AFTER_FSYNC, 1),
    (Point.BEFORE_RENAME, 1),
    (Point.AFTER_RENAME, 1),
    (Point.IN_REBUILD, 3),
    (Point.BEFORE_WRITE, 1),
    (Point.INSIDE_WRITE, 2),
    (Point.AFTER_FSYNC, 2),
    (Point.REPAIR_BEFORE_FORGET, 1),
    (Point.ENQUEUE_MID_PUBLISH, 1),
)
"""The points of a repair in order, each with how often it is come to: first the quarantine file is written, then a lost
line of samples.jsonl."""

RECLASSIFY_POINTS = (
    (Point.RECLASSIFY_IN_COPY, 2),
    (Point.RECLASSIFY_BEFORE_JOURNAL, 1),
    (Point.BEFORE_RENAME, 1),
    (Point.AFTER_RENAME, 1),
    (Point.AFTER_RENAME, 2),
    (Point.AFTER_RENAME, 3),
    (Point.AFTER_RENAME, 4),
    (Point.IN_REBUILD, 1),
    (Point.RECLASSIFY_BEFORE_BOOKS, 1),
)
"""The points of a reclassify in order; its journal is renamed first, then the accepted, the rejected, the manifest."""


def worker_that_dies(mill: Mill, point: Point, *, nth: int = 1, concurrency: int = 4) -> ManagedProcess:
    """Start a worker that kills itself when it comes to the point for the n-th time."""
    return _start(mill, point, nth, ["worker", "-c", str(concurrency), "-n", f"dies-{point}@%h"])


def producer_that_dies(mill: Mill, point: Point, *arguments: str, nth: int = 1) -> ManagedProcess:
    """Start `producer ARGUMENTS` so that it kills itself when it comes to the point for the n-th time."""
    return _start(mill, point, nth, ["producer", *arguments])


def assert_killed(process: ManagedProcess, timeout_s: float = 60.0) -> None:
    """Wait until the process is gone and assert that SIGKILL ended it."""
    code = process.wait(timeout_s)
    assert code == -signal.SIGKILL, f"{process.name} ended with {code}, not at its kill point\n{process.tail()}"


def _start(mill: Mill, point: Point, nth: int, command: Sequence[str]) -> ManagedProcess:
    words = [sys.executable, "-m", "tests.support.kill_points", "--point", point.value, "--nth", str(nth), "--"]
    return mill._keep(ManagedProcess([*words, *command], log_dir=mill.logs, name=f"dies-{point}", env=mill.env))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit("SIGKILL did not end the process")


def _kill_before(nth: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its n-th call is never made."""
    calls = itertools.count(1)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            _die()
        return original(*args, **kwargs)

    return wrapped


def _kill_after(nth: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that nothing happens after its n-th call."""
    calls = itertools.count(1)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        number, value = next(calls), original(*args, **kwargs)
        if number == nth:
            _die()
        return value

    return wrapped


def _kill_inside_write(nth: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_write_all` so that its n-th call writes half of the bytes, and no whole line as its last one."""
    calls = itertools.count(1)

    def wrapped(descriptor: int, data: bytes) -> None:
        if next(calls) == nth:
            end = len(data) // 2
            while b"\n" in data[max(0, end - 1) : end + 1]:
                end -= 1
            original(descriptor, data[:end])
            _die()
        original(descriptor, data)

    return wrapped


def _kill_inside_publish(nth: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `publish` so that its n-th call publishes half of the ids."""
    calls = itertools.count(1)

    def wrapped(app: Any, dataset: str, ids: Sequence[str]) -> None:
        if next(calls) == nth:
            original(app, dataset, ids[: len(ids) // 2])
            _die()
        original(app, dataset, ids)

    return wrapped


def _patch(point: Point, nth: int) -> None:
    """Put the death into the product's one function at the point."""
    owner, name, wrap = _place(point)
    setattr(owner, name, wrap(nth, getattr(owner, name)))


def _place(point: Point) -> tuple[Any, str, Callable[[int, Callable[..., Any]], Callable[..., Any]]]:
    """Return the function to wrap (its owner and name) and how."""
    import kombu.transport.redis  # noqa: PLC0415  heavy, and the parent needs none of these

    import app.celery  # noqa: PLC0415
    import app.exchange  # noqa: PLC0415
    import producer.export.run  # noqa: PLC0415
    import producer.judgements  # noqa: PLC0415
    import producer.rewrite  # noqa: PLC0415
    from app import jsonl  # noqa: PLC0415
    from app.index import IndexTransaction  # noqa: PLC0415
    from app.ledger import Ledger  # noqa: PLC0415
    from app.queue import Queue  # noqa: PLC0415

    qos = kombu.transport.redis.QoS
    places: dict[Point, tuple[Any, str, Callable[[int, Callable[..., Any]], Callable[..., Any]]]] = {
        Point.AFTER_POP: (qos, "append", _kill_before),
        Point.BEFORE_WRITE: (Ledger, "commit", _kill_before),
        Point.INSIDE_WRITE: (jsonl, "_write_all", _kill_inside_write),
        Point.AFTER_FSYNC: (jsonl, "append", _kill_after),
        Point.BEFORE_BOOKS: (Queue, "finish", _kill_before),
        Point.BEFORE_ACK: (qos, "ack", _kill_before),
        Point.ENQUEUE_BEFORE_PUT: (Queue, "put", _kill_before),
        Point.ENQUEUE_BEFORE_PUBLISH: (app.celery, "publish", _kill_before),
        Point.ENQUEUE_MID_PUBLISH: (app.celery, "publish", _kill_inside_publish),
        Point.ENQUEUE_AFTER_PUBLISH: (app.celery, "publish", _kill_after),
        Point.BEFORE_RENAME: (Path, "replace", _kill_before),
        Point.AFTER_RENAME: (Path, "replace", _kill_after),
        Point.REPAIR_BEGINS_COPY: (producer.rewrite, "_sort", _kill_before),
        Point.REPAIR_IN_COPY: (producer.rewrite._Scratch, "is_first", _kill_after),
        Point.REPAIR_BEFORE_QUARANTINE: (producer.rewrite, "quarantine", _kill_before),
        Point.REPAIR_BEFORE_FORGET: (Queue, "forget", _kill_before),
        Point.RECLASSIFY_IN_COPY: (producer.judgements, "relabel", _kill_after),
        Point.RECLASSIFY_BEFORE_JOURNAL: (app.exchange, "exchange", _kill_before),
        Point.RECLASSIFY_BEFORE_BOOKS: (Queue, "register", _kill_before),
        Point.IN_REBUILD: (IndexTransaction, "merge", _kill_after),
        Point.IN_EXPORT: (producer.export.run._Tally, "take", _kill_after),
    }
    return places[point]


def _main(arguments: Sequence[str]) -> None:
    cut = arguments.index("--")
    parser = argparse.ArgumentParser(prog="python -m tests.support.kill_points", description=__doc__)
    parser.add_argument("--point", type=Point, required=True, choices=list(Point))
    parser.add_argument("--nth", type=int, default=1)
    options, (program, *words) = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    _patch(options.point, options.nth)
    if program == "producer":
        module, sys.argv = "producer.cli", ["producer", *words]
    else:
        module, sys.argv = "celery.__main__", ["celery", "-A", "app", program, *words]
    importlib.import_module(module).main()


if __name__ == "__main__":
    _main(sys.argv[1:])
