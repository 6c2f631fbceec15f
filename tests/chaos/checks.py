"""What must hold when a chaos run is over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import msgspec

from app.ledger import Ledger
from app.places import DatasetFolder, Keys
from app.records import POISON, Kind
from tests.chaos.inputs import Input
from tests.chaos.journal import Tally
from tests.chaos.watch import status_problems
from tests.chaos.world import World
from tests.support.folders import fresh_picture, picture
from tests.support.jsonl_check import check_jsonl
from tests.support.processes import wait_until

_SHOWN = 5


def final_problems(world: World, tally: Tally) -> list[str]:
    """Return one sentence for each promise that is broken."""
    found = [problem for source in world.inputs for problem in _dataset_problems(world, source)]
    status = world.mill.status()
    found += status_problems(status)
    for source in world.inputs:
        counts = status["datasets"][source.dataset]["counts"]
        wanted = dict.fromkeys(("rejected", "queued", "in_flight", "missing"), 0)
        wanted |= {"accepted": len(source.prompts), "failed": len(source.poisons), "refused": source.blanks}
        if any(counts[name] != n for name, n in wanted.items()):
            found.append(f"status of {source.dataset} says {counts}, not {wanted}")
    return [*found, *_request_problems(world, tally), *_log_problems(world)]


def _dataset_problems(world: World, source: Input) -> Iterator[str]:
    name, folder = source.dataset, world.mill.folder(source.dataset)
    lines = check_jsonl(world.mill.out(name))
    yield from (f"raw_responses.jsonl of {name}: {problem}" for problem in lines.problems[:_SHOWN])
    if lines.duplicates:
        yield f"{len(lines.duplicates)} ids of {name} stand on two lines: {lines.duplicates[:_SHOWN]}"
    answers = Counter(str(record["messages"][-1]["content"]) for record in lines.records)
    if missing := [prompt for prompt in source.prompts if prompt not in answers]:
        yield f"{len(missing)} prompts of {name} have no record: {missing[:_SHOWN]}"
    if extra := [prompt for prompt, n in answers.items() if n > 1] + sorted(set(answers) - set(source.prompts)):
        yield f"{len(extra)} prompts of {name} have two records, or were never asked for: {extra[:_SHOWN]}"
    wrong = [
        record["id"] for record in lines.records if record["content"] != f"echo: {record['messages'][-1]['content']}"
    ]
    if wrong:
        yield f"{len(wrong)} records of {name} hold the answer to another prompt: {wrong[:_SHOWN]}"
    yield from _failed_problems(source, folder)
    if folder.lines(Kind.REJECTED).exists():
        yield f"samples of {name} were rejected: see {folder.lines(Kind.REJECTED)}"
    verified = world.mill.run("verify", name, expect=None)
    problems = [line for line in verified.stdout.splitlines() if line.startswith("! ")]
    if (verified.code, len(problems)) != ((1, 1) if source.poisons else (0, 0)):
        yield f"verify of {name} ended with {verified.code}: {verified.stdout} {verified.stderr}"
    with Ledger.open(folder) as ledger:
        if picture(ledger) != fresh_picture(folder):
            yield f"the index of {name} differs from one that is made anew"


def _failed_problems(source: Input, folder: DatasetFolder) -> Iterator[str]:
    """Tell of samples that failed, other than those that kill servers, which must."""
    path = folder.lines(Kind.FAILED)
    failed = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    poisons = [str(record["messages"][-1]["content"]) for record in failed if record["reason"] == POISON]
    if sorted(poisons) != sorted(source.poisons):
        yield f"set aside as {POISON} of {source.dataset} are {sorted(poisons)}, not {sorted(source.poisons)}"
    others = [f"{record['id']}: {record['error']}" for record in failed if record["reason"] != POISON]
    if others:
        yield f"{len(others)} samples of {source.dataset} were given up on the way: {others[:_SHOWN]}"


def unexplained(world: World, tally: Tally) -> Counter[str]:
    """Return the prompts that were asked again though no server was at fault and nothing happened to their worker."""
    explained = Counter(prompt for _why, flights in world.repeats for prompt in flights.prompts)
    return tally.repeats() - explained


def _request_problems(world: World, tally: Tally) -> list[str]:
    again = unexplained(world, tally)
    unknown = sum(flights.unknown for _why, flights in world.repeats)
    if again.total() <= unknown:
        return []
    return [
        (
            f"{again.total() - unknown} requests were repeated without a spoilt answer, and nothing happened to their "
            f"workers: {[_story(prompt, world, tally) for prompt in sorted(again)[: 2 * _SHOWN]]}"
        )
    ]


def _story(prompt: str, world: World, tally: Tally) -> str:
    """Tell when and whom a prompt was asked, in seconds of the run."""
    words = [
        f"{one.server} at {one.at - world.started_at:.2f} s: {one.fate}"
        + (f" at {one.ended_at - world.started_at:.2f} s" if one.ended_at else "")
        for one in sorted(tally.stories[prompt], key=lambda one: one.at)
    ]
    return f"{prompt} ({'; '.join(words)})"


def _log_problems(world: World) -> list[str]:
    """Return each kind of traceback in the logs once, by its last line."""
    ends = Counter[str]()
    for path in world.mill.logs.glob("w*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for block in re.split(r"(?=^Traceback)", text, flags=re.MULTILINE)[1:]:
            end = next((line for line in block.splitlines()[1:] if line and not line.startswith(" ")), "?")
            ends[f"{end[:200]} (such as in {path.name})"] += 1
    return [f"{n} tracebacks in the workers' logs: {end}" for end, n in ends.items()]


def rest_problems(world: World, timeout_s: float = 20.0) -> list[str]:
    """Return what is left in Redis although everything is recorded; the workers must still run."""
    keys, left = Keys(world.mill.env["MILL_KEY_PREFIX"]), dict[str, int]()
    client = world.redis.client()

    def is_clean() -> bool:
        left.clear()
        for source in world.inputs:
            name = source.dataset
            left[f"prompts of {name}"] = int(client.hlen(keys.prompts(name)))
            left[f"flights of {name}"] = int(client.hlen(keys.flights(name)))
            left[f"tickets of {name}"] = int(client.llen(keys.queue(name)))
        left["unacked deliveries"] = int(client.hlen(keys.unacked))
        return not any(left.values())

    try:
        wait_until(is_clean, timeout_s, "an empty work list", poll_s=0.5)
    except AssertionError:
        return [f"Redis still holds {what}: {n}" for what, n in left.items() if n]
    return []
