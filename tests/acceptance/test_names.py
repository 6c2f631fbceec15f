"""Dataset names as people type them, each in one folder of its own below the prepared folder."""

from __future__ import annotations

import pytest

from tests.conftest import ModelServerFactory
from tests.support.mill import Mill

GOOD = ["org/name", "../../up", "/root", "two words", "имя", "..", "CON", "-rf", "Upper", "upper"]
BAD = ["", "   ", "x" * 300, "tab\tbed", "line\nbreak"]


def test_every_name_has_its_own_folder(mill: Mill, model_server: ModelServerFactory) -> None:
    """Each name gets one folder, shared with no other even where case is ignored, and status lists it as given."""
    model_server()
    path = mill.write_rows(["one", "two"])
    around = {entry.name for entry in mill.path.iterdir()} | {"prepared", "logs"}
    for name in GOOD:
        mill.run("enqueue", str(path), "--dataset", name)
    folders = [entry.name for entry in mill.prepared.iterdir()]
    assert len(folders) == len({name.lower() for name in folders}) == len(GOOD)
    assert {entry.name for entry in mill.path.iterdir()} <= around, "nothing beside the prepared folder"
    mill.worker()
    for name in GOOD:
        mill.wait_recorded(2, name)
    document = mill.status()
    assert set(document["datasets"]) == set(GOOD)
    shown = mill.run("status").stdout
    for name in GOOD:
        assert f"{name}   done" in shown
    mill.run("verify")
    mill.run("verify", "--", "-rf")


@pytest.mark.parametrize("name", BAD, ids=["empty", "blank", "long", "tab", "newline"])
def test_names_that_are_refused(mill: Mill, name: str) -> None:
    """A name that cannot be used is refused in one sentence, and nothing is written."""
    told = mill.enqueue(["x"], dataset=name, expect=2)
    assert "dataset" in told.stderr
    assert told.stderr.count("\n") == 1
    assert not mill.prepared.exists()
