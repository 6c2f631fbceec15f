"""The family of failures that users see."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from app import errors

_TREE_LINE = re.compile(r"^([│├└─ ]*)(\w+Error)\s")


def _drawn_parents() -> dict[str, str]:
    """Return class -> parent as the module's docstring draws them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := _TREE_LINE.match(line):
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def _real_parents() -> dict[str, str]:
    """Return the same of every class of the family, wherever the product defines it."""
    root = Path(errors.__file__).parents[1]
    classes = {
        node.name: base.id
        for folder in ("app", "workers", "producer")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for base in node.bases[:1]
        if isinstance(base, ast.Name)
    }
    parents = {"MillError": classes["MillError"]}
    while more := {name: base for name, base in classes.items() if base in parents and name not in parents}:
        parents.update(more)
    return parents


def test_tree_in_the_docstring_is_the_real_one() -> None:
    """The tree that people read in the module's docstring shows every class below its true parent."""
    assert _drawn_parents() == _real_parents()


def test_exit_codes() -> None:
    """Wrong usage and settings end a command with 2, all else that goes wrong with 1."""
    assert (errors.EXIT_OK, errors.EXIT_INCOMPLETE, errors.EXIT_USAGE, errors.EXIT_INTERRUPTED) == (0, 1, 2, 130)
    for cls in (errors.UsageError, errors.SettingError, errors.SourceError, errors.ManifestMismatchError):
        assert cls("why").exit_code == 2
    for cls in (errors.BrokerFullError, errors.DiskFullError, errors.IncompleteError):
        assert cls("why").exit_code == 1


def test_message_is_the_whole_text() -> None:
    """An error's text is the sentence it was raised with."""
    assert str(errors.UnwritableError("out cannot be used: Permission denied.")).startswith("out cannot be used")
