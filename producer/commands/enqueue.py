"""`producer enqueue` and `producer retry`: fill the queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import typer

from app import manifest, settings
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED
from app.places import refuse_extraction
from app.records import Kind
from app.settings import QueueSettings
from producer.commands import asking, reading
from producer.commands.common import Bench, ProgressLine, check_settings, interruption, note, open_bench, say
from producer.dedupe import Dedupe
from producer.texts import counted

if TYPE_CHECKING:
    from app.feeder import Feeder
    from app.retry import Again
    from producer.enqueue import Counts, Job, Report
    from producer.reading import Opened

_WAIT_NOTE_EVERY_S = 30.0
RETRY_FAILED = typer.Option(
    None,
    "--retry-failed/--no-retry-failed",
    help="Ask failed samples again, also those that the server refused (context_overflow, bad_request), or none. "
    "[those that were not refused]",
)
PREFLIGHT: bool = typer.Option(
    True, "--preflight/--no-preflight", help="Ask the model servers first whether they take what will be asked."
)

ENQUEUE_HELP = """Queue every sample of SOURCE that is not recorded or queued yet.

SOURCE is a file or folder (.jsonl, .json, .csv, .tsv, .parquet, also .gz or .zst),
hf:org/name[:config][/split][@revision], or the name of a preset (producer presets lists them).

It is safe to run any number of times, also while workers run: what is recorded or waiting is left alone, so it
is also how an interrupted run is resumed. Sampling options are written to the dataset's manifest and travel with
the samples; only those that are given are sent to the server.
"""
ENQUEUE_EXAMPLES = """\b
Examples:
  producer enqueue prompts.jsonl --dataset chat --max-tokens 4096 --temperature 0.7
  producer enqueue data/ --dataset mix --limit 1000
  producer enqueue hf:HuggingFaceH4/ultrachat_200k/train_sft --dataset ultrachat
  producer enqueue glaive-v2 --dataset tools --shuffle 1 --limit 5000
  producer enqueue rows.csv --dataset qa --columns prompt=question,id=uid --filter "lang=en"
"""
RETRY_EXAMPLES = """\b
Examples:
  producer retry chat                     every failed sample
  producer retry chat --fault timeout     those that timed out
  producer retry chat --rejected          what was answered, and rejected
"""


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command("enqueue", help=ENQUEUE_HELP, epilog=ENQUEUE_EXAMPLES)(enqueue)
    cli.command("retry", epilog=RETRY_EXAMPLES)(retry)


def enqueue(
    source: str = reading.SOURCE,
    dataset: str = typer.Option(..., "--dataset", "-d", metavar="NAME", help="The dataset to put the samples into."),
    adapter: str | None = reading.ADAPTER,
    columns: str | None = reading.COLUMNS,
    filters: list[str] | None = reading.FILTER,
    shuffle: int | None = reading.SHUFFLE,
    limit: int | None = reading.LIMIT,
    dedupe: Dedupe = reading.DEDUPE,
    samples_per_prompt: int = reading.SAMPLES_PER_PROMPT,
    retry_failed: bool | None = RETRY_FAILED,
    retry_rejected: bool = typer.Option(False, "--retry-rejected", help="Ask rejected samples again."),
    new_settings: bool = typer.Option(
        False, "--new-settings", help="Go on with other settings than before; waiting samples get them too."
    ),
    model: str | None = asking.MODEL,
    max_tokens: int | None = asking.MAX_TOKENS,
    temperature: str | None = asking.TEMPERATURE,
    top_p: str | None = asking.TOP_P,
    top_k: int | None = asking.TOP_K,
    min_p: float | None = asking.MIN_P,
    repetition_penalty: float | None = asking.REPETITION_PENALTY,
    presence_penalty: float | None = asking.PRESENCE_PENALTY,
    frequency_penalty: float | None = asking.FREQUENCY_PENALTY,
    stop: list[str] | None = asking.STOP,
    seed: int | None = asking.SEED,
    reasoning_effort: str | None = asking.REASONING_EFFORT,
    chat_template_kwargs: str | None = asking.CHAT_TEMPLATE_KWARGS,
    extra_body: str | None = asking.EXTRA_BODY,
    system: str | None = reading.SYSTEM,
    drop_system: bool = reading.DROP_SYSTEM,
    min_completion_tokens: int | None = asking.MIN_COMPLETION_TOKENS,
    keep_truncated: bool | None = asking.KEEP_TRUNCATED,
    allow_think_leak: bool | None = asking.ALLOW_THINK_LEAK,
    max_repetition: float | None = asking.MAX_REPETITION,
    turns: str | None = typer.Option(
        None, metavar="WHICH", help="last, or all: every assistant turn is made anew, in order. [last]"
    ),
    preflight: bool = PREFLIGHT,
) -> None:
    """Queue every sample of SOURCE that is not recorded or queued yet."""
    from producer.doctor import gate
    from producer.enqueue import Job

    refuse_extraction(dataset)
    check_settings()
    generation = asking.generation_of(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        seed=seed,
        reasoning_effort=reasoning_effort,
        chat_template_kwargs=chat_template_kwargs,
        extra_body=extra_body,
        system=system,
        min_completion_tokens=min_completion_tokens,
        keep_truncated=keep_truncated,
        allow_think_leak=allow_think_leak,
        max_repetition=max_repetition,
        turns=turns,
    )
    chosen = reading.reading_of(
        source=source,
        adapter=adapter,
        columns=columns,
        filters=filters,
        shuffle=shuffle,
        limit=limit,
        system=generation.system,
        drop_system=drop_system,
        dedupe=dedupe,
        samples_per_prompt=samples_per_prompt,
    )
    fingerprint = settings.fingerprint({**generation.content(), **chosen.content()})
    with gate.opened({dataset: generation}, wanted=preflight) as look:
        opened = reading.open_rows(chosen, fingerprint=fingerprint)
        look.check(note)
    job = Job(generation, chosen.content(), opened)
    _fill(dataset, job, retry_failed=retry_failed, retry_rejected=retry_rejected, new_settings=new_settings)


def _fill(dataset: str, job: Job, *, retry_failed: bool | None, retry_rejected: bool, new_settings: bool) -> None:
    """Queue what is not recorded or queued yet, and say what became of it."""
    from producer.enqueue import Enqueuer, Retry, begin, source_entry

    opened = job.input
    with open_bench() as bench, bench.ledger(dataset, create=True) as ledger, interruption() as stopping:
        begin(ledger, bench.books, dataset, job, new_settings=new_settings, tell=note)
        with contextlib.closing(Progress(bench)) as view:
            feeder = feeder_for(bench, dataset, view=view, stopping=stopping, replace_waiting=new_settings)
            enqueuer = Enqueuer(feeder, url=bench.url, ledger=ledger, stopping=stopping)
            retry = Retry.told(failed=retry_failed, rejected=retry_rejected, new_settings=new_settings)
            report = enqueuer.run(opened.rows, opened.batches, retry=retry, on_progress=view)
        manifest.note_source(ledger, dataset, source_entry(opened.description, opened.adapter, report))
        if report.trouble is None and (why := bench.books.pause_reason(dataset)):
            note(f"the dataset {dataset!r} is paused ({why}); producer resume {dataset} goes on.")
    if new_settings and report.counts.waiting:
        note(f"{counted(report.counts.waiting, 'sample')} of {dataset!r} that waited got the new settings now.")
    _show(report, dataset, opened, interrupted=stopping.came)


def retry(
    dataset: str = typer.Argument(..., help="The dataset."),
    fault: str | None = typer.Option(None, help="Only samples of this class (such as timeout, or too_short)."),
    rejected: bool = typer.Option(False, "--rejected", help="Rejected samples instead of failed ones."),
) -> None:
    """Ask failed (or rejected) samples again, from their records; the source is not needed."""
    from app.retry import ask_again, carry_settings

    check_settings()
    kind = Kind.REJECTED if rejected else Kind.FAILED
    with open_bench() as bench, bench.ledger(dataset) as ledger, interruption() as stopping:
        ledger.catch_up()
        carry_settings(bench.books, ledger, dataset)
        with contextlib.closing(Progress(bench)) as view:
            feeder = feeder_for(bench, dataset, view=view, stopping=stopping)
            counts = ask_again(ledger, feeder, kind=kind, reason=fault, stopping=stopping, on_progress=view)
    if not counts.samples:
        what, by = ("was rejected", "as") if rejected else ("has failed", "with")
        which = f" {by} {fault}" if fault else ""
        say(f"{dataset}: nothing to ask again: no sample {what}{which}.")
        return
    say(f"{dataset}: queued {counts.queued:,} {kind} samples again; {counts.waiting:,} were waiting already.")
    if stopping.came:
        raise typer.Exit(EXIT_INTERRUPTED)


def feeder_for(
    bench: Bench,
    dataset: str,
    *,
    view: Progress,
    stopping: Callable[[], bool],
    replace_waiting: bool = False,
) -> Feeder:
    """Return what puts a dataset's samples on its Celery queue."""
    from app.celery import app, publish
    from app.feeder import Feeder

    return Feeder(
        bench.books,
        partial(publish, app),
        url=bench.url,
        dataset=dataset,
        max_pending=settings.load(QueueSettings).max_pending,
        replace_waiting=replace_waiting,
        stopping=stopping,
        on_wait=view.wait,
    )


class Progress:
    """How far the enqueue is, and what it waits for, on standard error."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._line = ProgressLine()
        self._next_wait_note = 0.0

    def __call__(self, counts: Counts | Again) -> None:
        """Show the counts, if it is time."""
        self.show(f"read {counts.read:,}, queued {counts.queued:,}, already recorded {counts.recorded:,}")

    def show(self, line: str) -> None:
        """Show the line, if it is time."""
        self._line.show(line)

    def wait(self, why: str) -> None:
        """Tell, now and then, that there is no room in Redis."""
        now = time.monotonic()
        if now >= self._next_wait_note:
            self._next_wait_note = now + _WAIT_NOTE_EVERY_S
            workers = len(self._bench.books.workers())
            there = f"{workers} workers are at work" if workers else "no worker is running: start some (producer up)"
            self.close()
            note(f"{why}, waiting for room; {there}.")

    def close(self) -> None:
        """Clear the line."""
        self._line.close()


def met(report: Report, opened: Opened) -> Iterator[str]:
    """Yield what a pass has met that the user should know."""
    yield from report.mended
    for conflict in report.conflicts:
        yield (
            f"id {conflict.id!r} stands at {conflict.first_row} and, with another prompt, at {conflict.row}; "
            "both are kept, under different ids."
        )
    if report.conflict_count > len(report.conflicts):
        yield f"{report.conflict_count - len(report.conflicts):,} more ids repeat with other prompts."
    if opened.selection.left_out_rows:
        yield reading.left_out(opened)


def left_aside(counts: Counts, dataset: str) -> str:
    """Say how many samples failed for good and are left aside, why, and what asks them again."""
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in sorted(counts.left_aside.items()))
    n = counts.left_aside.total()
    return f"left aside {n:,} that failed for good ({reasons}): producer retry {dataset} asks again"


def _show(report: Report, dataset: str, opened: Opened, *, interrupted: bool) -> None:
    """Print what an enqueue did and end with its exit code.

    Raises the error that ended it early.
    """
    counts = report.counts
    near = f", near duplicates {opened.rows.near_duplicates:,}" if opened.rows.near_duplicates else ""
    for sentence in met(report, opened):
        note(sentence)
    if counts.recorded:
        say(f"{dataset}: resuming: {counts.recorded:,} of {counted(counts.samples, 'sample')} recorded already.")
    say(
        f"{dataset}: read {counts.read:,}, refused {counts.refused:,} (duplicates {counts.duplicates:,}{near}), "
        f"already recorded {counts.recorded:,}, already queued {counts.waiting:,}, queued {counts.queued:,}"
        + (f" (asked again {counts.retried:,})" if counts.retried else "")
        + (f"; {left_aside(counts, dataset)}" if counts.left_aside else "")
    )
    if counts.refused:
        note(f"the refused rows and why are in refused.jsonl of the dataset {dataset!r}.")
    if report.trouble is not None:
        note(f"stopped after {counted(counts.read, 'row')}; run the same command again to go on.")
        raise report.trouble
    if interrupted or not report.complete:
        note(f"stopped: queued {counts.queued:,} of {counts.read:,} rows read; run the same command again to go on.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if not counts.samples:
        note(f"there is nothing to ask: no row of the {counts.read:,} is a sample.")
        raise typer.Exit(EXIT_INCOMPLETE)
