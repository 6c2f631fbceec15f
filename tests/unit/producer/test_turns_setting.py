"""The setting `turns`: in recipes, in manifests, and never in a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import MillError
from app.settings import GenerationSettings, generation_from_content
from producer import recipe


def _recipe(folder: Path, settings: str) -> Path:
    (folder / "rows.jsonl").write_text('{"prompt": "hi"}\n', encoding="utf-8")
    path = folder / "recipe.toml"
    path.write_text(
        f'[settings]\n{settings}\n[[dataset]]\nname = "a"\nsource = "rows.jsonl"\n'
        '[[dataset]]\nname = "b"\nsource = "rows.jsonl"\nsettings = { turns = "last" }\n',
        encoding="utf-8",
    )
    return path


def test_a_recipe_says_which_turns(tmp_path: Path) -> None:
    """Datasets of a recipe share the setting, and one may differ."""
    planned = recipe.load(_recipe(tmp_path, 'turns = "all"')).plan()
    assert {one.name: one.generation.turns for one in planned} == {"a": "all", "b": "last"}


def test_another_value_is_refused(tmp_path: Path) -> None:
    """What is neither last nor all is refused, and the sentence names the two."""
    with pytest.raises(MillError, match=r"turns .*'last' or 'all'"):
        recipe.load(_recipe(tmp_path, 'turns = "first"')).plan()


def test_the_default_leaves_manifests_as_they_were() -> None:
    """The default is not in a manifest's content, the other value is and comes back, and no server hears of either."""
    assert "turns" not in GenerationSettings().content()
    every = GenerationSettings(turns="all")
    assert every.content() == {**GenerationSettings().content(), "turns": "all"}
    assert generation_from_content(every.content()).turns == "all"
    assert generation_from_content(GenerationSettings().content()).turns == "last"
    assert every.sampling("a") == GenerationSettings().sampling("a")
