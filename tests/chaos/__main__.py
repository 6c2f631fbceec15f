"""Run the whole product under random faults and check that nothing was lost, doubled or burned.

python -m tests.chaos --seconds 600 --seed 7
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.run import run
from tests.chaos.world import Options


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, help="of the plan of faults; a random one if it is left out")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--slots", type=int, default=6, help="requests that a worker makes at once")
    parser.add_argument("--samples-per-second", type=float, default=20.0, help="how fast the inputs grow")
    parser.add_argument("--latency", type=float, default=0.3, help="mean seconds of an answer")
    parser.add_argument("--keep", action="store_true", help="leave the folder also when everything held")
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Do a run; return 0 when everything held, else 1."""
    given = _parse(arguments)
    options = Options(
        seed=random.randrange(2**31) if given.seed is None else given.seed,
        seconds=given.seconds,
        workers=given.workers,
        slots=given.slots,
        samples_per_second=given.samples_per_second,
        latency_s=given.latency,
    )
    folder = Path(tempfile.mkdtemp(prefix="promptmill-chaos-"))
    result = run(options, folder, _say)
    if not result.problems and not given.keep:
        shutil.rmtree(folder)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
