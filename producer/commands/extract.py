"""`producer extract`: hidden states of recorded answers, as files that draft trainers read."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app import manifest, settings
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, StoreError, UsageError
from app.extraction import (
    DEFAULT_BATCH_TOKENS,
    STATES_FOLDER,
    Layout,
    Plan,
    Precision,
    extraction_name,
    plan_from_content,
)
from app.lock import FolderLock, LockedError
from app.places import dataset_folder, is_extraction
from app.settings import QueueSettings, StoreSettings
from producer.commands.common import (
    Bench,
    ProgressLine,
    check_settings,
    interruption,
    note,
    open_bench,
    open_ledger,
    say,
)
from producer.texts import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from app.feeder import Feeder
    from app.ledger import Ledger
    from producer.extract import Counts
    from producer.states import Findings

EXTRACT_EXAMPLES = """\b
Examples:
  producer extract chat --model /models/Qwen3-8B                       states for SpecForge
  producer extract chat --model /models/Qwen3-8B --layout speculators --output /data/states
  producer extract chat                    go on, or take in what was recorded since
  producer extract chat --check            read every file and compare it with its record
  producer up --extract                    workers that make them, on this machine
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command(epilog=EXTRACT_EXAMPLES)(extract)


def extract(
    dataset: str = typer.Argument(..., help="The dataset whose accepted records are run through the model."),
    model: Path | None = typer.Option(None, metavar="PATH", help="The folder of the target model. [as the last time]"),
    layers: str | None = typer.Option(None, help="auto (EAGLE-3's rule), or as 2,18,33; the last is always added."),
    dtype: Precision | None = typer.Option(None, help="What the model is run in and what is written. [bf16]"),
    layout: Layout | None = typer.Option(None, help="Whose reader the files are for. [specforge]"),
    output: Path | None = typer.Option(None, metavar="DIR", help="Where the files go. [the new dataset's folder]"),
    max_length: int | None = typer.Option(None, min=1, help="Refuse records with more tokens. [the model's positions]"),
    batch_tokens: int | None = typer.Option(None, min=1, help=f"Tokens of one pass. [{DEFAULT_BATCH_TOKENS}]"),
    retokenize: bool | None = typer.Option(
        None, "--retokenize/--no-retokenize", help="Make ids of the text where the server gave none."
    ),
    trust_remote_code: bool | None = typer.Option(
        None, "--trust-remote-code/--no-trust-remote-code", help="Let workers run code that the model's folder holds."
    ),
    into: str | None = typer.Option(None, metavar="NAME.hidden", help="The new dataset's name. [DATASET.hidden]"),
    retry_failed: bool = typer.Option(True, "--retry-failed/--no-retry-failed", help="Try failed samples again."),
    new_settings: bool = typer.Option(False, "--new-settings", help="Go on with other settings than before."),
    force: bool = typer.Option(False, "--force", help="Go on although the disk cannot hold all files."),
    check: bool = typer.Option(False, "--check", help="Only read every file and compare it with its record."),
    repair: bool = typer.Option(False, "--repair", help="Do that, and make what is missing or damaged anew."),
) -> None:
    """Make files of hidden states out of accepted answers: one task each, done by workers with MILL_EXTRACT.

    They become a dataset of their own, DATASET.hidden, which status, monitor, pause, retry and verify know like any
    other. It is safe to run any number of times: what is recorded, and whose file is there, is not made again.
    """
    name = extraction_name(dataset, into or (dataset if is_extraction(dataset) else None))
    if check and not repair:
        _check(name)
        return
    check_settings()
    wish = _Wish(
        model, layers, dtype, layout, output, max_length, batch_tokens, retokenize, trust_remote_code
    )  # what was said now; the rest is as it was
    with open_bench() as bench, interruption() as stopping:
        before = _plan_before(bench.store, name)
        source = before.source if before and is_extraction(dataset) else dataset
        if is_extraction(source):
            raise UsageError(f"Which answers? {name} does not exist yet; give the dataset whose answers it is made of.")
        plan = _plan(before, source, name, wish)
        with bench.ledger(source) as from_, bench.ledger(name, create=True) as ledger, _alone(ledger):
            job = _Job(bench, name, plan, from_, ledger, new_settings=new_settings, retry_failed=retry_failed)
            job.run(force=force, read=repair, stopping=stopping)


@dataclasses.dataclass(frozen=True)
class _Wish:
    """What the command line says of a plan; None is what the dataset's manifest says, or else the default."""

    model: Path | None
    layers: str | None
    dtype: Precision | None
    layout: Layout | None
    output: Path | None
    max_length: int | None
    batch_tokens: int | None
    retokenize: bool | None
    trust_remote_code: bool | None


def _plan(before: Plan | None, source: str, name: str, wish: _Wish) -> Plan:
    """Return the plan to go on with: what was said now, else as before.

    Raises UsageError.
    """
    from producer.extract import choose_layers, read_model
    from producer.states_rows import require_datasets

    if before is not None and before.source != source:
        raise UsageError(f"{name} holds the hidden states of {before.source}, not of {source}; choose another --into.")
    if wish.model is None and before is None:
        raise UsageError("Which model? Give the target model's folder with --model PATH.")
    model = wish.model.absolute() if wish.model else Path(before.model if before else "")
    facts = read_model(model)
    same = before if before and before.model == str(model) else None  # another model has other layers and positions
    layers = same.layers if same and wish.layers is None else choose_layers(wish.layers or "auto", facts.num_layers)
    layout = wish.layout or (before.layout if before else Layout.SPECFORGE)
    retokenize = bool(before and before.retokenize) if wish.retokenize is None else wish.retokenize
    trusted = bool(before and before.trust_remote_code) if wish.trust_remote_code is None else wish.trust_remote_code
    if layout is Layout.SPECULATORS:
        require_datasets()
        if retokenize:
            raise UsageError("--retokenize does not go with --layout speculators, whose rows need the exact ids.")
    limits = (wish.max_length or (same.max_length if same else None), facts.max_positions)
    return Plan(
        source=source,
        model=str(model),
        layers=layers,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=wish.dtype or (before.dtype if before else Precision.BF16),
        layout=layout,
        output=str(wish.output.absolute()) if wish.output else (before.output if before else STATES_FOLDER),
        max_length=min((limit for limit in limits if limit), default=None),
        retokenize=retokenize,
        trust_remote_code=trusted,
        batch_tokens=wish.batch_tokens or DEFAULT_BATCH_TOKENS,
    )


def _plan_before(store: StoreSettings, name: str) -> Plan | None:
    """Return the plan that the dataset was last extracted with."""
    if not dataset_folder(store.prepared_dir, name).manifest.exists():
        return None
    with open_ledger(store, name) as ledger:
        known = manifest.read(ledger)
    return plan_from_content(known.current.content) if known and known.current else None


@contextlib.contextmanager
def _alone(ledger: Ledger) -> Iterator[None]:
    """Keep other extract commands and repairs of the dataset away: numbers are given out, and lines moved."""
    try:
        with FolderLock(ledger.folder.repair_lock, patience_s=0).held():
            yield
    except LockedError as error:
        raise StoreError(f"Another extract or repair of this dataset is at work: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Job:
    """One run of the command."""

    bench: Bench
    name: str
    plan: Plan
    source: Ledger
    ledger: Ledger
    _: dataclasses.KW_ONLY
    new_settings: bool
    retry_failed: bool

    def run(self, *, force: bool, read: bool, stopping: Callable[[], bool]) -> None:
        """Look at the disk, queue what is to be made, and say what became of it."""
        from producer.extract import Extraction

        self.ledger.check_writable(min_free_bytes=settings.MIN_FREE_DISK_BYTES)
        for mending in self.ledger.catch_up():
            note(str(mending))
        entry = manifest.fix_content(self.ledger, self.name, self.plan.content(), new=self.new_settings)
        self.bench.books.register(self.name, entry.fingerprint, self.plan.carried())
        folder = self.plan.folder(self.ledger.folder.path)
        if not self.bench.books.waiting(self.name).in_flight and folder.is_dir():
            _drop_temporaries(folder)
        _remake(self.ledger, read=read)
        extraction = Extraction(self.source, self.ledger, self.plan, retry_failed=self.retry_failed)
        with contextlib.closing(ProgressLine()) as line:
            found = extraction.survey(line.show)
            line.close()
            if found.samples:
                say(f"{self.name}: {extraction.check_room(found, folder, force=force)}")
            if found.unknown:
                note(f"the lengths of {found.unknown:,} samples are not known and not counted: they have no usage.")
            manifest.begin_source(self.ledger, self.name, self.plan.source, "extract")
            counts, complete = extraction.enqueue(
                self._feeder(line, stopping),
                entry.fingerprint,
                stopping=stopping,
                on_progress=lambda counts: line.show(f"read {counts.read:,}, queued {counts.queued:,}"),
            )
        self._note_source(counts, complete=complete)
        if complete and self.plan.layout is Layout.SPECULATORS and self.ledger.totals().samples:
            self._write_rows(folder)
        self._show(counts, complete=complete)

    def _feeder(self, line: ProgressLine, stopping: Callable[[], bool]) -> Feeder:
        from app.celery import app, publish
        from app.feeder import Feeder

        return Feeder(
            self.bench.books,
            partial(publish, app),
            url=self.bench.url,
            dataset=self.name,
            max_pending=settings.load(QueueSettings).max_pending,
            replace_waiting=self.new_settings,
            stopping=stopping,
            on_wait=line.show,
        )

    def _note_source(self, counts: Counts, *, complete: bool) -> None:
        now = time.time()
        refused = sum(counts.refused.values())
        entry = manifest.SourceEntry(
            source=self.plan.source,
            adapter="extract",
            first_at=now,
            last_at=now,
            read=counts.read,
            refused=refused,
            complete=complete,
        )
        manifest.note_source(self.ledger, self.name, entry)

    def _write_rows(self, folder: Path) -> None:
        from producer.states_rows import write_rows

        rows = write_rows(self.source, self.ledger, folder)
        say(f"{self.name}: wrote {rows:,} rows for speculators to {folder}; train with --data-path {folder}")

    def _show(self, counts: Counts, *, complete: bool) -> None:
        refused = sum(counts.refused.values())
        say(
            f"{self.name}: read {counts.read:,}, refused {refused:,}, already made {counts.recorded:,}, already queued "
            f"{counts.waiting:,}, queued {counts.queued:,}" + (f" (again {counts.retried:,})" if counts.retried else "")
        )
        if refused:
            reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts.refused.most_common())
            note(f"refused: {reasons}; refused.jsonl of the dataset {self.name!r} has the ids and numbers.")
        if not complete:
            note("stopped; run the same command again to go on.")
            raise typer.Exit(EXIT_INTERRUPTED)
        if why := self.bench.books.pause_reason(self.name):
            note(f"the dataset {self.name!r} is paused ({why}); producer resume {self.name} goes on.")
        workers = self.bench.books.workers()
        if counts.queued + counts.waiting and not any(worker.get("makes") for worker in workers):
            note("no worker that makes hidden states is running; start some with producer up --extract.")
        if not counts.read - refused:
            note(f"there is nothing to make: none of {counts.read:,} accepted records can be taken.")
            raise typer.Exit(EXIT_INCOMPLETE)


def _drop_temporaries(folder: Path) -> None:
    from producer.states import drop_temporaries

    if removed := drop_temporaries(folder):
        note(f"removed {counted(removed, 'half file')} that killed workers had left.")


def _remake(ledger: Ledger, *, read: bool) -> None:
    """Take the records of files that are gone or damaged out, so that their samples are made again."""
    from producer.states import check_files, set_aside

    with contextlib.closing(ProgressLine()) as line:
        found = check_files(ledger, read=read, on_progress=line.show)
    if not found.bad:
        return
    _tell(found)
    moved = set_aside(ledger, found)
    note(f"moved {counted(moved, 'record')} to {ledger.folder.quarantine.name}; their samples are made again.")


def _check(name: str) -> None:
    from producer.states import check_files

    store = settings.load(StoreSettings)
    with open_ledger(store, name) as ledger, contextlib.closing(ProgressLine()) as line:
        found = check_files(ledger, read=True, on_progress=line.show)
        line.close()
    _tell(found)
    say(
        f"{name}: read {found.files:,} files: {found.files - found.bad:,} are as recorded, {found.missing:,} missing, "
        f"{found.damaged:,} damaged"
    )
    if found.bad:
        note(f"producer extract {name} --repair makes them anew.")
        raise typer.Exit(EXIT_INCOMPLETE)


def _tell(found: Findings) -> None:
    for example in found.examples:
        note(example)
    if found.bad > len(found.examples):
        note(f"and {found.bad - len(found.examples):,} more.")
