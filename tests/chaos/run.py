"""Drives a chaos run: injects the plan, heals everything, lets the work come to its end, and checks."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.checks import final_problems, rest_problems
from tests.chaos.crew import Figures, dismiss_all
from tests.chaos.faults import End, Skipped, inject
from tests.chaos.journal import Fate, Tally, read_journals
from tests.chaos.plan import LASTS_S, Fault, Step, make_plan
from tests.chaos.watch import Watch
from tests.chaos.world import Options, World
from tests.support.processes import ManagedProcess

_FEED_EVERY_S = 6.0
_FEEDS = 120
"""Enqueues of a long run at most, for each reads all that there is by then."""
_WARM_S = 60.0
"""Seconds, or a quarter of the run, after which a worker's memory and files should grow no more."""
_GROWS_AT_MOST = 1.2
_SPARE_FILES = 20
"""A connection to Redis for each ack that ends beside others, made when that happens first."""
_STUCK_AFTER_S = 75.0
"""Seconds without a new record after which the resumed work counts as stuck; an answer may hang for 30."""
_ENQUEUE_WITHIN_S = 180.0


@dataclasses.dataclass
class Result:
    """What a run came to."""

    problems: list[str]
    """One sentence for each broken promise."""
    summary: list[str] = dataclasses.field(default_factory=list)
    """Figures, a line each."""


class Run:
    """One chaos run from start to end."""

    def __init__(self, world: World, steps: Sequence[Step]) -> None:
        self._world = world
        self._steps = list(steps)
        self._started = time.monotonic()
        self._ends: list[tuple[float, int, Fault, End]] = []
        self._numbers = itertools.count()
        self._injected = Counter[Fault]()
        self._skipped = Counter[Fault]()
        self._feeds = 0
        self._feed_every_s = max(_FEED_EVERY_S, world.options.seconds / _FEEDS)
        self._figures: list[Figures] = []
        """Of the worker that is never ended."""
        self._tally: Tally | None = None

    def go(self) -> Result:
        """Run it."""
        world = self._world
        world.start()
        self._started, world.started_at = time.monotonic(), time.time()
        watch = Watch(world.mill, self._on_problem)
        watch.start()
        try:
            self._drive()
            self._heal()
            self._resume()
        finally:
            watch.stop()
        problems = world.problems
        problems += rest_problems(world)
        problems += dismiss_all(world.seats)
        for host in world.hosts:
            host.process.close()
        self._tally = read_journals(sorted(world.folder.glob("*.journal")))
        problems += final_problems(world, self._tally)
        problems += self._growth()
        return Result(problems, self._summary(watch, self._tally))

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, words: str) -> None:
        self._world.say(f"{self._elapsed:7.1f} s  {words}")

    def _on_problem(self, sentence: str) -> None:
        self._world.problems.append(f"after {self._elapsed:.0f} s: {sentence}")
        self._say(f"PROBLEM {sentence}")

    # Injecting

    def _drive(self) -> None:
        world = self._world
        while (now := self._elapsed) < world.options.seconds:
            world.progress = min(1.0, (now + self._feed_every_s) / world.options.seconds)
            while self._ends and self._ends[0][0] <= now:
                self._end_next()
            while self._steps and self._steps[0].at_s <= now:
                self._begin(self._steps.pop(0))
            if now >= self._feeds * self._feed_every_s:
                self._feed()
            self._tend()
            time.sleep(0.05)

    def _tend(self) -> None:
        known = len(self._world.problems)
        self._world.tend()
        for problem in self._world.problems[known:]:
            self._say(f"PROBLEM {problem}")

    def _begin(self, step: Step) -> None:
        try:
            begun = inject(self._world, step)
        except Skipped as why:
            self._skipped[step.fault] += 1
            self._say(f"({step.fault} left out: {why})")
            return
        self._injected[step.fault] += 1
        self._say(f"{step.fault}, {step.lasts_s:.1f} s {begun.words}".rstrip())
        heapq.heappush(self._ends, (self._elapsed + step.lasts_s, next(self._numbers), step.fault, begun.end))

    def _end_next(self) -> None:
        _at, _number, fault, end = heapq.heappop(self._ends)
        end()
        if LASTS_S[fault][1]:
            self._say(f"  {fault} is over")

    def _feed(self) -> None:
        world = self._world
        if not world.busy:
            source = world.inputs[self._feeds % len(world.inputs)]
            world.enqueue(source, part=self._feeds % 3 == 2)
        self._feeds += 1
        figures = world.seats[0].figures()
        if figures is not None:
            self._figures.append(figures)

    # Coming to the end

    def _heal(self) -> None:
        world = self._world
        while self._ends:
            self._end_next()
        world.progress = 1.0
        for seat in world.seats:
            seat.refill()
        self._say("no more faults; everything is healed, and the work goes on to its end")

    def _resume(self) -> None:
        world = self._world
        for source, part in itertools.product(world.inputs, (True, False)):
            for _try in range(5):
                process = world.enqueue(source, part=part)
                if self._wait_for(process) == 0:
                    break
            else:
                self._on_problem(f"enqueue of {source.dataset} did not succeed: {process.tail()}")
        before, since = -1, time.monotonic()
        wanted = sum(len(source.prompts) + len(source.poisons) for source in world.inputs)
        while (done := self._recorded()) < wanted:
            if done != before:
                before, since = done, time.monotonic()
            if time.monotonic() - since > _STUCK_AFTER_S:
                said = world.mill.run("status", expect=None).stdout
                self._on_problem(f"the work is stuck: {done} of {wanted} samples are recorded. {said}")
                return
            self._tend()
            time.sleep(0.2)
        self._say(f"all {wanted} samples are recorded")

    def _wait_for(self, process: ManagedProcess) -> int | None:
        until = time.monotonic() + _ENQUEUE_WITHIN_S
        while process.running and time.monotonic() < until:
            self._tend()
            time.sleep(0.1)
        return process.returncode

    def _recorded(self) -> int:
        return sum(self._world.mill.recorded(source.dataset) for source in self._world.inputs)

    # Telling

    def _growth(self) -> list[str]:
        warm_s = max(_WARM_S, self._world.options.seconds / 4)
        warm = [one for one in self._figures if one.uptime_s >= warm_s]
        if len(warm) < 2:
            return []
        first, last = warm[0], warm[-1]
        return [
            f"{what} of the first worker grew from {before:.0f} to {after:.0f}"
            for what, before, after in (
                ("memory in MiB", first.rss_mib, last.rss_mib),
                ("open files", first.files + _SPARE_FILES, last.files),
            )
            if after > _GROWS_AT_MOST * before
        ]

    def _summary(self, watch: Watch, tally: Tally) -> list[str]:
        world = self._world
        samples = sum(len(source.prompts) + len(source.poisons) for source in world.inputs)
        repeats = Counter[str]()
        for why, flights in world.repeats:
            repeats[why] += len(flights)
        shares = ", ".join(f"{why} {count}" for why, count in repeats.items())
        fates = ", ".join(f"{fate} {tally.fates[fate]:,}" for fate in Fate)
        lines = [
            f"faults: {self._injected.total()} of {len(self._injected)} kinds, {self._skipped.total()} left out",
            f"samples: {samples:,}; requests: {tally.requests:,} ({fates})",
            f"asked again without a spoilt answer: {tally.repeats().total():,}",
            f"in flight at kills and pauses: {repeats.total():,} ({shares})",
            f"enqueues: {world.enqueued}; readings of status and verify: {watch.readings}",
            (
                f"workers: {sum(seat.starts for seat in world.seats)} started, "
                f"{sum(seat.refusals for seat in world.seats)} of them refused to start"
            ),
            f"time: {self._elapsed:.0f} s, of them {self._elapsed - world.options.seconds:.0f} s after the last fault",
        ]
        return lines + self._first_worker()

    def _first_worker(self) -> list[str]:
        warm = [one for one in self._figures if one.uptime_s >= _WARM_S] or self._figures
        if not warm:
            return []
        stages = [warm[round(share * (len(warm) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
        words = [f"{one.uptime_s:.0f} s {one.rss_mib:.0f} MiB {one.files} files" for one in stages]
        memory, files = max(one.rss_mib for one in warm), max(one.files for one in warm)
        return [f"the first worker after {'; '.join(words)} (most {memory:.0f} MiB, {files} files)"]


def run(options: Options, folder: Path, say: Callable[[str], None]) -> Result:
    """Do a whole run in an empty folder and print it line by line; nothing that it started is left afterwards."""
    say(f"seed {options.seed}")
    say(
        f"{options.seconds:.0f} s, {options.samples:,} samples, {options.workers} workers of {options.slots} slots, "
        f"answers after {options.latency_s:g} s on average; folder {folder}"
    )
    world = World(options, folder, say)
    result = Result(["the run did not come to its end"])
    try:
        result = Run(world, make_plan(options.seed, options.seconds)).go()
    finally:
        world.close(keep=bool(result.problems))
    for line in result.summary:
        say(f"  {line}")
    for problem in result.problems:
        first, *more = problem.strip().splitlines()
        told = [line for line in more if line.startswith("! ")] or more[-1:]
        say(f"BROKEN: {first}" + "".join(f" ... {line}" for line in told[:3]))
    say(f"seed {options.seed}: {'FAILED, see ' + str(folder) if result.problems else 'everything held'}")
    return result
