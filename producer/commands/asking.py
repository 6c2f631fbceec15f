"""The options that say how samples are asked, the same for `enqueue`, `doctor` and `rehearse`."""

from __future__ import annotations

from typing import Any

import typer

from app import settings
from app.errors import SettingError
from app.settings import GenerationSettings
from producer.commands.typed import json_object

MODEL: Any = typer.Option(None, help="The model's name for the server.")
MAX_TOKENS: Any = typer.Option(None, help="The longest answer in tokens. [MILL_MAX_TOKENS, else 8192]")
TEMPERATURE: Any = typer.Option(
    None, metavar="NUMBER", help="Sampling temperature; a range (0.6..1.0) or choices (0.6:1,1.0:3) to draw from."
)
TOP_P: Any = typer.Option(None, metavar="NUMBER", help="Nucleus sampling; a number, a range or choices.")
TOP_K: Any = typer.Option(None, help="Top-k sampling.")
MIN_P: Any = typer.Option(None, help="Min-p sampling.")
REPETITION_PENALTY: Any = typer.Option(None, help="Repetition penalty.")
PRESENCE_PENALTY: Any = typer.Option(None, help="Presence penalty.")
FREQUENCY_PENALTY: Any = typer.Option(None, help="Frequency penalty.")
STOP: Any = typer.Option(None, help="A stop string; may be repeated.")
SEED: Any = typer.Option(None, help="The run's seed; each sample's own is derived from it and its id.")
REASONING_EFFORT: Any = typer.Option(
    None, metavar="WORD", help="Reasoning effort, as the server names it; or choices (low:1,medium:2,high:1)."
)
CHAT_TEMPLATE_KWARGS: Any = typer.Option(None, metavar="JSON", help="Options of the chat template.")
EXTRA_BODY: Any = typer.Option(None, metavar="JSON", help="More fields of the request.")
MIN_COMPLETION_TOKENS: Any = typer.Option(None, help="Reject answers with fewer tokens.")
KEEP_TRUNCATED: Any = typer.Option(
    None, "--keep-truncated/--no-keep-truncated", help="Accept answers cut at --max-tokens."
)
ALLOW_THINK_LEAK: Any = typer.Option(
    None, "--allow-think-leak/--no-allow-think-leak", help="Accept answers with a think tag in their content."
)
MAX_REPETITION: Any = typer.Option(
    None, metavar="SHARE", help="Reject answers of which more repeats itself; 0.5 finds loops."
)


def generation_of(
    *,
    stop: list[str] | None = None,
    chat_template_kwargs: str | None = None,
    extra_body: str | None = None,
    **options: Any,
) -> GenerationSettings:
    """Return the generation settings, what was typed first; None is what was not typed.

    Raises SettingError, which names a wrong value as it was given: by its option or by its variable.
    """
    options |= {
        "stop": tuple(stop) if stop else None,
        "chat_template_kwargs": json_object("--chat-template-kwargs", chat_template_kwargs),
        "extra_body": json_object("--extra-body", extra_body),
    }
    try:
        return settings.load(GenerationSettings, **options)
    except SettingError as error:
        variable, separator, rest = str(error).partition(" cannot be used")
        name = variable.removeprefix(settings.ENV_PREFIX).lower()
        if separator and options.get(name) is not None:
            raise SettingError(f"--{name.replace('_', '-')}{separator}{rest}") from error
        raise
