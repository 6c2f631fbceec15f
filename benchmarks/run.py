"""Runs benchmarks by name and prints their figures beside the targets."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.figures import Options, print_figure, print_heading, print_load

NAMES = (
    "startup",
    "reading",
    "durability",
    "resume",
    "enqueue",
    "export",
    "client_cost",
    "connections",
    "worker_cpu",
    "memory",
    "occupancy",
    "snapshot",
    "watched",
)
"""Every benchmark: the module of that name holds `measure(options)`, which yields figures as it finds them."""


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="How to read it: benchmarks/README.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--repeat", type=int, default=Options.repeat, help="repetitions (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="a million rows and ids instead of 200,000")
    words = parser.parse_args()
    unknown = sorted(set(words.names) - set(NAMES))
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    options = Options(repeat=max(1, words.repeat), full=words.full)
    print_heading()
    for name in words.names or NAMES:
        _run(name, options)


def _run(name: str, options: Options) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    print_load(f"before {name}")
    for figure in module.measure(options):
        print_figure(figure)
    print_load(f"after {name}")
