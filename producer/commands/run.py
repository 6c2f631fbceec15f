"""`producer run`: several datasets out of one recipe, queued side by side, and their exports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app import manifest, settings
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, MillError, UsageError
from app.places import dataset_folder
from app.records import Kind
from app.settings import QueueSettings, StoreSettings
from producer.commands import export as exports
from producer.commands.common import (
    Bench,
    Interruption,
    ProgressLine,
    check_settings,
    interruption,
    note,
    open_bench,
    open_ledger,
    say,
    warn_of_unknown_settings,
)
from producer.commands.enqueue import PREFLIGHT, RETRY_FAILED, Progress, feeder_for, left_aside, met
from producer.commands.reading import max_row_bytes
from producer.texts import counted, table

if TYPE_CHECKING:
    from producer.enqueue import Enqueuer, Retry
    from producer.reading import Opened
    from producer.recipe import Export, Planned, Recipe
    from producer.run import OnWait, Run, Strand

RUN_HELP = """Queue the datasets of RECIPE side by side: what is neither recorded nor queued yet.

RECIPE is a TOML file with the datasets and the settings that they share (docs/recipes.md). Every dataset is queued as
producer enqueue does it, in turns by weight, so that all progress together. It is safe to run any number of times,
also while workers run; the same command goes on where it was. A dataset that cannot be read or written does not stop
the others.
"""
RUN_EXAMPLES = """\b
Examples:
  producer run recipe.toml --dry-run              read the first rows of each dataset, queue nothing
  producer run recipe.toml --limit-scale 0.01     a trial: a hundredth of each dataset
  producer run recipe.toml                        the whole run; the trial's answers count
  producer run recipe.toml --only code --only math
  producer run recipe.toml --export               once all is recorded: the recipe's exports
"""
_SHOWN_ROWS = 500
"""Rows of each dataset that --dry-run reads."""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("run", help=RUN_HELP, epilog=RUN_EXAMPLES)(run)


def run(
    recipe: Path = typer.Argument(..., metavar="RECIPE", help="The recipe, a .toml file."),
    only: list[str] | None = typer.Option(None, metavar="NAME", help="Only this dataset; may be repeated."),
    limit_scale: float | None = typer.Option(
        None, metavar="FACTOR", help="Multiply every limit, as by 0.01 for a trial."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the plan and read the first rows; queue nothing."),
    retry_failed: bool | None = RETRY_FAILED,
    retry_rejected: bool = typer.Option(False, "--retry-rejected", help="Ask rejected samples again."),
    new_settings: bool = typer.Option(
        False, "--new-settings", help="Go on with other settings than before; waiting samples get them too."
    ),
    export: bool = typer.Option(False, "--export", help="Write the recipe's exports instead, once all is recorded."),
    overwrite: bool = typer.Option(False, "--overwrite", help="With --export: replace existing files."),
    preflight: bool = PREFLIGHT,
) -> None:
    """Queue the datasets of RECIPE side by side."""
    from producer.doctor import gate
    from producer.enqueue import Retry
    from producer.recipe import load

    check_settings()
    loaded = load(recipe)
    wishes = [_wishes(loaded, number, one, overwrite=overwrite) for number, one in enumerate(loaded.exports, start=1)]
    if export:
        if only or limit_scale is not None or dry_run:
            raise UsageError("--export writes what the recipe names; it takes --overwrite and no other option.")
        _export(loaded, wishes)
        return
    if overwrite:
        raise UsageError("--overwrite belongs to --export, which was not given.")
    plan = loaded.plan(only or (), limit_scale=limit_scale)
    if dry_run:
        _show_plan(loaded, plan)
        return
    retry = Retry.told(failed=retry_failed, rejected=retry_rejected, new_settings=new_settings)
    with gate.opened({planned.name: planned.generation for planned in plan}, wanted=preflight) as look:
        look.check(note)
    _queue(plan, retry, new_settings=new_settings)


def _queue(plan: Sequence[Planned], retry: Retry, *, new_settings: bool) -> None:
    from producer.run import Room, Run

    with contextlib.ExitStack() as stack:
        bench = stack.enter_context(open_bench())
        stopping = stack.enter_context(interruption())
        view = stack.enter_context(contextlib.closing(_View(bench)))
        run = Run(
            plan,
            url=bench.url,
            room=Room(books=bench.books, max_pending=settings.load(QueueSettings).max_pending),
            open_input=_open_input,
            begin=_beginner(bench, stack, view, stopping, new_settings=new_settings),
            retry=retry,
            stopping=stopping,
            on_progress=view.show_run,
            on_failure=lambda name, error: view.tell(name, str(error)),
            on_wait=view.wait,
        )
        run.run()
        view.close()
        for strand in run.strands:
            _note_end(bench, strand, new_settings=new_settings)
        _show(bench, run, stopping)


class _View(Progress):
    """How far all datasets are, on standard error."""

    _line_before = ""

    def show_run(self, run: Run) -> None:
        """Show the counts, if it is time."""
        from producer.run import Stage

        total, stages = run.total, [strand.stage for strand in run.strands]
        shuffled = sum(one.reader.shuffled for one in run.strands if one.stage is Stage.OPENING)
        words = {
            f"opening ({shuffled:,} rows read to shuffle)" if shuffled else "opening": Stage.OPENING,
            "read to the end": Stage.COMPLETE,
            "failed": Stage.FAILED,
        }
        stations = ", ".join(f"{stages.count(stage)} {word}" for word, stage in words.items() if stage in stages)
        line = f"read {total.read:,}, queued {total.queued:,}, already recorded {total.recorded:,}"
        line = f"{counted(len(stages), 'dataset')}{f', {stations}' if stations else ''}: {line}"
        if line != self._line_before:  # a log needs no line for each look while nothing moves
            self._line_before = line
            self.show(line)

    def tell(self, dataset: str, sentence: str) -> None:
        """Say something about a dataset."""
        self.close()
        note(f"{dataset}: {sentence}")


def _open_input(planned: Planned, on_wait: OnWait) -> Opened:
    from producer.reading import open_reading

    content = {**planned.generation.content(), **planned.reading.content()}
    return open_reading(
        planned.reading, max_row_bytes=max_row_bytes(), settings=settings.fingerprint(content), on_wait=on_wait
    )


def _beginner(
    bench: Bench, stack: contextlib.ExitStack, view: _View, stopping: Interruption, *, new_settings: bool
) -> Callable[[Planned, Opened], Enqueuer]:
    """Return what makes a dataset's folder ready; the stack closes it."""
    from producer.enqueue import Enqueuer, Job, begin

    def make(planned: Planned, opened: Opened) -> Enqueuer:
        name = planned.name
        ledger = stack.enter_context(bench.ledger(name, create=True))
        job = Job(planned.generation, planned.reading.content(), opened)
        begin(ledger, bench.books, name, job, new_settings=new_settings, tell=lambda told: view.tell(name, told))
        feeder = feeder_for(bench, name, view=view, stopping=stopping, replace_waiting=new_settings)
        return Enqueuer(feeder, url=bench.url, ledger=ledger, stopping=stopping)

    return make


def _note_end(bench: Bench, strand: Strand, *, new_settings: bool) -> None:
    """Write down how a dataset's pass ended, and say what it has met."""
    from producer.enqueue import source_entry

    report, opened, name = strand.report(), strand.opened, strand.planned.name
    if report is None or opened is None:
        return
    try:
        with bench.ledger(name) as ledger:
            manifest.note_source(ledger, name, source_entry(opened.description, opened.adapter, report))
    except MillError as error:
        strand.trouble = strand.trouble or error
    for sentence in met(report, opened):
        note(f"{name}: {sentence}")
    if report.counts.left_aside:
        note(f"{name}: {left_aside(report.counts, name)}.")
    if new_settings and report.counts.waiting:
        note(f"{name}: {counted(report.counts.waiting, 'sample')} that waited got the new settings now.")


def _show(bench: Bench, run: Run, stopping: Interruption) -> None:
    """Print what became of every dataset and end with the exit code.

    Raises the error that ended it early.
    """
    for line in table(list(_report_rows(run)), left=(0, 7)):
        say(line)
    if run.total.refused:
        note("the refused rows and why are in refused.jsonl of each dataset.")
    bad = dict(_troubles(run))
    for name, sentence in bad.items():
        note(f"{name}: {sentence}")
    if run.trouble is not None:
        note("stopped; run the same command again to go on.")
        raise run.trouble
    if stopping.came:
        note(f"stopped: queued {counted(run.total.queued, 'sample')}; run the same command again to go on.")
        raise typer.Exit(EXIT_INTERRUPTED)
    for strand in run.strands:
        if why := bench.books.pause_reason(strand.planned.name):
            note(f"the dataset {strand.planned.name!r} is paused ({why}); producer resume NAME goes on.")
    if bad:
        which = f"{len(bad)} of {counted(len(run.strands), 'dataset')}"
        note(
            f"{which} could not be queued as they should ({', '.join(bad)}); mend that and run the same command again."
        )
        raise typer.Exit(EXIT_INCOMPLETE)


def _troubles(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each dataset that could not be queued to its end, or has nothing to queue."""
    for strand in run.strands:
        if strand.trouble is not None:
            yield strand.planned.name, str(strand.trouble)
        elif strand.stage == "complete" and not strand.counts.samples:
            yield strand.planned.name, f"there is nothing to ask: no row of the {strand.counts.read:,} is a sample."


_HEADINGS = ("dataset", "read", "refused", "duplicates", "recorded", "waiting", "queued", "input")


def _report_rows(run: Run) -> Iterator[tuple[str, ...]]:
    yield _HEADINGS
    named = [(strand.planned.name, strand.counts, _end_of(strand)) for strand in run.strands]
    if len(named) > 1:
        named.append(("total", run.total, ""))
    for name, counts, end in named:
        numbers = (counts.read, counts.refused, counts.duplicates, counts.recorded, counts.waiting, counts.queued)
        yield (name, *(f"{number:,}" for number in numbers), end)


def _end_of(strand: Strand) -> str:
    if strand.trouble is not None:
        return "failed"
    return "complete" if strand.stage == "complete" else "stopped"


def _show_plan(recipe: Recipe, plan: Sequence[Planned]) -> None:
    """Print what would be queued, going by the first rows of each dataset."""
    from producer.run import look_at

    warn_of_unknown_settings()
    datasets = counted(len(plan), "dataset")
    with contextlib.closing(ProgressLine()) as line:
        opened = look_at(plan, _open_first_rows, on_opened=lambda count: line.show(f"opened {count} of {datasets}"))
    looks = list(zip(plan, opened, strict=True))
    troubles = [f"{planned.name}: {one}" for planned, one in looks if isinstance(one, MillError)]
    rows = [("dataset", "weight", "limit", "reads as", "source"), *(_plan_row(planned, one) for planned, one in looks)]
    for text in table(rows, left=(0, 3, 4)):
        say(text)
    limits = [planned.reading.limit for planned in plan]
    most = (
        f"at most {counted(sum(limit or 0 for limit in limits), 'row')}" if all(limits) else "not all of them limited"
    )
    say(f"{datasets}, {most}, {counted(len(recipe.exports), 'export')}. Nothing was queued (--dry-run).")
    for trouble in troubles:
        note(trouble)
    if troubles:
        raise typer.Exit(EXIT_INCOMPLETE)


def _open_first_rows(planned: Planned, _on_wait: OnWait) -> Opened:
    from producer.reading import open_reading

    return open_reading(planned.reading, max_row_bytes=max_row_bytes(), first_rows=_SHOWN_ROWS)


def _plan_row(planned: Planned, opened: Opened | MillError) -> tuple[str, ...]:
    limit = "all" if planned.reading.limit is None else f"{planned.reading.limit:,}"
    shape, source = "-", planned.reading.source
    if not isinstance(opened, MillError):
        licence = f" ({opened.choice.preset.licence})" if opened.choice is not None else ""
        shape, source = "+".join(opened.rows.shapes) or opened.adapter, opened.description + licence
    return planned.name, f"{planned.weight:g}", limit, shape, source


def _wishes(recipe: Recipe, number: int, wanted: Export, *, overwrite: bool) -> exports.Wishes:
    """Return what an export's table asks for. Raises UsageError, which names the table."""
    wishes = exports.Wishes(
        form=wanted.format,
        output=recipe.beside(wanted.output),
        overwrite=overwrite,
        limit=wanted.limit,
        reasoning=wanted.reasoning,
        status=wanted.status or None,
        tools=None if wanted.tools else False,
        max_length=wanted.max_length,
        order=wanted.order,
        include=wanted.include,
        split=wanted.split,
        shard_size=wanted.shard_size,
        vocab_size=wanted.vocab_size,
        draft_vocab_size=wanted.draft_vocab_size,
        card=recipe.beside(wanted.card) if wanted.card is not None else None,
    )
    try:
        exports.check(wishes)
    except UsageError as error:
        raise UsageError(f"{recipe.path}, [[export]] {number} ({wanted.output}): {error}") from error
    return wishes


def _export(recipe: Recipe, wishes: Sequence[exports.Wishes]) -> None:
    """Write the recipe's exports, unless something of its datasets is still to come."""
    if not wishes:
        raise UsageError(f"{recipe.path} names no export; add an [[export]] with format and output.")
    store = settings.load(StoreSettings)
    names = [dataset.name for dataset in recipe.datasets]
    lacking = [sentence for name in names for sentence in _lacks(store, name)]
    for sentence in lacking:
        note(sentence)
    if lacking:
        note("nothing was exported; producer monitor --until-done waits for the rest, producer export takes a part.")
        raise typer.Exit(EXIT_INCOMPLETE)
    failed = []
    for wanted, wish in zip(recipe.exports, wishes, strict=True):
        try:
            exports.carry_out(wanted.datasets or names, wish)
        except MillError as error:
            failed.append(f"{wanted.output}: {error}")
    for sentence in failed:
        note(sentence)
    if failed:
        note(f"{len(failed)} of {counted(len(wishes), 'export')} could not be written.")
        raise typer.Exit(EXIT_INCOMPLETE)


def _lacks(store: StoreSettings, dataset: str) -> Iterator[str]:
    """Yield what is still to come of a dataset."""
    if not dataset_folder(store.prepared_dir, dataset).path.is_dir():
        yield f"{dataset}: nothing of it was queued yet."
        return
    with open_ledger(store, dataset) as ledger:
        for mending in ledger.catch_up():
            note(str(mending))
        known = manifest.read(ledger)
        for sentence in manifest.unread_inputs(known) if known else ():
            yield f"{dataset}: {sentence}"
        left = ledger.totals().count(Kind.PENDING)
        if left:
            yield f"{dataset}: not recorded yet: {counted(left, 'sample')}."
