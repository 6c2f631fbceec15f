"""Shows views as they come: live in a terminal, one plain line per dataset and interval anywhere else."""

from __future__ import annotations

import sys
from typing import TextIO

from app.errors import EXIT_INTERRUPTED, EXIT_OK
from producer.monitor import live, plain
from producer.monitor.over import Over
from producer.monitor.view import Feed
from producer.pipes import silence

LIVE_INTERVAL_S = 3.0
PLAIN_INTERVAL_S = 10.0


def usual_interval_s() -> float:
    """Return the seconds between two looks unless somebody says others."""
    return LIVE_INTERVAL_S if sys.stdout.isatty() else PLAIN_INTERVAL_S


def monitor(
    feed: Feed,
    *,
    interval_s: float,
    pause_s: float | None = None,
    until_done: bool = False,
    stream: TextIO | None = None,
    keys: TextIO | None = None,
) -> int:
    """Show views until `q`, Ctrl-C, a closed pipe or, with `until_done`, until nothing is left to wait for.

    A feed may be slow: a terminal stays alive meanwhile and shows how old its numbers are. One that waits by itself has
    no `pause_s` between two looks, any other has the interval. `keys` is where `q` is read (standard input in a
    terminal). Returns the exit code: 130 after Ctrl-C, with `until_done` that of `status`, else 0. Raises what the feed
    raises.
    """
    over = Over(until_done=until_done)
    stream = stream or sys.stdout
    pause_s = interval_s if pause_s is None else pause_s
    try:
        if stream.isatty() and (console := live.open_console(stream)) is not None:
            return live.show(feed, over, console, keys or sys.stdin, interval_s=interval_s, pause_s=pause_s)
        return plain.show(feed, interval_s, over, stream)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence(stream)
        return EXIT_OK
    finally:
        feed.close()
