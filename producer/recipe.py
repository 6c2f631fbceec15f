"""A recipe: several datasets, the settings that they share and their exports, in one TOML file.

Every table is checked before anything is read or queued; a mistake is one sentence that names file, table and key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from app import settings
from app.errors import SettingError, UsageError
from app.places import folder_name, refuse_extraction
from app.settings import GenerationSettings
from producer import filters, presets
from producer.adapters import registry, renamed
from producer.dedupe import Dedupe
from producer.formats.hub import PREFIX
from producer.reading import Reading

_AtLeastOne = Annotated[int, Meta(ge=1)]
_Text = Annotated[str, Meta(min_length=1)]


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """A `[[dataset]]` table: one input, and the dataset that it fills."""

    name: _Text
    """The dataset's name, as `--dataset` has it."""
    source: _Text
    """A file or folder relative to the recipe, `hf:org/name[:config][/split][@revision]`, or a preset's name."""
    revision: _Text | None = None
    """The commit, branch or tag of a source on the hub; the same as `@revision` behind it."""
    adapter: _Text | None = None
    """How rows are read; unset: the preset's own, else auto."""
    columns: dict[str, str] | str | None = None
    """Columns by other names: `{ prompt = "question", id = "uid" }`, or as `--columns` has them."""
    filter: list[str] | str = []
    """One condition on rows, or several of which all must hold."""
    shuffle: int | None = None
    """The seed of the rows' order; unset: the source's order."""
    limit: _AtLeastOne | None = None
    """The most rows that are read, of those that the filters leave."""
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    """How many prompts of it are queued for each one of a dataset of weight 1."""
    samples_per_prompt: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How often each prompt is asked."""
    dedupe: Dedupe = Dedupe.EXACT
    """What counts as a repeated prompt: exact, near or none."""
    system: str | None = None
    """A system prompt for samples that have none."""
    drop_system: bool = False
    """Leave the rows' own system prompts out."""
    settings: dict[str, Any] = {}
    """Generation settings that differ from `[settings]`."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """An `[[export]]` table: one `producer export`, with its options by the same names."""

    format: _Text
    """The format, as `--format` has it."""
    output: _Text
    """The file to write, relative to the recipe."""
    datasets: list[str] | None = None
    """Which of the recipe's datasets; unset: all."""
    limit: _AtLeastOne | None = None
    """The most rows."""
    order: str = "completion"
    """completion or id."""
    include: list[str] = []
    """Rejected records too: `["rejected:truncated"]`."""
    split: str | None = None
    """A file for each share: `"train=0.98,validation=0.02"`."""
    shard_size: str | None = None
    """Where a new file begins: rows, or a size such as `"500MB"`."""
    reasoning: str | None = None
    """field, inline or drop."""
    max_length: _AtLeastOne | None = None
    """The longest row in tokens (tokens)."""
    status: bool = False
    """Add a status to each row (specforge)."""
    tools: bool = True
    """false leaves the tools column out (specforge)."""
    vocab_size: _AtLeastOne | None = None
    """The model's vocabulary (vocab, token-freq)."""
    draft_vocab_size: _AtLeastOne | None = None
    """The draft model's vocabulary (vocab)."""
    card: str | None = None
    """A dataset card to write, relative to the recipe."""


class _Tables(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    settings: dict[str, Any] = {}
    dataset: list[Dataset] = []
    export: list[Export] = []


@dataclasses.dataclass(frozen=True)
class Planned:
    """One dataset of a recipe, ready to be opened."""

    name: str
    weight: float
    generation: GenerationSettings
    reading: Reading


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe whose every word is known."""

    path: Path
    settings: Mapping[str, Any]
    datasets: Sequence[Dataset]
    exports: Sequence[Export]

    def chosen(self, only: Sequence[str]) -> list[Dataset]:
        """Return the datasets of those names, in the recipe's order; all for none. Raises UsageError."""
        names = [dataset.name for dataset in self.datasets]
        for name in only:
            if name not in names:
                raise UsageError(f"{self.path} has no dataset {name!r}{_near(name, names)}")
        return [dataset for dataset in self.datasets if not only or dataset.name in only]

    def plan(self, only: Sequence[str] = (), *, limit_scale: float | None = None) -> list[Planned]:
        """Return what is to be read for each dataset, with `limit_scale` for a part of it.

        Raises UsageError where a dataset has no limit to scale, and SettingError.
        """
        if limit_scale is not None and not 0 < limit_scale < math.inf:
            raise UsageError(f"--limit-scale {limit_scale} cannot be used; give a factor above 0, such as 0.01.")
        return [self._planned(dataset, limit_scale) for dataset in self.chosen(only)]

    def _planned(self, dataset: Dataset, limit_scale: float | None) -> Planned:
        limit = dataset.limit
        if limit_scale is not None:
            if limit is None:
                raise UsageError(
                    f"{self.path}, dataset {dataset.name!r}: it has no limit that --limit-scale could scale; give it "
                    "one, or leave it out with --only."
                )
            limit = max(1, round(limit * limit_scale))
        generation = self._generation(dataset)
        source, adapter = self._source(dataset)
        columns = dataset.columns
        reading = Reading(
            source=source,
            adapter=adapter,
            columns=columns if isinstance(columns, str) or columns is None else _pairs(columns),
            filters=(dataset.filter,) if isinstance(dataset.filter, str) else tuple(dataset.filter),
            shuffle=dataset.shuffle,
            limit=limit,
            system=generation.system,
            drop_system=dataset.drop_system,
            dedupe=dataset.dedupe,
            samples_per_prompt=dataset.samples_per_prompt,
        )
        return Planned(dataset.name, dataset.weight, generation, reading)

    def _generation(self, dataset: Dataset) -> GenerationSettings:
        given = {**self.settings, **dataset.settings}
        if dataset.system is not None:
            given["system"] = dataset.system
        try:
            return settings.load(GenerationSettings, **given)
        except SettingError as error:
            variable, separator, rest = str(error).partition(" cannot be used")
            name = variable.removeprefix(settings.ENV_PREFIX).lower()
            if not separator or name not in given:
                raise
            own = name in dataset.settings or (name == "system" and dataset.system is not None)
            where = f"dataset {dataset.name!r}" if own else "[settings]"
            raise SettingError(f"{self.path}, {where}: {name}{separator}{rest}") from error

    def _source(self, dataset: Dataset) -> tuple[str, str | None]:
        """Return the source as it is opened from any folder, and its adapter."""
        source, revision = dataset.source, f"@{dataset.revision}" if dataset.revision else ""
        if source.startswith(PREFIX):
            rest = source.removeprefix(PREFIX)
            if not rest.startswith(("/", ".", "~")):
                return self._revised(dataset, source + revision), dataset.adapter
            source = f"{PREFIX}{self.beside(rest)}"
        elif "://" not in source:
            path = self.beside(source)
            choice = None if path.exists() else presets.find(self._revised(dataset, source + revision))
            if choice is not None and Path(source + revision).exists():
                # A file of the preset's name in the folder that the command runs in is not meant.
                return choice.reference.description, dataset.adapter
            if choice is not None:
                return source + revision, dataset.adapter
            source = source if _is_misspelt(source, path) else str(path)
        if revision:
            raise UsageError(f"{self.path}, dataset {dataset.name!r}: revision is for sources on the hub alone.")
        return source, dataset.adapter

    def _revised(self, dataset: Dataset, source: str) -> str:
        if source.count("@") > 1:
            raise UsageError(f"{self.path}, dataset {dataset.name!r}: the source has a revision already; drop one.")
        return source

    def beside(self, name: str) -> Path:
        """Return a path that the recipe names relative to its own folder."""
        return self.path.resolve().parent / Path(name).expanduser()


def load(path: Path) -> Recipe:
    """Read a recipe. Raises UsageError for everything in it that is unknown, missing or of the wrong kind."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UsageError(f"There is no recipe {path}; examples/eagle3-8-datasets.toml shows how one looks.") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder; name the recipe's .toml file in it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}.") from error
    if isinstance(document.get("export"), dict):
        document["export"] = [document["export"]]
    _check_keys(path, document)
    try:
        tables = msgspec.convert(document, _Tables, strict=True)
    except msgspec.ValidationError as error:
        _refuse_value(path, document, error)
    recipe = Recipe(path, tables.settings, tables.dataset, tables.export)
    _check_names(recipe)
    for planned in recipe.plan():
        _check_reading(path, planned)
    return recipe


def _check_reading(path: Path, planned: Planned) -> None:
    """Refuse conditions, columns and adapters that mean nothing; a function of the user's own is looked for later."""
    reading = planned.reading
    try:
        for text in reading.filters:
            filters.parse(text)
        if reading.columns is not None:
            renamed.parse(reading.columns)
        if reading.adapter is not None and ":" not in reading.adapter:
            registry.choose(reading.adapter)
    except UsageError as error:
        raise UsageError(f"{path}, dataset {planned.name!r}: {error}") from error


def _check_keys(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a key that nothing reads, with the nearest one that something does."""
    _refuse_unknown(f"{path}", "key", document, _fields(_Tables))
    _check_settings(f"{path}, [settings]", document.get("settings"))
    for kind, struct in (("dataset", Dataset), ("export", Export)):
        tables = document.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise UsageError(f"{path}: each {kind} is a table of its own that begins with [[{kind}]].")
        for number, table in enumerate(tables, start=1):
            where = f"{path}, {_table_words(kind, number, table)}"
            _refuse_unknown(where, "key", table, _fields(struct))
            if kind == "dataset":
                _check_settings(f"{where}, settings", table.get("settings"))


def _check_settings(where: str, table: Any) -> None:
    if isinstance(table, dict):
        _refuse_unknown(where, "generation setting", table, GenerationSettings.model_fields)


def _refuse_unknown(where: str, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise UsageError(f"{where}: there is no {what} {name!r}{_near(name, names)}")


def _check_names(recipe: Recipe) -> None:
    """Refuse datasets without a name of their own, and exports of datasets that are not there."""
    if not recipe.datasets:
        raise UsageError(f"{recipe.path} has no dataset; begin one with [[dataset]].")
    names = [dataset.name for dataset in recipe.datasets]
    for number, name in enumerate(names, start=1):
        where = f"{recipe.path}, [[dataset]] {number}"
        try:
            folder_name(name)
            refuse_extraction(name)
        except UsageError as error:
            raise UsageError(f"{where}: {str(error)[0].lower()}{str(error)[1:]}") from error
        if name in names[: number - 1]:
            raise UsageError(f"{where}: the name {name!r} is taken by an earlier one; each dataset needs its own.")
    for number, export in enumerate(recipe.exports, start=1):
        for name in export.datasets or ():
            if name not in names:
                raise UsageError(
                    f"{recipe.path}, [[export]] {number}: there is no dataset {name!r} in the recipe"
                    f"{_near(name, names)}"
                )


_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_TABLE = re.compile(r"(?P<kind>dataset|export)\[(?P<index>\d+)\]\.?(?P<key>.*)")


def _refuse_value(path: Path, document: Mapping[str, Any], error: msgspec.ValidationError) -> NoReturn:
    """Say in one sentence which value does not fit."""
    found = _PLACE.fullmatch(str(error))
    what, place = (found["what"], found["place"] or "") if found else (str(error), "")
    table = _TABLE.fullmatch(place)
    where = f"{path}"
    if table is not None:
        number = int(table["index"]) + 1
        where += f", {_table_words(table['kind'], number, document[table['kind']][number - 1])}"
        place = table["key"]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        raise UsageError(f"{where}: it needs a {missing[1]}.") from error
    if what.startswith("Invalid enum value"):
        what += f"; it is one of {', '.join(Dedupe)}"
    raise UsageError(f"{where}{f', {place}' if place else ''}: {what[0].lower()}{what[1:]}.") from error


def _table_words(kind: str, number: int, table: Mapping[str, Any]) -> str:
    name = table.get("name" if kind == "dataset" else "output")
    return f"[[{kind}]] {number}" + (f" ({name})" if isinstance(name, str) and name else "")


_Table = TypeVar("_Table", bound=msgspec.Struct)


def _fields(struct: type[_Table]) -> tuple[str, ...]:
    return struct.__struct_encode_fields__


def _near(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence on an unknown name."""
    known = list(names)
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}."


def _pairs(columns: Mapping[str, str]) -> str:
    return ",".join(f"{target}={column}" for target, column in columns.items())


def _is_misspelt(source: str, path: Path) -> bool:
    """Tell whether a word is no file anywhere, but close to a preset's name."""
    if "/" in source or "." in source or path.exists() or Path(source).exists():
        return False
    return presets.near(source) is not None
