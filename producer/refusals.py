"""Why a source row never becomes a sample, as a value."""

from __future__ import annotations

import enum

import msgspec


class Reason(enum.StrEnum):
    """One word for why a row was refused; it is written to `refused.jsonl`."""

    NOT_JSON = "not_json"
    """The line is no JSON value."""
    NOT_AN_OBJECT = "not_an_object"
    """The row is JSON, but no object with named columns."""
    TOO_LARGE = "too_large"
    """The row is larger than MILL_MAX_ROW_MB."""
    NOT_UTF8 = "not_utf8"
    """The row's bytes are no UTF-8 text."""
    NON_FINITE = "non_finite"
    """The row holds NaN, Infinity or a number beyond the range of a double."""
    LONE_SURROGATE = "lone_surrogate"
    """A text of the row holds half of a surrogate pair, which no UTF-8 can carry."""
    BAD_COLUMNS = "bad_columns"
    """The row has more or fewer fields than the table's header."""
    MISSING_FIELD = "missing_field"
    """No known prompt column, or a turn without its role or text."""
    NOT_A_STRING = "not_a_string"
    """A text is null, a number, a list or an object."""
    EMPTY_PROMPT = "empty_prompt"
    """The last user text is empty or holds only white space and invisible characters."""
    UNKNOWN_ROLE = "unknown_role"
    """A turn's role is none that promptmill knows."""
    NO_USER_TURN = "no_user_turn"
    """The conversation has no user turn before its end."""
    BAD_MESSAGES = "bad_messages"
    """The conversation is no list of turns, is empty, or cannot be asked as it is."""
    BAD_TOOLS = "bad_tools"
    """The tools are not in a form that can be sent."""
    ADAPTER_FAILED = "adapter_failed"
    """The user's own adapter raised an exception or gave no prompt."""
    DUPLICATE = "duplicate"
    """The same prompt (and source id) was met before in the same pass."""
    NEAR_DUPLICATE = "near_duplicate"
    """Nearly the same prompt was met before in the same pass (`--dedupe near`)."""


class Refusal(msgspec.Struct, frozen=True):
    """The decision that a row cannot become a sample."""

    reason: Reason
    detail: str
    """The reason in words, naming the column, turn, role or limit."""


def kind_of(value: object) -> str:
    """Return what a JSON value is, in words."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
