"""`producer preview` and `producer presets`: what an input will become, before anything is queued."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import typer

from app.errors import EXIT_INCOMPLETE
from producer.commands import reading
from producer.commands.common import note, say, warn_of_unknown_settings
from producer.commands.typed import json_object
from producer.dedupe import Dedupe
from producer.texts import counted, cut

if TYPE_CHECKING:
    from app.records import RefusedRow, Sample
    from producer.presets import Preset
    from producer.reading import Opened
    from producer.template import Render

_ROWS_PER_REASON = 5

PREVIEW_HELP = """Show what the first samples of SOURCE will be, without queueing anything.

Reads the first --rows rows only, so that the size of the source does not matter, and needs neither Redis nor a
model server. Says how the rows are read, which are refused and why, and how many repeat. With --template the
samples are shown as the model will see them.
"""
PREVIEW_EXAMPLES = """\b
Examples:
  producer preview prompts.jsonl
  producer preview glaive-v2 -n 1 --template Qwen/Qwen3-8B
  producer preview rows.csv --columns prompt=question --filter "score>=0.9"
"""
PRESETS_HELP = """List the public datasets that enqueue and preview know by a short name."""
PRESETS_EXAMPLES = """\b
Examples:
  producer presets
  producer preview gsm8k/test
  producer enqueue gsm8k --dataset gsm8k --limit 1000
"""


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command("preview", help=PREVIEW_HELP, epilog=PREVIEW_EXAMPLES)(preview)
    cli.command("presets", help=PRESETS_HELP, epilog=PRESETS_EXAMPLES)(presets)


def preview(
    source: str = reading.SOURCE,
    number: int = typer.Option(3, "--number", "-n", min=0, help="Show this many samples."),
    rows: int = typer.Option(1000, min=1, help="Read at most this many rows."),
    template: str | None = typer.Option(
        None, metavar="MODEL", help="Render by this chat template: a hub id, a tokenizer's folder, or a .jinja file."
    ),
    chat_template_kwargs: str | None = typer.Option(None, metavar="JSON", help="Options of the chat template."),
    adapter: str | None = reading.ADAPTER,
    columns: str | None = reading.COLUMNS,
    filters: list[str] | None = reading.FILTER,
    shuffle: int | None = typer.Option(None, metavar="SEED", help="Shuffle the rows that are read."),
    limit: int | None = reading.LIMIT,
    dedupe: Dedupe = reading.DEDUPE,
    system: str | None = reading.SYSTEM,
    drop_system: bool = reading.DROP_SYSTEM,
    as_json: bool = typer.Option(False, "--json", help="One JSON object: samples, counts and refused rows."),
) -> None:
    """Show what the first samples of SOURCE will be, without queueing anything."""
    from producer.template import load

    warn_of_unknown_settings()
    kwargs = json_object("--chat-template-kwargs", chat_template_kwargs)
    render = load(template, kwargs) if template is not None else None
    opened = reading.open_rows(
        reading.reading_of(
            source=source,
            adapter=adapter,
            columns=columns,
            filters=filters,
            shuffle=shuffle,
            limit=limit,
            dedupe=dedupe,
            system=system,
            drop_system=drop_system,
        ),
        first_rows=rows,
    )
    samples, refused, found = _read(opened, number)
    if as_json:
        say(json.dumps(_as_json(opened, samples, refused, render), ensure_ascii=False, indent=2))
    else:
        for remark in opened.remarks():
            note(remark)
        for position, sample in enumerate(samples, start=1):
            _show_sample(position, sample, render)
        _show_counts(opened, refused, found, rows)
    if not found:
        raise typer.Exit(EXIT_INCOMPLETE)


def presets(
    as_json: bool = typer.Option(False, "--json", help="The whole list as JSON."),
) -> None:
    """List the public datasets that enqueue and preview know by a short name."""
    from producer.presets import PRESETS

    if as_json:
        say(json.dumps([_preset_as_json(preset) for preset in PRESETS], indent=2))
        return
    for preset in PRESETS:
        say(f"{preset.name:22} {preset.reference().description.removeprefix('hf:')}")
        say(f"{'':22} {preset.description}")
        known = f"; other splits: {', '.join(preset.splits)}" if preset.splits else ""
        gated = "; gated: accept its terms on the hub first" if preset.gated else ""
        say(f"{'':22} licence: {preset.licence}{gated}{known}")
    say("NAME[:config][/split][@revision] reads another part or version. Licences are as the cards name them.")


def _preset_as_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "hub": preset.hub,
        "source": preset.reference().description,
        "revision": preset.revision,
        "adapter": preset.adapter,
        "licence": preset.licence,
        "gated": preset.gated,
        "splits": [preset.split, *preset.splits],
        "description": preset.description,
    }


def _read(opened: Opened, number: int) -> tuple[list[Sample], list[RefusedRow], int]:
    """Return the first samples, all refused rows, and how many samples there are."""
    samples: list[Sample] = []
    refused: list[RefusedRow] = []
    found = 0
    for batch in opened.batches:
        found += len(batch.samples)
        samples += itertools.islice(batch.samples, number - len(samples))
        refused += batch.refused
    return samples, refused, found


def _show_sample(position: int, sample: Sample, render: Render | None) -> None:
    from producer.show import prompt

    where = f"{sample.source.name} " if sample.source.name else ""
    say(f"--- sample {position}: {where}row {sample.source.row}, id {sample.id}")
    if render is not None:
        say(cut(_rendered(sample, render)))
    else:
        for line in prompt(sample.messages, sample.tools, full=False):
            say(line)
    say("")


def _rendered(sample: Sample, render: Render) -> str:
    from producer.tokenizers import TemplateRefusedError

    try:
        return render(sample.messages, sample.tools)
    except TemplateRefusedError as error:
        return f"(the template refuses this sample: {error})"


def _show_counts(opened: Opened, refused: list[RefusedRow], found: int, rows: int) -> None:
    read = opened.rows.read
    bound = " (--rows reads more)" if read + opened.selection.left_out_rows >= rows else ""
    say(f"{opened.description}: read {counted(read, 'row')}{bound}, samples {found:,}, refused {opened.rows.refused:,}")
    if opened.selection.left_out_rows:
        say(reading.left_out(opened))
    for reason, count in opened.rows.reasons.most_common():
        examples = [row for row in refused if row.reason == reason][:_ROWS_PER_REASON]
        at = ", ".join(f"{row.name} {row.row}" if row.name else str(row.row) for row in examples)
        say(f"  {reason}: {count:,} (row {at}{', ...' if count > len(examples) else ''}): {examples[0].detail}")
    for conflict in opened.rows.conflicts[:_ROWS_PER_REASON]:
        say(f"  id {conflict.id!r} stands at {conflict.first_row} and, with another prompt, at {conflict.row}.")


def _as_json(opened: Opened, samples: list[Sample], refused: list[RefusedRow], render: Render | None) -> dict[str, Any]:
    shown = [
        {
            "id": sample.id,
            "row": sample.source.row,
            "messages": sample.messages,
            "tools": sample.tools,
            **({"rendered": _rendered(sample, render)} if render else {}),
        }
        for sample in samples
    ]
    return {
        "source": opened.description,
        "adapter": opened.adapter,
        "shapes": dict(opened.rows.shapes),
        "read": opened.rows.read,
        "refused": opened.rows.refused,
        "reasons": {str(reason): count for reason, count in opened.rows.reasons.items()},
        "left_out": opened.selection.left_out,
        "samples": shown,
        "refused_rows": [
            {"row": row.row, "name": row.name, "reason": row.reason, "detail": row.detail} for row in refused
        ],
    }
