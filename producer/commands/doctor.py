"""`producer doctor`: finds what would waste a run before its first request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import typer

from app.errors import EXIT_INCOMPLETE, UsageError
from producer.commands import asking, reading
from producer.commands.common import check_settings, note, say
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
    samples_per_prompt: int = reading.SAMPLES_PER_PROMPT,
    system: str | None = reading.SYSTEM,
    drop_system: bool = reading.DROP_SYSTEM,
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
    min_completion_tokens: int | None = asking.MIN_COMPLETION_TOKENS,
    keep_truncated: bool | None = asking.KEEP_TRUNCATED,
    allow_think_leak: bool | None = asking.ALLOW_THINK_LEAK,
    max_repetition: float | None = asking.MAX_REPETITION,
    turns: str | None = typer.Option(None, metavar="WHICH", help="last, or all, of which only the last one is asked."),
) -> None:
    """Find what would waste a run before its first request."""
    from producer.doctor.examine import examine
    from producer.doctor.render import show

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
