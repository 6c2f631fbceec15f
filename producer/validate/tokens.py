"""The checks of token rows: lengths, ids, masks, enough to learn from, and an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from producer.validate.problems import Problem

_MASK_VALUES = ({0, 1}, {0}, {1})


@dataclasses.dataclass(frozen=True)
class TokenRules:
    """What token rows must keep to; None where nothing is known."""

    vocab_size: int | None = None
    max_length: int | None = None
    min_supervised: int = 1
    end_ids: frozenset[int] = frozenset()


def check_tokens(row: Mapping[str, Any], rules: TokenRules) -> Iterator[tuple[Problem, str]]:
    """Yield each problem of a row, and what exactly is wrong."""
    ids, mask = row["input_ids"], row["loss_mask"]
    if not (isinstance(ids, list) and isinstance(mask, list) and ids and len(ids) == len(mask)):
        yield Problem.LENGTHS, f"{_length(ids)} ids, {_length(mask)} mask values"
        return
    wrong = _wrong_id(ids, rules.vocab_size)
    if wrong is not None:
        yield Problem.BAD_TOKEN, wrong
    try:
        values = set(mask)
    except TypeError:
        values = {None}
    if values not in _MASK_VALUES:
        yield Problem.BAD_MASK, f"it holds {', '.join(map(repr, list(values - {0, 1})[:3]))}"
        return
    supervised = sum(mask)
    if supervised < rules.min_supervised:
        yield Problem.UNSUPERVISED, f"{supervised} of {len(mask)}"
    if rules.max_length is not None and len(ids) > rules.max_length:
        yield Problem.TOO_LONG, f"{len(ids)} tokens"
    if rules.end_ids and supervised:
        last = ids[len(mask) - 1 - mask[::-1].index(1)]
        if last not in rules.end_ids:
            yield Problem.NO_END_TOKEN, f"its last token is {last}"


def _wrong_id(ids: list[Any], vocab_size: int | None) -> str | None:
    """Return what is wrong with the ids, quickly where nothing is."""
    if set(map(type, ids)) != {int}:
        return f"{next(one for one in ids if type(one) is not int)!r} is no integer"
    if min(ids) < 0:
        return f"{min(ids)} is negative"
    if vocab_size is not None and max(ids) >= vocab_size:
        return f"{max(ids)} is outside a vocabulary of {vocab_size}"
    return None


def _length(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no"
