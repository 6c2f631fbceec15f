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
import re
from collections.abc import Callable, Mapping
from typing import Final

from app.records import split_turn

_DECIMALS: Final = 4
"""A number that is drawn from a range is rounded to as many decimals."""
_DIGEST_BYTES: Final = 7
_ACCURATE_BITS: Final = 53
"""As many bits as a float holds exactly."""

_NUMBER: Final = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
"""What `float` reads, without digits of other scripts and `_` between digits."""
_DECIMAL_COMMA: Final = re.compile(r"\s*[0-9]+,[0-9]+\s*")

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
        equal = len(set(self.weights)) == 1
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
    if isinstance(meaning, Choices) and len(meaning.values) == 1:
        meaning = meaning.values[0]
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
        return _word(text)
    low, dots, high = text.partition("..")
    if not dots:
        return _number(name, text, text)
    bounds = Range(_number(name, low, text), _number(name, high, text))
    if not bounds.low < bounds.high:
        raise ValueError(f"{text!r} is no range: its first number must be the smaller one")
    return bounds


def _word(text: str) -> str:
    if not text.strip() or ".." in text:
        raise ValueError(f"{text!r} is {_accepted(_WORDS)}")
    return text.strip()


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
    if name != _WORDS and _DECIMAL_COMMA.fullmatch(text):
        dotted, chosen = text.strip().replace(",", "."), text.strip().replace(",", ":1,")
        raise ValueError(f"{text!r} may mean {dotted} or two choices; write {dotted}, or {chosen}:1")
    if not math.isfinite(sum(weights)):
        raise ValueError(f"the weights in {text!r} are too large to be added up")
    return Choices(tuple(values), tuple(weights))


def _weight(word: str, text: str) -> float:
    weight = float(word) if _NUMBER.fullmatch(word) else 0.0
    if not 0 < weight < math.inf:
        raise ValueError(f"{word!r} in {text!r} is no weight; a weight is a number above 0")
    return weight


def _number(name: str, word: str, text: str) -> float:
    if not _NUMBER.fullmatch(word.strip()):
        raise ValueError(f"{text!r} is {_accepted(name)}")
    return float(word) + 0.0  # minus zero is zero


def _accepted(name: str) -> str:
    if name == _WORDS:
        return f"neither a word nor choices such as {_example(name)}"
    return f"neither a number, nor a range such as 0.6..1.0, nor choices such as {_example(name)}"


def _example(name: str) -> str:
    return "low:1,medium:2,high:1" if name == _WORDS else "0.6:1,1.0:3"
