"""Settings that are distributions: what a text means, and the value that each sample draws from it.

A draw follows from the run's seed, the setting's name and the sample's id alone, so that no resume, no other worker and
no other order changes one.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

from app.records import split_turn

_DECIMALS: Final = 4
"""A number that is drawn from a range is rounded to as many decimals."""
_DIGEST_BYTES: Final = 7
_ACCURATE_BITS: Final = 53
"""As many bits as a float holds exactly."""

Value = float | str


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two, each as likely as the other."""

    low: float
    high: float

    def at(self, share: float) -> float:
        """Return the number below which that share (0 <= share < 1) of all draws lies, rounded."""
        drawn = round(self.low + (self.high - self.low) * share, _DECIMALS)
        return min(max(drawn, self.low), self.high)  # rounding must not leave the range

    @property
    def extremes(self) -> tuple[float, ...]:
        """The smallest and the greatest value."""
        return self.low, self.high

    def __str__(self) -> str:
        """Return the one spelling that settings are compared in."""
        return f"{self.low!r}..{self.high!r}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """Some values, each with its weight (above 0)."""

    values: tuple[Value, ...]
    weights: tuple[float, ...]

    def at(self, share: float) -> Value:
        """Return the value into whose part that share (0 <= share < 1) of the whole weight falls."""
        ends = list(itertools.accumulate(self.weights))
        return self.values[min(bisect.bisect_right(ends, share * ends[-1]), len(ends) - 1)]

    @property
    def extremes(self) -> tuple[Value, ...]:
        """All values."""
        return self.values

    def __str__(self) -> str:
        """Return the one spelling that settings are compared in."""
        equal = set(self.weights) == {1.0}
        pairs = zip(map(str, self.values), self.weights, strict=True)
        return ",".join(value if equal else f"{value}:{_short(weight)}" for value, weight in pairs)


def _short(number: float) -> str:
    return repr(number).removesuffix(".0")


Distribution = Range | Choices


def _at_least_0(number: float) -> str | None:
    return None if number >= 0 else "at least 0"


def _share_above_0(number: float) -> str | None:
    return None if 0 < number <= 1 else "above 0 and at most 1"


_NUMBERS: Mapping[str, Callable[[float], str | None]] = {"temperature": _at_least_0, "top_p": _share_above_0}
"""For each number that may be drawn: what is asked of it, where a value does not meet that."""
_WORDS: Final = "reasoning_effort"
DRAWN: Final = (*_NUMBERS, _WORDS)
"""The settings that may be distributions."""


def checked(name: str, value: object) -> Value:
    """Return a setting as it is kept: a number as a float, a word, or a distribution in its one spelling.

    Raises ValueError, saying what is accepted, for what is neither, or can draw a value out of bounds.
    """
    kinds = str if name == _WORDS else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{value!r} is {_accepted(name)}")  # noqa: TRY004  pydantic takes ValueErrors alone
    meaning = _parse(name, str(value))
    if not isinstance(meaning, Distribution):
        _check_number(name, meaning, "")
        return meaning
    for one in meaning.extremes:
        _check_number(name, one, f" (in {value})")
    return str(meaning)


def draw(name: str, value: Value, run_seed: int | None, sample_id: str) -> Value:
    """Return what a sample gets of a setting that `checked` has passed: the value itself, or its own draw.

    Without a run's seed the draw follows from the name and the id. All turns of a conversation get the same.
    """
    meaning = _parse(name, value) if isinstance(value, str) else value
    if not isinstance(meaning, Distribution):
        return meaning
    return meaning.at(_share(name, run_seed, sample_id))


def _check_number(name: str, number: Value, where: str) -> None:
    """Refuse a number that is out of the setting's bounds; words have none."""
    if isinstance(number, str):
        return
    if asked := "a finite number" if not math.isfinite(number) else _NUMBERS[name](number):
        raise ValueError(f"{number:g}{where} is out of bounds: it must be {asked}")


def _share(name: str, run_seed: int | None, sample_id: str) -> float:
    """Return a number from 0 up to, not including, 1."""
    conversation, _turn = split_turn(sample_id)
    seed = "" if run_seed is None else str(run_seed)
    digest = hashlib.sha256(f"{seed}:{name}:{conversation}".encode()).digest()
    bits = int.from_bytes(digest[:_DIGEST_BYTES], "big") >> (8 * _DIGEST_BYTES - _ACCURATE_BITS)
    return bits / (1 << _ACCURATE_BITS)


@functools.lru_cache(maxsize=64)
def _parse(name: str, text: str) -> Value | Distribution:
    """Return what a text means; raises ValueError."""
    if "," in text or ":" in text:
        return _choices(name, text)
    if name == _WORDS:
        return text
    low, dots, high = text.partition("..")
    if not dots:
        return _number(name, text, text)
    bounds = Range(_number(name, low, text), _number(name, high, text))
    if not bounds.low < bounds.high:
        raise ValueError(f"{text!r} is no range: its first number must be the smaller one")
    return bounds


def _choices(name: str, text: str) -> Choices:
    values: list[Value] = []
    weights = []
    for part in text.split(","):
        word, colon, weight = (piece.strip() for piece in part.partition(":"))
        if not word:
            raise ValueError(f"{text!r} has an empty choice; write {_example(name)}")
        values.append(word if name == _WORDS else _number(name, word, text))
        weights.append(_weight(weight, text) if colon else 1.0)
    if len(set(values)) < len(values):
        raise ValueError(f"{text!r} names a choice twice; give it one weight")
    return Choices(tuple(values), tuple(weights))


def _weight(word: str, text: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise ValueError(f"{word!r} in {text!r} is no weight; a weight is a number above 0")
    return weight


def _number(name: str, word: str, text: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{text!r} is {_accepted(name)}") from None


def _accepted(name: str) -> str:
    if name == _WORDS:
        return f"neither a word nor choices such as {_example(name)}"
    return f"neither a number, nor a range such as 0.6..1.0, nor choices such as {_example(name)}"


def _example(name: str) -> str:
    return "low:1,medium:2,high:1" if name == _WORDS else "0.6:1,1.0:3"
