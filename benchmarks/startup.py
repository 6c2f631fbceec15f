"""What it costs to start the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.figures import Figure, Options
from benchmarks.rig import timed

_PRODUCER = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"


def measure(options: Options) -> Iterator[Figure]:
    """Run `producer --help` several times."""
    runs = [timed([sys.executable, "-c", _PRODUCER, "--help"]) for _ in range(2 * options.repeat + 1)]
    yield Figure("producer --help: CPU", [cpu for _wall, cpu in runs], "s", at_most=0.4, digits=3)
