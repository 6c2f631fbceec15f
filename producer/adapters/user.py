"""Adapters of the user's own: a Python function named as `module:function`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from app.errors import UsageError
from producer.adapters.base import Columns, Conversation, conversation_of, source_id
from producer.adapters.turns import to_messages, turns_of
from producer.refusals import Reason, Refusal, kind_of

_FORM = "return a text, {'messages': [...]} (also with 'tools', 'system' and 'id'), or None"


@dataclasses.dataclass(frozen=True)
class UserAdapter:
    """Rows read by a function: row (column name -> value) in, prompt out."""

    name: str
    """The function as `module:function`."""
    _function: Callable[[dict[str, Any]], Any] = dataclasses.field(repr=False)

    def recognises(self, row: Columns) -> bool:
        """Tell whether the function can do with the row, be it that it wants none of it."""
        return not isinstance(self._call(row), Refusal)

    def convert(self, row: Columns) -> Conversation | Refusal:
        """Return what the function makes of the row, under the same rules as every conversation.

        None, an exception and what is no prompt are refusals with reason `adapter_failed`.
        """
        value = self._call(row)
        if isinstance(value, Refusal):
            return value
        if value is None:
            return Refusal(Reason.ADAPTER_FAILED, f"{self.name} returned None")
        turns = turns_of(value["messages"], "messages")
        messages = turns if isinstance(turns, Refusal) else to_messages(turns)
        return messages if isinstance(messages, Refusal) else conversation_of(_with_id(value, row), messages)

    def _call(self, row: Columns) -> dict[str, Any] | Refusal | None:
        """Return an object with `messages`, or why the function gave none; None where it wants no prompt."""
        try:
            found = self._function(dict(row))
        except Exception as error:  # noqa: BLE001 - somebody else's code may raise anything, and one row stops no run
            return Refusal(Reason.ADAPTER_FAILED, f"{self.name} raised {type(error).__name__}: {str(error)[:200]}")
        if found is None:
            return None
        if type(found) is str:
            return {"messages": [{"role": "user", "content": found}]}
        value = _as_json(found)
        if type(value) is dict and "messages" in value:
            return value
        return Refusal(Reason.ADAPTER_FAILED, f"{self.name} returned {kind_of(found)}; it must {_FORM}")


def _with_id(value: dict[str, Any], row: Columns) -> dict[str, Any]:
    """Return what the function gave, with the row's own id unless it names one."""
    return value if value.get("id") is not None else {**value, "id": source_id(row)}


def _as_json(value: Any) -> Any:
    """Return a value as JSON would bring it back; None for what JSON cannot carry."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None


def load(name: str) -> UserAdapter:
    """Import the function that `module:function` names; the current folder is looked into first.

    Raises UsageError when there is none.
    """
    module_name, _, function_name = name.partition(":")
    try:
        with _current_folder_first():
            module = importlib.import_module(module_name)
    except Exception as error:  # the module is somebody else's code
        raise UsageError(
            f"--adapter {name}: the module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "start in its folder, or install it."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--adapter {name}: the module {module_name!r} has no function {function_name!r}.")
    return UserAdapter(name, function)


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
