"""Every name that datasets give to the four roles."""

from __future__ import annotations

CALL = "call"
"""The role of a turn whose text is a function call; it becomes an assistant turn with tool_calls."""

_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"),
    "tool": (
        "tool",
        "function",
        "observation",
        "tool_response",
        "tool_result",
        "tool_output",
        "function_response",
        "function_result",
        "function_output",
        "ipython",
    ),
    CALL: ("function_call", "tool_call"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}


def role_of(name: str) -> str | None:
    """Return system, user, assistant, tool or CALL for a dataset's role name; None when it is unknown.

    Case, spaces around the name, and `-` or a space for `_` make no difference.
    """
    return _ROLES.get(name) or _ROLES.get(name.strip().casefold().replace("-", "_").replace(" ", "_"))
