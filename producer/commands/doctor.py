"""`producer doctor`: finds what would waste a run before its first request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import typer

from app.errors import EXIT_INCOMPLETE, UsageError
from producer.commands import reading
from producer.commands.common import check_settings, note, say
from producer.commands.typed import json_object, load_typed
from producer.dedupe import Dedupe
from producer.texts import counted

if TYPE_CHECKING:
    from producer.doctor.choice import Chosen
    from producer.reading import Opened, Reading

DOCTOR_HELP = """Find what would waste a run before its first request.

Looks at the settings, Redis, the disk and every model server of MILL_MODEL_URLS, and asks each server a real question
with the given settings, with thinking on and off. With SOURCE it also asks some of its samples, says what will be
recorded, and estimates tokens, time and disk. Queues and records nothing. Ends with 1 if something failed.
"""
DOCTOR_EXAMPLES = """\b
Examples:
  producer doctor
  producer doctor prompts.jsonl --max-tokens 4096 --temperature 0.7
  producer doctor gsm8k --canaries 64 --chat-template-kwargs '{"enable_thinking": true}'
  producer doctor --no-canary --json | jq '.checks[] | select(.level == "fail")'
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("doctor", help=DOCTOR_HELP, epilog=DOCTOR_EXAMPLES)(doctor)


def doctor(
    source: str | None = typer.Argument(
        None, metavar="[SOURCE]", help="A file, a folder, hf:org/name, or a preset's name.", show_default=False
    ),
    dataset: str | None = typer.Option(None, "--dataset", "-d", metavar="NAME", help="Look at its folder, too."),
    canaries: int = typer.Option(32, min=1, max=1000, help="Ask this many samples of SOURCE."),
    canary: bool = typer.Option(True, "--canary/--no-canary", help="Ask real questions, or generate nothing."),
    rows: int | None = typer.Option(None, min=1, help="How many rows SOURCE has. [counted where that is cheap]"),
    timeout: float = typer.Option(300.0, min=1.0, metavar="SECONDS", help="Wait so long for an answer."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
    adapter: str | None = reading.ADAPTER,
    columns: str | None = reading.COLUMNS,
    filters: list[str] | None = reading.FILTER,
    limit: int | None = reading.LIMIT,
    dedupe: Dedupe = reading.DEDUPE,
    samples_per_prompt: int = typer.Option(1, min=1, max=1000, help="Ask each prompt this many times."),
    system: str | None = reading.SYSTEM,
    drop_system: bool = reading.DROP_SYSTEM,
    model: str | None = typer.Option(None, help="The model's name for the server."),
    max_tokens: int | None = typer.Option(None, help="The longest answer in tokens. [MILL_MAX_TOKENS, else 8192]"),
    temperature: str | None = typer.Option(None, metavar="NUMBER", help="Sampling temperature."),
    top_p: str | None = typer.Option(None, metavar="NUMBER", help="Nucleus sampling."),
    top_k: int | None = typer.Option(None, help="Top-k sampling."),
    min_p: float | None = typer.Option(None, help="Min-p sampling."),
    repetition_penalty: float | None = typer.Option(None, help="Repetition penalty."),
    presence_penalty: float | None = typer.Option(None, help="Presence penalty."),
    frequency_penalty: float | None = typer.Option(None, help="Frequency penalty."),
    stop: list[str] | None = typer.Option(None, help="A stop string; may be repeated."),
    seed: int | None = typer.Option(None, help="The run's seed."),
    reasoning_effort: str | None = typer.Option(None, metavar="WORD", help="Reasoning effort."),
    chat_template_kwargs: str | None = typer.Option(None, metavar="JSON", help="Options of the chat template."),
    extra_body: str | None = typer.Option(None, metavar="JSON", help="More fields of the request."),
    min_completion_tokens: int | None = typer.Option(None, help="Reject answers with fewer tokens."),
    keep_truncated: bool | None = typer.Option(
        None, "--keep-truncated/--no-keep-truncated", help="Accept cut answers."
    ),
    allow_think_leak: bool | None = typer.Option(
        None, "--allow-think-leak/--no-allow-think-leak", help="Accept answers with a think tag in their content."
    ),
    max_repetition: float | None = typer.Option(None, metavar="SHARE", help="Reject answers that repeat themselves."),
    turns: str | None = typer.Option(None, metavar="WHICH", help="last, or all, of which only the last one is asked."),
) -> None:
    """Find what would waste a run before its first request."""
    from producer.doctor.examine import examine
    from producer.doctor.render import show

    check_settings()
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
        allow_think_leak=allow_think_leak,
        max_repetition=max_repetition,
        turns=turns,
    )
    chosen = None
    if source is not None:
        wanted = reading.reading_of(
            source=source,
            adapter=adapter,
            columns=columns,
            filters=filters,
            limit=limit,
            system=generation.system,
            drop_system=drop_system,
            dedupe=dedupe,
            samples_per_prompt=samples_per_prompt,
        )
        chosen = _choose(wanted, canaries, rows)
    samples = (chosen.samples if chosen else []) if canary else None
    if samples is not None:
        note("asking canaries ...")
    findings = examine(generation, samples, chosen=chosen, dataset=dataset, timeout_s=timeout)
    if as_json:
        say(json.dumps(msgspec.to_builtins(findings), ensure_ascii=False, indent=2))
    else:
        show(findings)
    if not findings.ok:
        raise typer.Exit(EXIT_INCOMPLETE)


def _choose(wanted: Reading, number: int, rows: int | None) -> Chosen:
    from producer.doctor.choice import choose

    def open_rows(one: Reading, first: int) -> Opened:
        return reading.open_rows(one, first_rows=first)

    chosen = choose(wanted, number, rows=rows, max_row_bytes=reading.max_row_bytes(), open_rows=open_rows)
    if not chosen.samples:
        first = counted(chosen.read, "row")
        raise UsageError(f"{chosen.description}: none of its first {first} is a sample; see preview.")
    return chosen
