"""The command `producer`: every command's name, and how errors and interruptions end it."""

from __future__ import annotations

import sys

import typer
from typer.exceptions import TyperException

import app as ground_floor
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_USAGE, MillError
from producer.commands import (
    bound,
    doctor,
    enqueue,
    export,
    extract,
    look,
    preview,
    reclassify,
    rehearse,
    report,
    run,
    services,
    upkeep,
    validate,
    verify,
    watch,
)
from producer.pipes import silence

EXAMPLES = """\b
Examples:
  producer up --workers 2                          start Redis, workers and Flower here
  producer enqueue prompts.jsonl --dataset chat    queue what is not recorded yet
  producer enqueue hf:openai/gsm8k:main --dataset gsm8k --max-tokens 4096
  producer run recipe.toml                         several datasets from one file
  producer monitor                                 watch it live
  producer verify chat                             prove that nothing is missing
  producer export chat --format openai --output chat.jsonl
"""

cli = typer.Typer(
    name="producer",
    help="Turn prompt datasets into model responses: fill the queue, watch it, read the results.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"promptmill {ground_floor.__version__}")
        raise typer.Exit


@cli.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Turn prompt datasets into model responses: fill the queue, watch it, read the results."""


_COMMANDS = (
    enqueue,
    run,
    preview,
    rehearse,
    doctor,
    services,
    watch,
    report,
    verify,
    upkeep,
    bound,
    export,
    reclassify,
    look,
    extract,
    validate,
)

for module in _COMMANDS:
    module.add_to(cli)


def main() -> None:
    """Run a command; every expected error is one sentence on stderr and an exit code, never a traceback."""
    try:
        code = cli(standalone_mode=False) or 0
    except MillError as error:
        code = _say(str(error), error.exit_code)
    except typer.Abort:
        code = _say("interrupted.", EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        code = _say("interrupted.", EXIT_INTERRUPTED)
    except BrokenPipeError:
        silence(sys.stdout)  # whoever read it has gone
        code = EXIT_INCOMPLETE
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        code = _say(f"{what}{error.strerror or error}; check the path and its rights.", EXIT_INCOMPLETE)
    except TyperException as error:  # wrong usage, in typer's own words
        code = _say_usage(error)
    sys.exit(code)


def _say_usage(error: TyperException) -> int:
    show = getattr(error, "show", None)  # usage errors show the usage line, too
    if show is None:
        return _say(error.format_message(), EXIT_USAGE)
    show()
    return EXIT_USAGE


def _say(sentence: str, code: int) -> int:
    sys.stderr.write(f"producer: {sentence}\n")
    return code
