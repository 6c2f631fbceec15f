"""The documentation says what the code does: settings, reasons, fields, commands and links."""

from __future__ import annotations

import ast
import enum
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

from app import history, places, records, settings, snapshot, verdict
from app.dashboard import metrics_names
from producer import refusals
from producer.adapters import registry
from producer.cli import cli
from producer.export import formats
from workers import faults

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples")),
    *sorted(DOCS.rglob("*.md")),
]
NOTES = sorted((DOCS / "design").glob("*.md"))

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every table row that begins with one word in backquotes."""
    for line in text.splitlines():
        if re.match(r"\| `[^`]+` \|", line):
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def section(name: str, heading: str) -> str:
    """Return a page's text under a heading, up to the next heading of any level."""
    text = (DOCS / name).read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no section {heading!r}"
    return found.group(1)


def names_in(text: str) -> list[str]:
    """Return the first cells of the table rows, without backquotes."""
    return [cells[0].strip("`") for cells in rows(text)]


def shown(default: Any) -> str:
    """Return a default as the table writes it."""
    if default in {None, ()}:
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_the_settings_page_equals_the_settings_classes() -> None:
    """Every MILL_ variable is in the table once, with its real default, and with a meaning; no other is."""
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    documented = {cells[0].strip("`"): cells[1] for cells in rows(text) if cells[0].startswith("`MILL_")}
    real = {
        settings.ENV_PREFIX + name.upper(): shown(field.default)
        for group in settings.GROUPS
        for name, field in group.model_fields.items()
    }
    assert documented == real
    assert all(cells[-1] for cells in rows(text))
    assert len(names_in(text)) == len(set(names_in(text)))


def test_the_generation_table_names_real_options() -> None:
    """Each generation setting's option exists in `producer enqueue` and has the same name."""
    options = options_of("enqueue")
    table = section("settings.md", "Generation")
    assert names_in(table) == [f"MILL_{name.upper()}" for name in settings.GenerationSettings.model_fields]
    for cells in rows(table):
        option = cells[2].strip("`")
        assert option in options, option
        assert option == "--" + cells[0].strip("`").removeprefix("MILL_").lower().replace("_", "-")


@pytest.mark.parametrize(
    ("name", "heading", "words"),
    [
        ("inputs.md", "Refused rows", refusals.Reason),
        ("files.md", "Why a completion is rejected", verdict.Reason),
        ("files.md", "Why a sample fails", faults.FaultKind),
    ],
)
def test_every_reason_is_explained(name: str, heading: str, words: type[enum.StrEnum]) -> None:
    """The tables of reasons hold exactly the words that the files hold."""
    assert sorted(names_in(section(name, heading))) == sorted(words)


def test_the_record_table_equals_the_record() -> None:
    """The fields of a record are documented in the order in which a line has them."""
    assert names_in(section("files.md", "A record")) == [
        field.encode_name for field in msgspec.structs.fields(records.Record)
    ]


@pytest.mark.parametrize(
    ("heading", "struct"),
    [
        ("The snapshot", snapshot.Snapshot),
        ("A part", snapshot.Part),
        ("Counts", snapshot.Counts),
        ("A rate", snapshot.Rate),
        ("Latency", snapshot.Latency),
        ("Tokens", snapshot.Tokens),
        ("ETA", snapshot.Eta),
        ("An endpoint", snapshot.Endpoint),
        ("A point", history.Point),
    ],
)
def test_the_numbers_for_machines_are_explained(heading: str, struct: type[msgspec.Struct]) -> None:
    """Every field of a snapshot and of a point is documented, and no other is."""
    text = section("status-json.md", heading)
    documented = re.findall(
        r"`(\w+)`", " ".join(line.split(" | ")[0] for line in text.splitlines() if line[:3] == "| `")
    )
    real = [field.encode_name for field in msgspec.structs.fields(struct)]
    config = struct.__struct_config__
    assert sorted(documented) == sorted(real if config.tag_field is None else [config.tag_field, *real])


def test_the_metrics_table_equals_the_metrics() -> None:
    """Every metric stands in the table in the order of the page, with its type, unit, labels and its own help."""
    real = [
        [
            f"`{family.full_name}`",
            family.type.value,
            family.unit or "-",
            ", ".join(f"`{label}`" for label in family.labels) or "-",
            family.meaning,
        ]
        for family in metrics_names.FAMILIES.values()
    ]
    assert list(rows(section("metrics.md", "What they mean"))) == real


def test_the_alerts_table_names_every_alert() -> None:
    """Every rule of deploy/ is explained, and no other."""
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    explained = re.findall(r"`(Promptmill\w+)`", section("metrics.md", "Alerts"))
    assert sorted(explained) == sorted(re.findall(r"alert: (\w+)", text))


def test_the_files_table_names_every_file() -> None:
    """Every file of a dataset folder is in the table."""
    folder = places.DatasetFolder(Path("x"))
    others = (
        folder.manifest,
        folder.index,
        folder.shared_index,
        folder.torn,
        folder.progress,
        folder.progress_log,
        folder.lock,
    )
    others += (folder.quarantine, folder.repair_lock, folder.journal)
    expected = {*places.FILE_OF_KIND.values(), *(path.name for path in others)}
    assert set(names_in(section("files.md", "The dataset folder"))) == expected


def test_adapters_and_formats_are_the_real_ones() -> None:
    """The words that --adapter and --format take are documented, all of them."""
    assert names_in(section("inputs.md", "Row shapes")) == registry.names()
    assert names_in(section("files.md", "Exports")) == list(formats.FORMATS)


def test_the_readme_lists_every_command() -> None:
    """The table of commands holds every command of `producer`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in commands():
        assert re.search(rf"^\| `producer {name}[ `]", text, re.MULTILINE), name


@page
def test_shown_commands_exist(path: Path) -> None:
    """Every `producer` command line in a page names a real command and real options."""
    for line in command_lines(path.read_text(encoding="utf-8")):
        words = shlex.split(line, comments=True)
        name = words[1] if len(words) > 1 else "--help"
        if name in {"--help", "--version", "COMMAND"}:
            continue
        assert name in commands(), line
        used = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert used <= options_of(name), line


@page
def test_shown_make_targets_exist(path: Path) -> None:
    """Every `make TARGET` in a page names a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    shown = re.findall(r"(?:^ *|`)make ((?:[a-z-]+ ?)+)", text, re.MULTILINE)
    assert {target for line in shown for target in line.split()} <= targets


def test_the_figures_name_real_benchmarks() -> None:
    """Every benchmark in the README's table of figures can be run by that name."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Figures")[2].partition("\n## ")[0]
    assert names_in(text)
    for name in names_in(text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), name


@pytest.mark.parametrize("heading", ["Settings and commands", "Redis", "Inputs", "The disk", "Local services"])
def test_explained_messages_are_said(heading: str) -> None:
    """Each message in the tables of trouble has its longest piece of fixed text from the code."""
    said = said_by_the_code()
    for line in section("troubleshooting.md", heading).splitlines():
        cell = line.strip("|").split(" | ")[0] if line.startswith("| ") else ""
        for message in re.findall(r"`([^`]+)`", cell):
            pieces = re.split(r"\.\.\.|\b(?:[A-Z]|URL)\b|[^\w\s/_-]|\d+", message)
            assert max((piece.strip() for piece in pieces), key=len) in said, message


@page
def test_variables_exist(path: Path) -> None:
    """No page mentions a MILL_ variable that is no setting."""
    known = {settings.ENV_PREFIX + name.upper() for group in settings.GROUPS for name in group.model_fields}
    assert set(re.findall(r"MILL_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8"))) <= known


@page
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a page names a file, and where it has an anchor, a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


@page
def test_lines_are_readable_in_a_terminal(path: Path) -> None:
    """Prose is wrapped at 120 columns; only tables and links may be wider."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert len(line) <= 120 or line.startswith("|") or "](" in line, f"line {number}"


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_design_notes_are_short_and_whole(path: Path) -> None:
    """A design note has at most 150 lines and the five sections that every note has."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Why", "Objects and lifetimes", "States and moves", "Crash points", "Rejected alternatives"]


def command_lines(text: str) -> Iterator[str]:
    """Yield the `producer ...` lines of code blocks and of inline code."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", "", block)
        for line in joined.splitlines():
            if found := re.match(r"\s*(?:\$ )?(producer(?: .*)?)$", line):
                yield found.group(1)
    yield from re.findall(r"`(producer [^`\n]+)`", text)


@functools.cache
def said_by_the_code() -> str:
    """Return every piece of text in the packages; an f-string gives one for each part between its values."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8"))
        for package in ("app", "workers", "producer")
        for path in (ROOT / package).rglob("*.py")
    )
    pieces = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    # Quotes inside a quoted message would end it.
    return "\n".join(piece.replace("`", "") for piece in pieces if isinstance(piece, str))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@functools.cache
def commands() -> dict[str, Any]:
    """Return the commands of `producer` by name."""
    group: Any = typer.main.get_command(cli)
    return dict(group.commands)


def options_of(name: str) -> set[str]:
    """Return every spelling of a command's options."""
    parameters = commands()[name].params
    found = {word for parameter in parameters for word in (*parameter.opts, *parameter.secondary_opts)}
    return found | {"--help", "-h"}
