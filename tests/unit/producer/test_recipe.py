"""Recipes: what they may say, which mistakes are told, and that the example is the run that it says it is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.errors import UsageError
from producer import presets, recipe
from producer.dedupe import Dedupe

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "eagle3-8-datasets.toml"
SMALL = ROOT / "tests" / "fixtures" / "recipe-small.toml"

GOOD = '[[dataset]]\nname = "a"\nsource = "a.jsonl"\n'


def written(folder: Path, text: str) -> Path:
    """Write a recipe and return its path."""
    path = folder / "r.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "r.toml has no dataset; begin one with [[dataset]]."),
        ("a = ", "r.toml is not TOML: Invalid value (at end of document)."),
        ("[setings]\n" + GOOD, "r.toml: there is no key 'setings'; did you mean settings?"),
        (
            "[settings]\nmax_token = 5\n" + GOOD,
            "r.toml, [settings]: there is no generation setting 'max_token'; did you mean max_tokens?",
        ),
        (
            "[settings]\ntop_p = 3\n" + GOOD,
            "r.toml, [settings]: top_p cannot be used: 3 is out of bounds: it must be above 0",
        ),
        ("settings = 5\n" + GOOD, "r.toml, settings: expected `object`, got `int`."),
        (GOOD + "limt = 5", "r.toml, [[dataset]] 1 (a): there is no key 'limt'; did you mean limit?"),
        (GOOD + "limit = 0", "r.toml, [[dataset]] 1 (a), limit: expected `int` >= 1."),
        (GOOD + 'limit = "5"', "r.toml, [[dataset]] 1 (a), limit: expected `int | null`, got `str`."),
        (GOOD + "weight = -1", "r.toml, [[dataset]] 1 (a), weight: expected `float` > 0.0."),
        (GOOD + 'dedupe = "some"', "invalid enum value 'some'; it is one of exact, near, none."),
        (GOOD + 'adapter = "shargpt"', "r.toml, dataset 'a': There is no adapter 'shargpt' (did you mean sharegpt?)"),
        (GOOD + 'filter = "lang"', "r.toml, dataset 'a': --filter 'lang'"),
        (GOOD + 'columns = { promt = "q" }', "r.toml, dataset 'a': --columns 'promt=q' cannot be used"),
        (GOOD + 'revision = "main"', "r.toml, dataset 'a': revision is for sources on the hub alone."),
        (GOOD + "settings = { temperature = -1 }", "r.toml, dataset 'a': temperature cannot be used"),
        (GOOD + "settings = { temprature = 1 }", "[[dataset]] 1 (a), settings: there is no generation setting"),
        (GOOD + GOOD, "r.toml, [[dataset]] 2: the name 'a' is taken by an earlier one"),
        ('[[dataset]]\nname = "a"', "r.toml, [[dataset]] 1 (a): it needs a source."),
        ('[[dataset]]\nsource = "a"', "r.toml, [[dataset]] 1: it needs a name."),
        ('[dataset]\nname = "a"', "r.toml: each dataset is a table of its own that begins with [[dataset]]."),
        ('[[dataset]]\nname = "a.hidden"\nsource = "x"', "r.toml, [[dataset]] 1: 'a.hidden' cannot be the name"),
        (
            '[[dataset]]\nname = "a"\nsource = "gsm8k@x"\nrevision = "y"',
            "r.toml, dataset 'a': the source has a revision already; drop one.",
        ),
        (
            GOOD + '[[export]]\nformat = "openai"\noutput = "x.jsonl"\ndatasets = ["b"]',
            "r.toml, [[export]] 1: there is no dataset 'b' in the recipe; known are a.",
        ),
        (GOOD + '[export]\noutput = "x.jsonl"', "r.toml, [[export]] 1 (x.jsonl): it needs a format."),
    ],
)
def test_mistakes_are_told(tmp_path: Path, text: str, told: str) -> None:
    """Whatever is unknown, missing or of the wrong kind is one sentence with file, table and key."""
    with pytest.raises(UsageError) as raised:
        recipe.load(written(tmp_path, text))
    assert told in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are no text are told as such."""
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    for name, told in (("no.toml", "There is no recipe"), (".", "is a folder"), ("b.toml", "is not TOML")):
        with pytest.raises(UsageError, match=told):
            recipe.load(tmp_path / name)


def test_settings_are_shared_and_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset's own settings go before the shared ones, and those before the environment."""
    monkeypatch.setenv("MILL_TOP_P", "0.5")
    monkeypatch.setenv("MILL_TOP_K", "7")
    text = '[settings]\ntop_p = 0.9\ntemperature = 0.6\nsystem = "shared"\n'
    text += (
        GOOD + 'system = "own"\nsettings = { temperature = 0.2, chat_template_kwargs = { enable_thinking = true } }\n'
    )
    text += GOOD.replace('"a"', '"b"')
    first, second = recipe.load(written(tmp_path, text)).plan()
    own = first.generation

    assert (own.top_p, own.top_k, own.temperature, own.system) == (0.9, 7, 0.2, "own")
    assert own.chat_template_kwargs == {"enable_thinking": True}
    assert first.reading.system == "own"
    assert (second.generation.temperature, second.reading.system) == (0.6, "shared")


def test_sources_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the recipe; a file beside it goes before a preset, one in the current folder does not."""
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    beside.mkdir()
    elsewhere.mkdir()
    (beside / "alpaca").mkdir()
    (elsewhere / "gsm8k").write_text("")
    sources = [
        "rows.jsonl",
        "../up",
        "/abs.jsonl",
        "hf:org/name",
        "hf:./saved",
        "alpaca",
        "toolace",
        "gsm8k",
        "glaive-v3",
    ]
    text = "".join(f'[[dataset]]\nname = "d{n}"\nsource = "{source}"\n' for n, source in enumerate(sources))
    text += '[[dataset]]\nname = "r"\nsource = "toolace"\nrevision = "v1"\n'
    text += '[[dataset]]\nname = "h"\nsource = "hf:org/name:c/s"\nrevision = "v1"\n'
    path = written(beside, text)
    monkeypatch.chdir(elsewhere)
    found = [planned.reading.source for planned in recipe.load(Path(os.path.relpath(path))).plan()]

    assert [os.path.normpath(one) if one.startswith("/") else one for one in found] == [
        *(str(beside / "rows.jsonl"), str(tmp_path / "up"), "/abs.jsonl", "hf:org/name", f"hf:{beside}/saved"),
        *(str(beside / "alpaca"), "toolace", "hf:openai/gsm8k:main/train", "glaive-v3"),
        *("toolace@v1", "hf:org/name:c/s@v1"),
    ]


def test_a_part_of_a_recipe(tmp_path: Path) -> None:
    """--only and --limit-scale choose and scale; what cannot be chosen or scaled is told."""
    text = GOOD + "limit = 250\n" + GOOD.replace('"a"', '"b"')
    loaded = recipe.load(written(tmp_path, text))

    assert [one.name for one in loaded.plan()] == ["a", "b"]
    assert [one.reading.limit for one in loaded.plan(["a"], limit_scale=0.01)] == [2]
    assert [one.reading.limit for one in loaded.plan(["a"], limit_scale=1e-9)] == [1]
    for only, scale, told in (
        (["c"], None, "has no dataset 'c'; known are a, b"),
        (["b"], 0.1, "dataset 'b': it has no limit that --limit-scale could scale"),
        ([], 0.0, "--limit-scale 0.0 cannot be used"),
        ([], float("nan"), "--limit-scale nan cannot be used"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            loaded.plan(only, limit_scale=scale)


def test_the_example_is_the_run_that_it_says() -> None:
    """Eight datasets of real presets, 88,088 prompts by their limits, and weights that end them together."""
    loaded = recipe.load(EXAMPLE)
    plan = loaded.plan()

    assert [one.name for one in plan] == [
        *("functions", "code", "reasoning", "chat", "math", "agents", "multi-turn", "mix"),
    ]
    limits = [one.reading.limit or 0 for one in plan]
    assert sum(limits) == 88_088
    assert [one.weight * 1000 for one in plan] == pytest.approx(limits)
    for one in plan:
        choice = presets.find(one.reading.source)
        assert choice is not None
        told = EXAMPLE.read_text(encoding="utf-8").split(f'name = "{one.name}"')[0].rpartition("[[dataset]]")[2]
        assert choice.preset.licence.partition(";")[0] in told
        assert (one.generation.min_completion_tokens, one.generation.max_tokens) == (50, 8192)
    assert [export.format for export in loaded.exports] == ["tokens", "vocab"]


def _without(table: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(table).items() if name not in names}


def test_the_small_recipe_is_the_example_scaled_down() -> None:
    """What CI runs end to end differs from the example in sources, limits and the model's vocabulary alone."""
    example, small = recipe.load(EXAMPLE), recipe.load(SMALL)

    assert small.settings == example.settings
    for one, other in zip(small.datasets, example.datasets, strict=True):
        assert _without(one, "source", "limit") == _without(other, "source", "limit")
    for export, model in zip(small.exports, example.exports, strict=True):
        assert _without(export, "vocab_size") == _without(model, "vocab_size")


def test_the_page_explains_every_key() -> None:
    """docs/recipes.md has one line for each key of a dataset and of an export, and shows a recipe that loads."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for heading, struct in (("A dataset", recipe.Dataset), ("Exports", recipe.Export)):
        section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        documented = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
        assert documented == list(struct.__struct_fields__)
    for word in Dedupe:
        assert f"`{word}`" in page


def test_the_shown_recipe_loads(tmp_path: Path) -> None:
    """The recipe in docs/recipes.md is one."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    shown = page.partition("```toml\n")[2].partition("```")[0]
    plan = recipe.load(written(tmp_path, shown)).plan()

    assert [(one.name, one.weight, one.generation.temperature) for one in plan] == [
        ("functions", 3, 0.6),
        ("support", 1, 0.2),
    ]
    assert plan[1].reading.columns == "prompt=question,id=uid"
    trial = recipe.load(written(tmp_path, shown)).plan(limit_scale=0.01)
    assert [one.reading.limit for one in trial] == [120, 20]
