"""Generation settings as they are typed on the command line."""

from __future__ import annotations

import json
from typing import Any

from app import settings
from app.errors import SettingError
from app.settings import GenerationSettings


def load_typed(**options: Any) -> GenerationSettings:
    """Read the generation settings, what was typed first.

    Raises SettingError, which names a wrong value as it was given: by its option or by its variable.
    """
    try:
        return settings.load(GenerationSettings, **options)
    except SettingError as error:
        variable, separator, rest = str(error).partition(" cannot be used")
        name = variable.removeprefix(settings.ENV_PREFIX).lower()
        if separator and options.get(name) is not None:
            raise SettingError(f"--{name.replace('_', '-')}{separator}{rest}") from error
        raise


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """Return the JSON object that was typed, if one was.

    Raises SettingError, which names the option.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        message = f"{option} cannot be used: it is not JSON ({error}); write it like '{{\"enable_thinking\": true}}'."
        raise SettingError(message) from error
    if not isinstance(value, dict):
        raise SettingError(f"{option} cannot be used: it must be a JSON object in braces.")
    return value
