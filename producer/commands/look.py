"""`producer show`, `sample` and `diff`: single samples and whole runs for a person's eye."""

from __future__ import annotations

import contextlib
import enum
import json
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import typer

from app.errors import EXIT_INCOMPLETE, UsageError
from app.ledger import Ledger
from app.places import DatasetFolder, dataset_folder
from app.records import Kind, split_turn, turn_id
from producer.commands.common import Bench, ProgressLine, note, open_bench, open_ledger, say
from producer.texts import cut, harmless, one_line, table

if TYPE_CHECKING:
    from producer.differences import Differences, Example, Side, Spread

_SHOWN_IDS = 5
_PROMPT_CHARS = 200
_ANSWER_CHARS = 400

SHOW_EXAMPLES = """\b
Examples:
  producer show fruits-77f3ee2ffcec
  producer show fruits --dataset chat        the beginning of an id is enough, if only one begins so
  producer show fruits-77f3ee2ffcec --full
  producer show 'fruits-77f3ee2ffcec#turn2'  one turn, where all turns are made anew
  producer show fruits-77f3ee2ffcec --json | jq .state
"""
SAMPLE_EXAMPLES = """\b
Examples:
  producer sample chat
  producer sample chat -n 20 --seed 7
  producer sample chat --kind rejected --reason too_short
  producer sample chat -n 100 --json | jq -r .content
"""
DIFF_EXAMPLES = """\b
Examples:
  producer diff chat-8b chat-70b
  producer diff before after -n 10
  producer diff before after --json | jq .equal
"""


class Choice(enum.StrEnum):
    """The kinds of record that a person may look at."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    FAILED = "failed"


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command(epilog=SHOW_EXAMPLES)(show)
    cli.command(epilog=SAMPLE_EXAMPLES)(sample)
    cli.command(epilog=DIFF_EXAMPLES)(diff)


def show(
    sample_id: str = typer.Argument(..., metavar="ID", help="The sample's id, or its beginning."),
    dataset: str | None = typer.Option(None, "--dataset", "-d", metavar="NAME", help="Look only there. [everywhere]"),
    full: bool = typer.Option(False, "--full", help="Whole texts, reasoning too."),
    as_json: bool = typer.Option(False, "--json", help="Everything as one JSON object."),
) -> None:
    """Tell the whole story of a sample: prompt, every round and failed call, the answer, and where it is now.

    Works without Redis, which then is said where it matters.
    """
    from app import manifest
    from app.find import find_sample
    from producer.show import story
    from producer.verify import enqueue_command

    beginning, turn = split_turn(sample_id)
    with open_bench(check=False) as bench:
        name, id_ = _locate(bench, beginning, dataset)
        folder = dataset_folder(bench.store.prepared_dir, name)
        if turn is not None:
            _show_turn(folder, turn_id(id_, turn), full=full, as_json=as_json)
            return
        found = find_sample(bench.books, folder, id_)
        if as_json:
            say(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
            return
        with Ledger(folder) as ledger:
            entry, known = ledger.look_up([id_]).get(id_), manifest.read(ledger)
        again = enqueue_command(known) if known else f"producer enqueue SOURCE --dataset {shlex.quote(name)}"
        for line in story(found, folder, entry, again=again, full=full):
            say(line)


def _show_turn(folder: DatasetFolder, id_: str, *, full: bool, as_json: bool) -> None:
    from app.find import find_turn
    from producer.show import turn_story

    found = find_turn(folder, id_)
    if as_json:
        say(json.dumps(found.record, ensure_ascii=False, indent=2))
        return
    for line in turn_story(found, id_, full=full):
        say(line)


def _locate(bench: Bench, beginning: str, dataset: str | None) -> tuple[str, str]:
    """Return dataset and id of the one sample that has this id, or whose id begins so.

    Raises UsageError when there is none, or more than one.
    """
    from app.progress import find_datasets

    prepared = bench.store.prepared_dir
    names = [dataset] if dataset is not None else sorted(find_datasets(prepared, [])[0])
    exact, near = list[tuple[str, str]](), list[tuple[str, str]]()
    for name in names:
        with open_ledger(bench.store, name) as ledger:
            ledger.catch_up()
            if ledger.look_up([beginning]):
                exact.append((name, beginning))
            elif not exact:
                near += [(name, id_) for id_ in ledger.starting_with(beginning)[: _SHOWN_IDS + 1]]
    found = exact or near
    if not found:
        where = f"The dataset {dataset!r}" if dataset is not None else f"No dataset in {prepared}"
        raise UsageError(f"{where} knows {'no' if dataset is not None else 'a'} sample {beginning!r}; check the id.")
    if len(found) > 1:
        shown = ", ".join(f"{id_} of {name}" for name, id_ in found[:_SHOWN_IDS])
        more = ", ..." if len(found) > _SHOWN_IDS else ""
        raise UsageError(f"{beginning!r} may be {shown}{more}; give the whole id, and --dataset.")
    return found[0]


def sample(
    dataset: str = typer.Argument(..., help="The dataset."),
    number: int = typer.Option(5, "--number", "-n", min=1, max=100_000, help="So many records."),
    seed: int | None = typer.Option(None, help="The same seed chooses the same records. [another one each time]"),
    kind: Choice = typer.Option(Choice.ACCEPTED, help="Which records."),
    reason: str | None = typer.Option(None, help="Only those rejected or failed for this reason."),
    full: bool = typer.Option(False, "--full", help="Whole texts, reasoning too."),
    as_json: bool = typer.Option(False, "--json", help="The whole records, one JSON object a line."),
) -> None:
    """Show random records of a dataset, with prompt and answer; needs no Redis."""
    from app import settings
    from producer.choosing import choose

    if reason is not None and kind is Choice.ACCEPTED:
        raise UsageError("--reason is for rejected and failed records; give --kind rejected or --kind failed too.")
    drawn = random.SystemRandom().randrange(2**31) if seed is None else seed
    if abs(drawn) >= 2**63:
        raise UsageError(f"--seed {seed} is too large; give one below 2**63.")
    with open_ledger(settings.load(settings.StoreSettings), dataset) as ledger:
        chosen = choose(ledger, number, seed=drawn, kind=Kind(kind), reason=reason)
        for position, (id_, entry) in enumerate(chosen, start=1):
            line = ledger.read(entry, id_)
            if as_json:
                sys.stdout.buffer.write(line + b"\n")
            else:
                _show_record(f"{position} of {len(chosen)}", line, full=full)
        sys.stdout.flush()
    which = f"{kind} as {reason}" if reason else kind
    if not chosen:
        note(f"no sample of {dataset!r} is {which}.")
        raise typer.Exit(EXIT_INCOMPLETE)
    if seed is None:
        words = ["--kind", kind.value, *(["--reason", reason] if reason else []), "--seed", str(drawn)]
        note(f"the same again: {shlex.join(['producer', 'sample', dataset, '-n', str(number), *words])}")


def _show_record(position: str, line: bytes, *, full: bool) -> None:
    from producer.show import answer, prompt

    record = json.loads(line)
    reason = f": {record['reason']}" if record.get("reason") else ""
    say(harmless(f"=== {position}: {record['id']} {record.get('verdict', '')}{reason}"))
    for text in prompt(record.get("messages"), record.get("tools"), full=full):
        say(text)
    for text in answer(record, full=full):
        say(text)
    say("")


def diff(
    a: str = typer.Argument(..., metavar="A", help="A dataset."),
    b: str = typer.Argument(..., metavar="B", help="Another one, of the same prompts."),
    number: int = typer.Option(3, "--number", "-n", min=0, max=1000, help="Show so many of the biggest differences."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Compare two datasets of the same prompts, sample by sample: outcomes, lengths, latencies, answers.

    Needs no Redis. Samples are the same if their ids are.
    """
    from app import settings
    from producer.differences import compare

    store = settings.load(settings.StoreSettings)
    with (
        open_ledger(store, a) as first,
        open_ledger(store, b) as second,
        contextlib.closing(ProgressLine()) as progress,
    ):
        found = compare((a, first), (b, second), examples=number, on_progress=progress.show)
    if as_json:
        say(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    for line in _differences(found):
        say(line)
    if not found.both:
        note("the two have no sample in common; ids are made of prompts, tools and the source's own ids.")


def _differences(found: Differences) -> Iterator[str]:
    sides = (found.a, found.b)
    rows = [
        ("", *(side.dataset for side in sides)),
        *((name, *(f"{getattr(side, name):,}" for side in sides)) for name in ("accepted", "rejected", "failed")),
        ("only here", *(f"{side.only:,}" for side in sides)),
        *_spreads(sides),
    ]
    yield from table(rows)
    share = f" ({100 * found.equal / found.answered:.1f} %)" if found.answered else ""
    answers = f"{found.answered:,} have two answers, {found.equal:,} of them equal{share}"
    yield f"{found.both:,} samples are in both; {answers}."
    if found.outcomes:
        yield "outcomes:"
        yield from table([(f"  {before}", "->", after, f"{n:,}") for before, after, n in found.outcomes], left=range(3))
    for example in found.examples:
        yield from _example(example)


def _spreads(sides: Sequence[Side]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the two distributions."""
    for words, name, digits in (("tokens", "tokens", 0), ("seconds", "latency_s", 1)):
        for field in msgspec.structs.fields(getattr(sides[0], name))[1:]:
            values = [_number(getattr(side, name), field.name, digits) for side in sides]
            yield (f"{words}, {field.name}", *values)


def _number(spread: Spread, field: str, digits: int) -> str:
    value = getattr(spread, field)
    return "-" if value is None else f"{value:,.{digits}f}"


def _example(example: Example) -> Iterator[str]:
    yield f"=== {harmless(example.id)}: {example.tokens[0]:,} and {example.tokens[1]:,} tokens"
    yield f"[user] {one_line(example.prompt, _PROMPT_CHARS)}"
    for name, outcome, text in zip("AB", example.outcomes, example.answers, strict=True):
        yield f"[{name}, {harmless(outcome)}] {cut(text, _ANSWER_CHARS)}"
