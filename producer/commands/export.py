"""`producer export`: training files out of the accepted records."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app import jsonl, settings
from app.errors import UsageError
from app.ledger import Ledger
from app.records import Kind
from producer.commands.common import ProgressLine, note, open_ledger, say
from producer.texts import counted

if TYPE_CHECKING:
    from producer.export.base import FormatOptions
    from producer.export.report import ExportReport
    from producer.export.selection import Selection

EXPORT_HELP = """Write the accepted records of datasets as training files, each once.

The output's ending chooses the file: .jsonl (also .gz, .zst), .parquet or .arrow. `tokens` holds id, input_ids and
loss_mask from the exact ids that the server gave; records without them are counted and left out. `vocab` and
`token-freq` count the answers' tokens and write .safetensors, .npz or .pt. docs/exports.md says which format is for
which trainer.
"""
EXPORT_EXAMPLES = """\b
Examples:
  producer export chat --format openai --output chat.jsonl
  producer export chat --format tokens --output chat.parquet --max-length 8192
  producer export chat code math --format specforge --output mix.jsonl --split train=0.98,validation=0.02
  producer export chat --format tokens --output chat.parquet --shard-size 500MB --push my-org/chat-tokens
  producer export chat --format vocab --draft-vocab-size 32000 --vocab-size 151936 --output vocab.pt
"""
_TOKEN_FORMATS_HAVE_NO = ("limit", "split", "shard_size", "reasoning", "status", "tools", "max_length", "card", "push")


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("export", help=EXPORT_HELP, epilog=EXPORT_EXAMPLES)(export)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is wanted of an export, but for the datasets."""

    form: str
    output: Path
    overwrite: bool
    limit: int | None
    reasoning: str | None
    status: bool | None
    tools: bool | None
    max_length: int | None
    order: str
    include: Sequence[str]
    split: str | None
    shard_size: str | None
    vocab_size: int | None
    draft_vocab_size: int | None
    card: Path | None
    push: str | None = None
    public: bool = False
    yes: bool = False
    dry_run: bool = False


def export(
    datasets: list[str] = typer.Argument(..., metavar="DATASET...", help="The datasets; several give one output."),
    form: str = typer.Option(
        ...,
        "--format",
        "-f",
        help="tokens, specforge, speculators, torchspec-kimi, modelopt, openai, sharegpt, trl, vocab or token-freq.",
    ),
    output: Path = typer.Option(..., "--output", "-o", help="The file to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace existing files."),
    limit: int | None = typer.Option(None, min=1, help="Write at most this many rows."),
    order: str = typer.Option("completion", help="completion (as the answers came) or id (the same everywhere)."),
    include: list[str] | None = typer.Option(
        None, metavar="rejected[:REASON]", help="Take rejected records too, all or of a reason; may be repeated."
    ),
    split: str | None = typer.Option(
        None, metavar="train=0.98,validation=0.02", help="A file for each share; an id never changes its share."
    ),
    shard_size: str | None = typer.Option(None, metavar="ROWS|500MB", help="Begin a new file at this size."),
    reasoning: str | None = typer.Option(
        None, help="What becomes of reasoning: field, inline or drop. [each format's own]"
    ),
    max_length: int | None = typer.Option(None, min=1, help="Leave out longer rows, in tokens (tokens)."),
    status: bool = typer.Option(False, "--status", help='Add "status": "success" (specforge).'),
    tools: bool = typer.Option(
        True,
        " /--no-tools",
        show_default=False,
        help="Write no tools column, as gpt-oss needs, and leave out prompts with tools (specforge).",
    ),
    vocab_size: int | None = typer.Option(None, min=1, help="The model's vocabulary (vocab, token-freq)."),
    draft_vocab_size: int | None = typer.Option(None, min=1, help="The draft model's vocabulary (vocab)."),
    card: Path | None = typer.Option(None, metavar="README.md", help="Write a dataset card there."),
    push: str | None = typer.Option(None, metavar="ORG/NAME", help="Send files and card to the Hugging Face hub."),
    public: bool = typer.Option(False, "--public", help="Make a new dataset on the hub public instead of private."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask before sending."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Write the files, and only show what --push would send."),
) -> None:
    """Write the accepted records of datasets as training files, each once."""
    wishes = Wishes(
        form=form, output=output, overwrite=overwrite, limit=limit, reasoning=reasoning, status=status or None,
        tools=None if tools else False, max_length=max_length, order=order, include=include or [], split=split,
        shard_size=shard_size, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, card=card, push=push,
        public=public, yes=yes, dry_run=dry_run,
    )  # fmt: skip
    carry_out(datasets, wishes)


def carry_out(datasets: Sequence[str], wishes: Wishes) -> None:
    """Write an export and say what is in it."""
    from producer.export.formats import FREQUENCIES, VOCABULARY

    store = settings.load(settings.StoreSettings)
    with contextlib.ExitStack() as stack:
        ledgers = [stack.enter_context(open_ledger(store, name)) for name in dict.fromkeys(datasets)]
        for ledger in ledgers:
            for mending in ledger.catch_up():
                note(str(mending))
        _refuse_unknown_reasons(ledgers, wishes)
        write = _write_vocabulary if wishes.form in {VOCABULARY, FREQUENCIES} else _write_rows
        write(ledgers, wishes)
        _say_what_is_missing(ledgers, wishes)


def _refuse_unknown_reasons(ledgers: Sequence[Ledger], wishes: Wishes) -> None:
    """Refuse a reason that promptmill does not know and no record has: it is mistyped, and would export nothing."""
    from app.verdict import Reason

    found = {reason for one in ledgers for kind, reason in one.totals().by_reason if kind is Kind.REJECTED}
    known = [*Reason, *sorted(found.difference(Reason))]
    for reason in sorted(_selection(wishes).rejected or ()):
        if reason not in known:
            whose = ", ".join(ledger.folder.path.name for ledger in ledgers)
            raise UsageError(f"No record of {whose} was rejected as {reason!r}; the reasons are: {', '.join(known)}.")


def check(wishes: Wishes) -> None:
    """Refuse what can be known to be wrong before there is a record. Raises UsageError."""
    from producer.export.formats import FREQUENCIES, VOCABULARY, make_format
    from producer.export.outputs import parse_shard_size
    from producer.export.sinks import suffix_of
    from producer.export.split import parse_split
    from producer.export.vocabulary import check_vocabulary

    _selection(wishes)
    if wishes.form in {VOCABULARY, FREQUENCIES}:
        _refuse_row_options(wishes)
        check_vocabulary(
            wishes.form, wishes.output, vocab_size=wishes.vocab_size, draft_vocab_size=wishes.draft_vocab_size
        )
        return
    _refuse_strangers(wishes)
    make_format(wishes.form, _options(wishes))
    suffix_of(wishes.output)
    if wishes.split is not None:
        parse_split(wishes.split)
    if wishes.shard_size is not None:
        parse_shard_size(wishes.shard_size)


def _options(wishes: Wishes) -> FormatOptions:
    from producer.export.base import FormatOptions
    from producer.export.run import parse_reasoning

    return FormatOptions(
        reasoning=parse_reasoning(wishes.reasoning) if wishes.reasoning is not None else None,
        status=wishes.status,
        tools=wishes.tools,
        max_length=wishes.max_length,
    )


def _selection(wishes: Wishes) -> Selection:
    from producer.export.selection import Selection

    return Selection.parse(wishes.order, wishes.include)


def _write_vocabulary(ledgers: Sequence[Ledger], wishes: Wishes) -> None:
    from producer.export.vocabulary import export_vocabulary

    _refuse_row_options(wishes)
    with contextlib.closing(ProgressLine()) as line:
        report = export_vocabulary(
            *ledgers,
            format=wishes.form,
            output=wishes.output,
            vocab_size=wishes.vocab_size,
            draft_vocab_size=wishes.draft_vocab_size,
            overwrite=wishes.overwrite,
            selection=_selection(wishes),
            on_progress=lambda done, total: line.show(_read(done, total)),
        )
    for sentence in report.sentences():
        say(sentence)


def _refuse_row_options(wishes: Wishes) -> None:
    """Refuse options that mean nothing where no rows are written."""
    for name in _TOKEN_FORMATS_HAVE_NO:
        if getattr(wishes, name) is not None:
            option = "no-tools" if name == "tools" else name.replace("_", "-")
            raise UsageError(f"The format {wishes.form} has no --{option}; it writes no rows.")


def _write_rows(ledgers: Sequence[Ledger], wishes: Wishes) -> None:
    from producer.export.atomic import refuse_existing
    from producer.export.outputs import parse_shard_size
    from producer.export.push import check_repository, find_token
    from producer.export.run import export as write
    from producer.export.split import parse_split

    _refuse_strangers(wishes)
    token = ""
    if wishes.push is not None:
        check_repository(wishes.push)
        token = "" if wishes.dry_run else find_token()
    if wishes.card is not None:
        refuse_existing(wishes.card, overwrite=wishes.overwrite)
    with contextlib.closing(ProgressLine()) as line:
        report = write(
            *ledgers,
            format=wishes.form,
            output=wishes.output,
            overwrite=wishes.overwrite,
            limit=wishes.limit,
            options=_options(wishes),
            selection=_selection(wishes),
            split=parse_split(wishes.split) if wishes.split is not None else None,
            shard=parse_shard_size(wishes.shard_size) if wishes.shard_size is not None else None,
            on_progress=lambda done, total: line.show(_read(done, total)),
        )
    for sentence in report.sentences():
        say(sentence)
    _write_card(ledgers, wishes, report)
    if wishes.push is not None:
        _push(ledgers, wishes, report, token)


def _refuse_strangers(wishes: Wishes) -> None:
    """Refuse options that mean nothing without another one."""
    for name, value in (("vocab-size", wishes.vocab_size), ("draft-vocab-size", wishes.draft_vocab_size)):
        if value is not None:
            raise UsageError(f"The format {wishes.form} has no --{name}; --format vocab has.")
    for name, there in (("public", wishes.public), ("yes", wishes.yes), ("dry-run", wishes.dry_run)):
        if there and wishes.push is None:
            raise UsageError(f"--{name} belongs to --push ORG/NAME, which was not given.")
    if wishes.push is not None and not (wishes.yes or wishes.dry_run or sys.stdin.isatty()):
        raise UsageError("--push asks before it sends, and there is no terminal to answer in; add --yes or --dry-run.")


def _write_card(ledgers: Sequence[Ledger], wishes: Wishes, report: ExportReport) -> None:
    from producer.export.card import write_card

    if wishes.card is not None:
        jsonl.replace_file(wishes.card, write_card(ledgers, report, title=wishes.output.name).encode())
        say(f"{wishes.card} written.")


def _push(ledgers: Sequence[Ledger], wishes: Wishes, report: ExportReport, token: str) -> None:
    from producer.export.card import write_card
    from producer.export.push import FOLDER, Parcel, push

    repository = wishes.push or ""
    text = write_card(ledgers, report, title=repository, folder=FOLDER)
    parcel = Parcel(repository, private=not wishes.public, files=report.files, card=text)
    for sentence in parcel.sentences():
        say(sentence)
    if wishes.dry_run:
        say("Nothing was sent (--dry-run).")
    elif wishes.yes or typer.confirm("Send it?"):
        say(f"Sent to {push(parcel, token)}.")
    else:
        say("Nothing was sent.")


def _read(done: int, total: int) -> str:
    return f"read {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"


def _say_what_is_missing(ledgers: Sequence[Ledger], wishes: Wishes) -> None:
    """Tell how many samples of the datasets are no accepted records."""
    totals = [ledger.totals() for ledger in ledgers]
    lacks = {"not recorded yet": Kind.PENDING, "rejected": Kind.REJECTED, "failed": Kind.FAILED}
    if wishes.include:
        del lacks["rejected"]
    counts = {word: sum(one.count(kind) for one in totals) for word, kind in lacks.items()}
    words = [f"{count:,} {word}" for word, count in counts.items() if count]
    if words:
        whose = "the dataset's" if len(ledgers) == 1 else "the datasets'"
        samples = counted(sum(one.samples for one in totals), "sample")
        note(f"of {whose} {samples}, these are not in it: {', '.join(words)}.")
