"""`producer reclassify`: other rules for the answers that are on disk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import redis.exceptions
import typer

from app.errors import BrokerError, UsageError
from producer.commands.common import Bench, ProgressLine, note, open_bench, say
from producer.texts import table

if TYPE_CHECKING:
    from app.ledger import Ledger
    from producer.reclassify import Reclassified

HELP = """Judge every recorded answer of DATASET anew, by other rules, without asking a model server.

Rules that are not given stay as they are. Records move between raw_responses.jsonl and rejected.jsonl all at once:
killed at any moment, all of it is done or nothing. Workers may go on; what waits is judged by the new rules too.
A later enqueue has to give the new rules as well, for they belong to the dataset's settings.
"""
EXAMPLES = """\b
Examples:
  producer reclassify chat --min-completion-tokens 50 --dry-run    only say what would become of the records
  producer reclassify chat --min-completion-tokens 50
  producer reclassify chat --keep-truncated --max-repetition 0.5
  producer reclassify chat --no-max-repetition
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("reclassify", help=HELP, epilog=EXAMPLES)(reclassify)


def reclassify(
    dataset: str = typer.Argument(..., help="The dataset."),
    min_completion_tokens: int | None = typer.Option(None, min=0, help="Reject answers with fewer tokens."),
    keep_truncated: bool | None = typer.Option(
        None, "--keep-truncated/--no-keep-truncated", help="Accept answers cut at the token limit."
    ),
    allow_think_leak: bool | None = typer.Option(
        None, "--allow-think-leak/--no-allow-think-leak", help="Accept answers with a think tag in their content."
    ),
    max_repetition: float | None = typer.Option(
        None, min=0, max=1, metavar="SHARE", help="Reject answers of which more repeats itself; 0.5 finds loops."
    ),
    no_max_repetition: bool = typer.Option(False, "--no-max-repetition", help="Accept any repetition."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would be done."),
) -> None:
    """Judge every recorded answer of DATASET anew."""
    from producer.reclassify import reclassify as judge_anew

    if no_max_repetition and max_repetition is not None:
        raise UsageError("--max-repetition and --no-max-repetition contradict each other; give one of them.")
    rules: dict[str, Any] = {
        "min_completion_tokens": min_completion_tokens,
        "keep_truncated": keep_truncated,
        "allow_think_leak": allow_think_leak,
        "max_repetition": max_repetition,
    }
    given = {name: value for name, value in rules.items() if value is not None}
    if no_max_repetition:
        given["max_repetition"] = None
    with open_bench(check=False) as bench, bench.ledger(dataset) as ledger:
        with contextlib.closing(ProgressLine()) as progress:
            found = judge_anew(ledger, dataset, given, dry_run=dry_run, on_progress=progress.show)
        _show(found, dataset, dry_run=dry_run)
        if not dry_run:
            _tell_redis(bench, ledger, dataset, found)


def _show(found: Reclassified, dataset: str, *, dry_run: bool) -> None:
    changes = sorted(found.changes.items(), key=lambda item: (item[0][0] == item[0][1], item[0]))
    rows = [(before, now, f"{n:,}", "" if before == now else "*") for (before, now), n in changes]
    for line in table([("before", "now", "samples", ""), *rows], left=(0, 1)) if rows else ():
        say(line)
    total = sum(found.changes.values())
    would = "would have" if dry_run else "have"
    say(f"{dataset}: {found.changed:,} of {total:,} answered samples {would} another verdict or reason.")
    if found.unsound:
        note(
            f"{found.unsound:,} lines are no sound records and stay where they are; producer verify {dataset} says why."
        )
    if not found.same_settings:
        rules = ", ".join(f"{name} {_words(value)}" for name, value in _rules(found).items())
        note(f"the rules of {dataset!r} {'would be' if dry_run else 'are'} now: {rules}; enqueue has to give the same.")


def _rules(found: Reclassified) -> dict[str, Any]:
    from app.rejudge import rules_of
    from app.verdict import Rules

    rules = rules_of(found.settings)
    return {name: getattr(rules, name) for name in Rules.__struct_fields__}


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unset" if value is None else str(value)


def _tell_redis(bench: Bench, ledger: Ledger, dataset: str, found: Reclassified) -> None:
    from producer.reclassify import tell_redis

    try:
        dropped = tell_redis(bench.books, ledger, dataset, found.settings)
    except (redis.exceptions.RedisError, BrokerError) as error:
        note(f"Redis could not be told ({type(error).__name__}); tickets of what is accepted now drop themselves.")
        return
    if dropped:
        note(f"{dropped:,} samples that were to be asked again are accepted now, and were taken off the queue.")
