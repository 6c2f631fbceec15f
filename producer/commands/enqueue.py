"""`producer enqueue` and `producer retry`: fill the queue."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from app import manifest, settings
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED
from app.ledger import Ledger
from app.records import Kind
from app.settings import GenerationSettings, QueueSettings
from producer.commands.common import Bench, ProgressLine, interruption, note, open_bench, say
from producer.commands.typed import json_object, load_typed

if TYPE_CHECKING:
    from producer.enqueue import Counts, Enqueuer, Report
    from producer.samples import Batch, Pass

_WAIT_NOTE_EVERY_S = 30.0

ENQUEUE_HELP = """Queue every sample of SOURCE that is not recorded or queued yet.

SOURCE is a file or folder (.jsonl, .json, .csv, .tsv, .parquet, also .gz or .zst), or
hf:org/name[:config][/split][@revision].

It is safe to run any number of times, also while workers run: what is recorded or waiting is left alone, so it
is also how an interrupted run is resumed. Sampling options are written to the dataset's manifest and travel with
the samples; only those that are given are sent to the server.
"""
ENQUEUE_EXAMPLES = """\b
Examples:
  producer enqueue prompts.jsonl --dataset chat --max-tokens 4096 --temperature 0.7
  producer enqueue data/ --dataset mix --limit 1000
  producer enqueue hf:HuggingFaceH4/ultrachat_200k/train_sft --dataset ultrachat
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
    source: str = typer.Argument(..., metavar="SOURCE", help="A file, a folder or hf:org/name."),
    dataset: str = typer.Option(..., "--dataset", "-d", metavar="NAME", help="The dataset to put the samples into."),
    adapter: str = typer.Option("auto", help="How rows are read: auto, or a row shape by name."),
    limit: int | None = typer.Option(None, min=1, help="Read at most this many rows."),
    samples_per_prompt: int = typer.Option(1, min=1, max=1000, help="Ask each prompt this many times."),
    retry_failed: bool = typer.Option(True, "--retry-failed/--no-retry-failed", help="Ask failed samples again."),
    retry_rejected: bool = typer.Option(False, "--retry-rejected", help="Ask rejected samples again."),
    new_settings: bool = typer.Option(
        False, "--new-settings", help="Go on with other settings than before; waiting samples get them too."
    ),
    model: str | None = typer.Option(None, help="The model's name for the server."),
    max_tokens: int | None = typer.Option(None, help="The longest answer in tokens. [MILL_MAX_TOKENS, else 8192]"),
    temperature: float | None = typer.Option(None, help="Sampling temperature."),
    top_p: float | None = typer.Option(None, help="Nucleus sampling."),
    top_k: int | None = typer.Option(None, help="Top-k sampling."),
    min_p: float | None = typer.Option(None, help="Min-p sampling."),
    repetition_penalty: float | None = typer.Option(None, help="Repetition penalty."),
    presence_penalty: float | None = typer.Option(None, help="Presence penalty."),
    frequency_penalty: float | None = typer.Option(None, help="Frequency penalty."),
    stop: list[str] | None = typer.Option(None, help="A stop string; may be repeated."),
    seed: int | None = typer.Option(None, help="The run's seed; each sample's own is derived from it and its id."),
    reasoning_effort: str | None = typer.Option(None, help="Reasoning effort, as the server names it."),
    chat_template_kwargs: str | None = typer.Option(None, metavar="JSON", help="Options of the chat template."),
    extra_body: str | None = typer.Option(None, metavar="JSON", help="More fields of the request."),
    system: str | None = typer.Option(None, help="A system prompt for samples that have none."),
    min_completion_tokens: int | None = typer.Option(None, help="Reject answers with fewer tokens."),
    keep_truncated: bool | None = typer.Option(
        None, "--keep-truncated/--no-keep-truncated", help="Accept answers cut at --max-tokens."
    ),
) -> None:
    """Queue every sample of SOURCE that is not recorded or queued yet."""
    generation = load_typed(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop) if stop else None,
        seed=seed,
        reasoning_effort=reasoning_effort,
        chat_template_kwargs=json_object("--chat-template-kwargs", chat_template_kwargs),
        extra_body=json_object("--extra-body", extra_body),
        system=system,
        min_completion_tokens=min_completion_tokens,
        keep_truncated=keep_truncated,
    )
    extra = {"adapter": adapter, "samples_per_prompt": samples_per_prompt}
    opened = _open_pass(source, generation, extra, limit=limit)
    _fill(dataset, opened, retry_failed=retry_failed, retry_rejected=retry_rejected, new_settings=new_settings)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """An input whose first rows are as the adapter expects them, and what its samples are made with."""

    description: str
    generation: GenerationSettings
    extra: dict[str, Any]
    rows: Pass
    batches: Iterator[Batch]


def _open_pass(source: str, generation: GenerationSettings, extra: dict[str, Any], *, limit: int | None) -> _Opened:
    """Open the input and read its first rows, before anything is made.

    `extra` holds the adapter's name and samples_per_prompt. Raises UsageError for what cannot be read.
    """
    from producer.adapters.registry import choose
    from producer.samples import Pass
    from producer.sources import open_source

    adapter = choose(extra["adapter"])
    max_row_bytes = int(settings.load(QueueSettings).max_row_mb * 2**20)
    rows = open_source(source, max_row_bytes=max_row_bytes, limit=limit)
    passing = Pass(
        rows,
        adapter=adapter,
        system=generation.system,
        samples_per_prompt=extra["samples_per_prompt"],
        settings=settings.fingerprint({**generation.content(), **extra}),
    )
    return _Opened(rows.description, generation, extra, passing, passing.batches())


def _fill(dataset: str, opened: _Opened, *, retry_failed: bool, retry_rejected: bool, new_settings: bool) -> None:
    """Queue what is not recorded or queued yet, and say what became of it."""
    from producer.enqueue import Retry, source_entry

    with open_bench() as bench, bench.ledger(dataset, create=True) as ledger, interruption() as stopping:
        ledger.check_writable(min_free_bytes=settings.MIN_FREE_DISK_BYTES)
        for mending in ledger.catch_up():
            note(str(mending))
        entry = manifest.fix_settings(ledger, dataset, opened.generation, opened.extra, new=new_settings)
        bench.books.register(dataset, entry.fingerprint, entry.content)
        manifest.begin_source(ledger, dataset, opened.description, opened.extra["adapter"])
        with contextlib.closing(_Progress(bench)) as view:
            enqueuer = _enqueuer(bench, ledger, dataset, view=view, stopping=stopping, replace_waiting=new_settings)
            retry = Retry(retry_failed, retry_rejected)
            report = enqueuer.run(opened.rows, opened.batches, retry=retry, on_progress=view)
        manifest.note_source(ledger, dataset, source_entry(opened.description, opened.extra["adapter"], report))
        if report.trouble is None and (why := bench.books.pause_reason(dataset)):
            note(f"the dataset {dataset!r} is paused ({why}); producer resume {dataset} goes on.")
    if new_settings and report.counts.waiting:
        note(f"{report.counts.waiting:,} samples of {dataset!r} that were waiting have the new settings now.")
    _show(report, dataset, interrupted=stopping.came)


def retry(
    dataset: str = typer.Argument(..., help="The dataset."),
    fault: str | None = typer.Option(None, help="Only samples of this class (such as timeout, or too_short)."),
    rejected: bool = typer.Option(False, "--rejected", help="Rejected samples instead of failed ones."),
) -> None:
    """Ask failed (or rejected) samples again, from their records; the source is not needed."""
    from producer.enqueue import failed_samples

    kind = Kind.REJECTED if rejected else Kind.FAILED
    with open_bench() as bench, bench.ledger(dataset) as ledger, interruption() as stopping:
        ledger.catch_up()
        known = manifest.read(ledger)
        for entry in known.settings if known else []:
            bench.books.register(dataset, entry.fingerprint, entry.content)
        with contextlib.closing(_Progress(bench)) as view:
            enqueuer = _enqueuer(bench, ledger, dataset, view=view, stopping=stopping)
            counts = enqueuer.again(failed_samples(ledger, kind=kind, reason=fault), on_progress=view)
    if not counts.samples:
        which = f" as {fault}" if fault else ""
        say(f"{dataset}: nothing to ask again: no sample was {kind}{which}.")
        return
    say(f"{dataset}: queued {counts.queued:,} {kind} samples again; {counts.waiting:,} were waiting already.")
    if stopping.came:
        raise typer.Exit(EXIT_INTERRUPTED)


def _enqueuer(
    bench: Bench,
    ledger: Ledger,
    dataset: str,
    *,
    view: _Progress,
    stopping: Callable[[], bool],
    replace_waiting: bool = False,
) -> Enqueuer:
    from app.celery import app
    from producer.enqueue import Enqueuer

    return Enqueuer(
        app=app,
        books=bench.books,
        url=bench.url,
        ledger=ledger,
        dataset=dataset,
        max_pending=settings.load(QueueSettings).max_pending,
        replace_waiting=replace_waiting,
        stopping=stopping,
        on_wait=view.wait,
    )


class _Progress:
    """How far the enqueue is, and what it waits for, on standard error."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._line = ProgressLine()
        self._next_wait_note = 0.0

    def __call__(self, counts: Counts) -> None:
        """Show the counts, if it is time."""
        self._line.show(f"read {counts.read:,}, queued {counts.queued:,}, already recorded {counts.recorded:,}")

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


def _show(report: Report, dataset: str, *, interrupted: bool) -> None:
    """Print what an enqueue did and end with its exit code.

    Raises the error that ended it early.
    """
    counts = report.counts
    for sentence in report.mended:
        note(sentence)
    for conflict in report.conflicts:
        note(
            f"id {conflict.id!r} stands at {conflict.first_row} and, with another prompt, at {conflict.row}; "
            "both are kept, under different ids."
        )
    if report.conflict_count > len(report.conflicts):
        note(f"{report.conflict_count - len(report.conflicts):,} more ids repeat with other prompts.")
    if counts.recorded:
        say(f"{dataset}: resuming: {counts.recorded:,} of {counts.samples:,} samples are recorded already.")
    say(
        f"{dataset}: read {counts.read:,}, refused {counts.refused:,} (duplicates {counts.duplicates:,}), "
        f"already recorded {counts.recorded:,}, already queued {counts.waiting:,}, queued {counts.queued:,}"
        + (f" (asked again {counts.retried:,})" if counts.retried else "")
    )
    if counts.refused:
        note(f"the refused rows and why are in refused.jsonl of the dataset {dataset!r}.")
    if report.trouble is not None:
        note(f"stopped after {counts.read:,} rows; run the same command again to go on.")
        raise report.trouble
    if interrupted or not report.complete:
        note(f"stopped: queued {counts.queued:,} of {counts.read:,} rows read; run the same command again to go on.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if not counts.samples:
        note(f"there is nothing to ask: no row of the {counts.read:,} is a sample.")
        raise typer.Exit(EXIT_INCOMPLETE)
