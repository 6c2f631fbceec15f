"""Distributions: what a text means, what is refused, and that a draw follows from seed, name and id alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from app import draws, settings
from app.errors import SettingError
from app.settings import GenerationSettings

EFFORTS = "low:1,medium:2,high:1"
IDS = [f"row{number}" for number in range(20_000)]


@pytest.mark.parametrize(
    ("id_", "temperature", "top_p", "effort", "unseeded"),
    [
        ("a", 0.9037, 0.9365, "medium", 0.6),
        ("b", 0.6098, 0.8072, "medium", 1.0),
        ("fruits-77f3ee2ffcec", 0.9727, 0.8615, "low", 1.0),
        ("fruits-77f3ee2ffcec.2", 0.898, 0.8926, "low", 0.6),
        ("fruits-77f3ee2ffcec.3", 0.8757, 0.9205, "medium", 1.0),
    ],
)
def test_draws_never_change(id_: str, temperature: float, top_p: float, effort: str, unseeded: float) -> None:
    """The same seed, setting and id give the same value in every version; each setting draws for itself."""
    assert draws.draw("temperature", "0.6..1.0", 42, id_) == temperature
    assert draws.draw("top_p", "0.8..1.0", 42, id_) == top_p
    assert draws.draw("reasoning_effort", EFFORTS, 42, id_) == effort
    assert draws.draw("temperature", "0.6:1,1.0:3", None, id_) == unseeded


def test_another_seed_draws_anew() -> None:
    """The run's seed is part of every draw."""
    drawn = {seed: [draws.draw("temperature", "0..1", seed, id_) for id_ in IDS[:50]] for seed in (None, 0, 1)}
    assert len({tuple(values) for values in drawn.values()}) == 3


def test_turns_share_the_draw_of_their_conversation_and_copies_do_not() -> None:
    """`#turnN` belongs to its conversation; `.2` is a sample of its own."""
    one = draws.draw("temperature", "0..1", 1, "chat-1")
    assert [draws.draw("temperature", "0..1", 1, f"chat-1#turn{turn}") for turn in (1, 2, 13)] == [one] * 3
    assert len({draws.draw("temperature", "0..1", 1, id_) for id_ in ("chat-1", "chat-1.2", "chat-1.3")}) == 3
    assert draws.draw("temperature", "0..1", 1, "chat-1.2#turn2") == draws.draw("temperature", "0..1", 1, "chat-1.2")


def test_a_range_is_drawn_from_evenly() -> None:
    """Each tenth of a range gets a tenth of the draws, and no draw has more than four decimals."""
    drawn = [draws.draw("temperature", "0.6..1.0", 7, id_) for id_ in IDS]
    numbers = [value for value in drawn if isinstance(value, float)]
    assert numbers == [round(number, 4) for number in numbers]
    assert 0.6 <= min(numbers) < 0.6005
    assert 0.9995 < max(numbers) <= 1.0
    tenths = Counter(min(9, int((number - 0.6) / 0.04)) for number in numbers)
    assert sorted(tenths) == list(range(10))
    assert all(abs(count - 2_000) < 200 for count in tenths.values()), tenths


def test_choices_are_drawn_by_weight() -> None:
    """A choice of twice the weight is drawn twice as often; without weights all are equal."""
    weighted = Counter(draws.draw("reasoning_effort", EFFORTS, 7, id_) for id_ in IDS)
    assert set(weighted) == {"low", "medium", "high"}
    assert abs(weighted["medium"] - 10_000) < 300
    assert abs(weighted["low"] - 5_000) < 300
    equal = Counter(draws.draw("temperature", "0.2,0.7", 7, id_) for id_ in IDS)
    assert set(equal) == {0.2, 0.7}
    assert abs(equal[0.2] - 10_000) < 300


def test_rounding_stays_in_the_range() -> None:
    """A range that is finer than four decimals draws no value outside of it, such as a top_p of 0."""
    drawn = {draws.draw("top_p", "0.00001..0.00002", 1, id_) for id_ in IDS[:100]}
    assert drawn <= {0.00001, 0.00002}


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("temperature", 1, 1.0),
        ("temperature", "0.5", 0.5),
        ("temperature", " 0.60 .. 1 ", "0.6..1.0"),
        ("temperature", "0.6, 1", "0.6,1.0"),
        ("temperature", "0.6:1,1:1.0", "0.6,1.0"),
        ("temperature", "0:1000001,1:0.5", "0.0:1000001,1.0:0.5"),
        ("top_p", "0.9:3,1", "0.9:3,1.0:1"),
        ("temperature", "0.6:2,1:2", "0.6,1.0"),
        ("temperature", "0.6:3", 0.6),
        ("temperature", "-0.0", 0.0),
        ("temperature", "-0..1", "0.0..1.0"),
        ("temperature", "0, 1", "0.0,1.0"),
        ("temperature", "1E-5 .. .5", "1e-05..0.5"),
        ("reasoning_effort", "high", "high"),
        ("reasoning_effort", " high ", "high"),
        ("reasoning_effort", "high:2", "high"),
        ("reasoning_effort", "low : 1, high:2", "low:1,high:2"),
    ],
)
def test_one_spelling_for_one_meaning(name: str, given: object, kept: object) -> None:
    """What is kept compares equal wherever it means the same, and is kept as it is when it is read again."""
    assert draws.checked(name, given) == kept
    assert type(draws.checked(name, given)) is type(kept)
    assert draws.checked(name, kept) == kept


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("temperature", "hot", "'hot' is neither a number, nor a range such as 0.6..1.0, nor choices such as 0.6:1"),
        ("temperature", True, "true is neither a number"),
        ("temperature", "1.0..0.6", "'1.0..0.6' is no range: its first number must be the smaller one"),
        ("temperature", "-1..1", r"-1 \(in -1..1\) is out of bounds: it must be at least 0"),
        ("temperature", -0.1, "-0.1 is out of bounds: it must be at least 0"),
        ("temperature", "nan", "nan is out of bounds: it must be a finite number"),
        ("temperature", "0..inf", r"inf \(in 0..inf\) is out of bounds: it must be a finite number"),
        ("temperature", 10**400, "inf is out of bounds"),
        ("top_p", "0.9:1,1.1:1", "1.1 .* must be above 0 and at most 1"),
        ("top_p", "0..1", "0 .* must be above 0 and at most 1"),
        ("temperature", "0.6:0,1", "'0' in '0.6:0,1' is no weight; a weight is a number above 0"),
        ("temperature", "0.6:x,1", "'x' in '0.6:x,1' is no weight"),
        ("temperature", "0.6:inf,1", "'inf' in '0.6:inf,1' is no weight"),
        ("temperature", "0.6,", "'0.6,' has an empty choice; write 0.6:1,1.0:3"),
        ("temperature", "0.6,0.60", "'0.6,0.60' names a choice twice; give it one weight"),
        ("temperature", "0,7", "'0,7' may mean 0.7 or two choices; write 0.7, or 0:1,7:1"),
        ("top_p", "0,95", "'0,95' may mean 0.95 or two choices; write 0.95, or 0:1,95:1"),
        ("temperature", "\u0660.\u0666", "is neither a number"),
        ("temperature", "1_0", "'1_0' is neither a number"),
        ("temperature", "0.6:1_0,1", "'1_0' in '0.6:1_0,1' is no weight"),
        ("temperature", "0.6:\u0663,1", "is no weight"),
        ("temperature", "0.6:1e308,1:1e308", "the weights in '0.6:1e308,1:1e308' are too large to be added up"),
        ("reasoning_effort", "low..high", "'low..high' is neither a word nor choices"),
        ("reasoning_effort", " ", "' ' is neither a word nor choices"),
        ("reasoning_effort", "low,,high", "has an empty choice; write low:1,medium:2,high:1"),
        ("reasoning_effort", 3, "3 is neither a word nor choices such as low:1,medium:2,high:1"),
    ],
)
def test_what_cannot_be_used_is_told(name: str, given: object, told: str) -> None:
    """Each mistake names the setting's variable, what is wrong, and what is accepted."""
    with pytest.raises(SettingError, match=f"^MILL_{name.upper()} cannot be used: .*{told}"):
        settings.load(GenerationSettings, **{name: given})


def test_numbers_keep_their_fingerprint() -> None:
    """Settings without a distribution are written, and compare, as they did before there were any."""
    content = settings.load(GenerationSettings, temperature="0.6", top_p=1, reasoning_effort="low").content()
    assert content == {
        "max_tokens": 8192,
        "temperature": 0.6,
        "top_p": 1.0,
        "reasoning_effort": "low",
        "min_completion_tokens": 0,
        "keep_truncated": False,
    }
    assert settings.fingerprint(content) == "8757a91b26501a63"


def test_distributions_travel_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and promptmill.toml take distributions; the content holds the text, and gives the same draws again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "promptmill.toml").write_text('top_p = "0.8..1"\nseed = 42\n', encoding="utf-8")
    monkeypatch.setenv("MILL_TEMPERATURE", "0.6..1.0")
    read = settings.load(GenerationSettings, reasoning_effort=EFFORTS)
    assert read.content() == {
        "max_tokens": 8192,
        "temperature": "0.6..1.0",
        "top_p": "0.8..1.0",
        "reasoning_effort": EFFORTS,
        "seed": 42,
        "min_completion_tokens": 0,
        "keep_truncated": False,
    }
    carried = settings.generation_from_content(read.content())
    assert carried.content() == read.content()
    expected = {"max_tokens": 8192, "temperature": 0.9037, "top_p": 0.9365, "reasoning_effort": "medium"}
    assert carried.sampling("a") == read.sampling("a") == expected


def test_extra_body_wins_over_a_draw() -> None:
    """A field of extra_body is sent as it is given, as it was before."""
    read = settings.load(GenerationSettings, temperature="0..1", extra_body={"temperature": 3})
    assert read.sampling("a")["temperature"] == 3
