"""A dataset folder's memory after commits, crashes, edits by hand and repairs in any order."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from app.ledger import Ledger, Pen
from app.places import DatasetFolder, Keys
from app.queue import Queue
from app.records import Kind
from tests.support.folders import fresh_picture, pen, picture
from tests.support.redis_server import absent_redis
from tests.support.repairs import begin, mend

_ABSENT = Queue(absent_redis(), Keys("x:"))
_ids = st.sampled_from(["a", "b", "c", "d", "e"])
_pens = st.builds(
    pen,
    _ids,
    st.sampled_from([Kind.ACCEPTED, Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED, Kind.PENDING]),
    reason=st.sampled_from(["timeout", "empty"]),
    round_=st.integers(0, 2),
    tokens=st.integers(0, 5),
)


class LedgerMachine(RuleBasedStateMachine):
    """Commits, crashes, damage and repairs in any order leave an index that equals a new one."""

    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  spares the disk thousands of fsyncs
        self.path = Path(tempfile.mkdtemp(dir=base))
        self.folder = DatasetFolder(self.path)
        self.ledger = Ledger.open(self.folder)
        begin(self.ledger)
        self.recorded: set[str] = set()
        """Ids with an accepted line that nobody has cut since."""

    @rule(pens=st.lists(_pens, max_size=4))
    def commit(self, pens: list[Pen]) -> None:
        """Write lines as the recorder does."""
        new = self.ledger.commit(pens).new
        known = self.ledger.look_up([line.id for line in pens])
        assert set(known) == {line.id for line in pens}
        accepted = {line.id for line, written in zip(pens, new, strict=True) if written and line.kind is Kind.ACCEPTED}
        assert not accepted & self.recorded
        self.recorded |= accepted
        assert all(known[line.id].kind is Kind.ACCEPTED for line in pens if line.id in self.recorded)

    @rule(line=_pens)
    def crash_before_the_index(self, line: Pen) -> None:
        """Append a line and die before it is indexed."""
        self.ledger.catch_up()
        with self.folder.lines(line.kind).open("ab") as file:
            file.write(line.line)

    @rule(line=_pens, data=st.data(), nuls=st.integers(0, 3))
    def crash_inside_the_write(self, line: Pen, data: st.DataObject, nuls: int) -> None:
        """Append a piece of a line and die."""
        self.ledger.catch_up()
        with self.folder.lines(line.kind).open("ab") as file:
            file.write(line.line[: data.draw(st.integers(1, len(line.line) - 1))] + b"\0" * nuls)

    @rule(kind=st.sampled_from(Kind))
    def spoil_a_line(self, kind: Kind) -> None:
        """Append a whole line that is no record."""
        self.ledger.catch_up()
        with self.folder.lines(kind).open("ab") as file:
            file.write(b"{torn and glued}\n")

    @precondition(lambda self: self.folder.lines(Kind.ACCEPTED).exists())
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Cut the file of accepted records at any byte."""
        path = self.folder.lines(Kind.ACCEPTED)
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
        self.recorded.clear()

    @rule(kind=st.sampled_from(Kind), data=st.data())
    def edit_by_hand(self, kind: Kind, data: st.DataObject) -> None:
        """Put the lines of a file into another order, leave some out or double some, in a file that takes its place."""
        path = self.folder.lines(kind)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if not lines:
            return
        path.with_name("edited").write_bytes(b"".join(data.draw(st.lists(st.sampled_from(lines), max_size=6))))
        path.with_name("edited").replace(path)
        self.recorded.clear()

    @rule()
    def rebuild(self) -> None:
        """Make the index anew."""
        self.ledger.rebuild()

    @rule()
    def repair(self) -> None:
        """Mend the files: no line is lost that was its id's, and none is left that is no record or repeats one."""
        self.ledger.catch_up()
        before = self._states()
        mend(_ABSENT, self.ledger)
        assert self._states() == before
        assert (self.ledger.bad_lines(), self.ledger.duplicates()) == ([], 0)
        assert picture(self.ledger) == fresh_picture(self.folder)

    def _states(self) -> dict[str, tuple[Kind, int | None]]:
        """Return what each id is; an accepted one's round decides nothing, and a repeated line may have raised it."""
        return {
            id_: (entry.kind, None if entry.kind is Kind.ACCEPTED else entry.round)
            for id_, entry in self.ledger.entries()
        }

    @rule(all_of_it=st.booleans())
    def lose_the_index(self, all_of_it: bool) -> None:
        """Delete the index, with or without its logs."""
        for path in self.path.glob("index.sqlite*" if all_of_it else "index.sqlite"):
            path.unlink()

    @rule()
    def restart(self) -> None:
        """Go on in a new process."""
        self.ledger.close()
        self.ledger = Ledger.open(self.folder)

    @rule()
    def catch_up(self) -> None:
        """Find an index that equals a new one, and files without a torn tail."""
        self.ledger.catch_up()
        assert picture(self.ledger) == fresh_picture(self.folder)
        for kind in Kind:
            path = self.folder.lines(kind)
            assert not path.exists() or path.read_bytes()[-1:] in {b"", b"\n"}

    def teardown(self) -> None:
        """Check once more and clean up."""
        try:
            self.catch_up()
        finally:
            self.ledger.close()
            shutil.rmtree(self.path)


TestAnyOrder = LedgerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
