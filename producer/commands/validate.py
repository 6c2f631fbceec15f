"""`producer validate`: training files checked before a trainer reads them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

from app import settings
from app.errors import EXIT_INCOMPLETE, UsageError
from producer.commands.common import ProgressLine, open_ledger, say
from producer.commands.typed import json_object
from producer.texts import counted

VALIDATE_HELP = """Check an export as strictly as no trainer does; exit code 0 only if it is sound.

FILES are what one export wrote: .jsonl (also .gz, .zst), .parquet or .arrow; give all its splits and shards at once.
With a tokenizer or a chat template every conversation is rendered as trainers render it, and the rows are counted
whose reasoning, content or tool calls would not be trained on.
"""
VALIDATE_EXAMPLES = """\b
Examples:
  producer validate chat.jsonl --tokenizer models/Qwen3-8B
  producer validate tokens.parquet --vocab-size 151936 --eos-id 151645 --max-length 8192 --dataset chat
  producer validate mix-train.jsonl mix-validation.jsonl --chat-template kimi.jinja --threshold 0
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("validate", help=VALIDATE_HELP, epilog=VALIDATE_EXAMPLES)(validate)


def validate(
    files: list[Path] = typer.Argument(..., metavar="FILES", help="The files of one export."),
    tokenizer: str | None = typer.Option(None, help="The model's tokenizer: a folder, or a name on the hub."),
    chat_template: Path | None = typer.Option(None, help="A chat template (jinja) to render with instead."),
    chat_template_kwargs: str | None = typer.Option(
        None, metavar="JSON", help="Arguments for the template, such as '{\"enable_thinking\": true}'."
    ),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code that the tokenizer brings."),
    vocab_size: int | None = typer.Option(None, min=1, help="The model's vocabulary. [the tokenizer's]"),
    max_length: int | None = typer.Option(None, min=1, help="The most tokens that a row may have."),
    min_supervised: int = typer.Option(1, min=0, help="The fewest tokens with loss mask 1 that a row may have."),
    eos_id: list[int] | None = typer.Option(None, help="An id that ends answers; may be repeated. [the tokenizer's]"),
    dataset: list[str] | None = typer.Option(None, "--dataset", "-d", help="Compare with a dataset; may be repeated."),
    threshold: float = typer.Option(
        0.01,
        min=0.0,
        max=1.0,
        help="The share of rows that may lack an end token, not render, or lose thoughts, content or calls.",
    ),
) -> None:
    """Check an export as strictly as no trainer does; exit code 0 only if it is sound."""
    from producer.validate.renderer import load_renderer
    from producer.validate.run import Rules
    from producer.validate.run import validate as check
    from producer.validate.tokens import TokenRules

    if chat_template_kwargs is not None and tokenizer is None and chat_template is None:
        raise UsageError("--chat-template-kwargs needs --tokenizer or --chat-template.")
    arguments = json_object("--chat-template-kwargs", chat_template_kwargs) or {}
    renderer = None
    if tokenizer is not None or chat_template is not None:
        renderer = load_renderer(tokenizer, chat_template, arguments, trust_remote_code=trust_remote_code)
    ends = renderer.end_tokens() if renderer is not None else {}
    rules = Rules(
        tokens=TokenRules(
            vocab_size=vocab_size or (renderer.vocab_size if renderer is not None else None),
            max_length=max_length,
            min_supervised=min_supervised,
            end_ids=frozenset(eos_id or ends),
        ),
        end_texts=frozenset(ends.values()),
        threshold=threshold,
    )
    store = settings.load(settings.StoreSettings)
    with contextlib.ExitStack() as stack:
        ledgers = [stack.enter_context(open_ledger(store, name)) for name in dict.fromkeys(dataset or [])]
        for ledger in ledgers:
            ledger.catch_up()
        line = stack.enter_context(contextlib.closing(ProgressLine()))
        report = check(
            files,
            rules,
            renderer=renderer,
            ledgers=ledgers,
            on_progress=lambda rows, done: line.show(
                f"checked {counted(rows, 'row')}" + (f", {done / 2**20:,.0f} MiB of the file" if done else "")
            ),
        )
    for sentence in report.sentences():
        say(sentence)
    if not report.is_sound:
        raise typer.Exit(EXIT_INCOMPLETE)
