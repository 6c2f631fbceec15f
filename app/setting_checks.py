"""What of the user's settings nobody reads, and what of them cannot be used."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import dotenv
import pydantic

from app.errors import SettingError
from app.setting_words import explain
from app.settings import ENV_PREFIX, GROUPS, child_environment, load

_TOML = Path("promptmill.toml")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return one sentence for each variable or file entry that no setting reads, with the nearest known name."""
    known = {ENV_PREFIX + name.upper(): name for group in GROUPS for name in group.model_fields}
    given = {name: name for name in (child_environment() if environ is None else environ)}
    given |= {name.upper(): f"{name} in .env" for name in _entries_of(Path(".env"), dotenv.dotenv_values)}
    unknown = {name: shown for name, shown in given.items() if name.startswith(ENV_PREFIX) and name not in known}
    sentences = [_unknown(shown, name, known) for name, shown in unknown.items()]
    fields = sorted(known.values())
    for key, value in _entries_of(_TOML, _read_toml).items():
        if key.lower() not in fields and isinstance(value, dict):
            sentences.append(
                f"The table [{key}] in promptmill.toml has no effect; its keys belong at the top of the file, before "
                "every table."
            )
        elif key.lower() not in fields:
            name = key.lower().removeprefix(ENV_PREFIX.lower())
            sentences.append(_unknown(f"{key} in promptmill.toml", name, fields))
    return sorted(sentences)


def unusable_values() -> list[str]:
    """Return one sentence for each setting whose value cannot be used, whoever reads it."""
    sentences: list[str] = []
    for group in GROUPS:
        try:
            load(group)
        except SettingError as error:
            wrong = error.__cause__
            sentences += explain(wrong, ENV_PREFIX) if isinstance(wrong, pydantic.ValidationError) else [str(error)]
    return list(dict.fromkeys(sentences))


def _unknown(shown: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"{shown} is not a setting of promptmill and has no effect{hint}"


def _read_toml(path: Path) -> Mapping[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _entries_of(path: Path, read: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the entries of a settings file; none where it is missing or unreadable, which `load` tells."""
    try:
        return read(path) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
