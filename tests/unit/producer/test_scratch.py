"""What a pass has to remember lies in a temporary file, and a folder without room for it is one sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.errors import DiskFullError
from app.records import Kind
from app.verdict import Rules
from producer.judgements import Judgements
from producer.scan import Scan, Waits
from tests.support.folders import largest_file
from tests.unit.producer.test_reclassify import answer

_LONG = 2000
"""Characters of an id; with so many of them few ids are more than SQLite keeps in memory."""
_IDS = [f"{number:0{_LONG}}" for number in range(20_000)]
_LARGEST = 2**20


def _scan() -> None:
    with Scan() as found:
        found.note_waiting(_IDS, Waits.QUEUED)


def _judge() -> None:
    line = answer("ID", 9, rules=Rules(min_completion_tokens=10)).line
    with Judgements("d", Rules()) as judgements:
        for id_ in _IDS:
            judgements.take(Kind.REJECTED, line.replace(b'"ID"', f'"{id_}"'.encode(), 1))


@pytest.mark.parametrize(("work", "command"), [(_scan, "verify"), (_judge, "reclassify")])
def test_a_full_temporary_folder_is_one_sentence(work: Callable[[], None], command: str) -> None:
    """Where the temporary file cannot grow, the user learns whose it is and what to do, not what SQLite says alone."""
    with largest_file(_LARGEST), pytest.raises(DiskFullError, match=rf"file of {command} cannot grow .* SQLITE_TMPDIR"):
        work()
