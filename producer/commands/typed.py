"""JSON as it is typed on the command line."""

from __future__ import annotations

import json
from typing import Any

from app.errors import SettingError


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
