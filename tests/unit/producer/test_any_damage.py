"""Files of records after any damage: what is whole stays, and not a byte is lost."""

from __future__ import annotations

import base64
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from app.ledger import Ledger
from app.places import DatasetFolder, Keys
from app.queue import Queue
from app.records import Kind
from tests.support.folders import fresh_picture, picture
from tests.support.jsonl_check import parse_strict
from tests.support.redis_server import absent_redis
from tests.support.repairs import begin, mend, quarantined, record_line

_ABSENT = Queue(absent_redis(), Keys("x:"))
_SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  spares the disk thousands of fsyncs

_damages = st.lists(
    st.tuples(st.sampled_from(["flip", "nuls", "newline", "torn", "interleave"]), st.randoms(use_true_random=False)),
    max_size=4,
)


class Pile:
    """Lines of a file, each a record's bytes with or without its end, and whether the record is whole."""

    def __init__(self, count: int) -> None:
        self.parts: list[tuple[bytes, bool]] = []
        for number in range(count):
            self.parts += [(record_line(number)[:-1], True), (b"\n", False)]

    @property
    def data(self) -> bytes:
        """The file."""
        return b"".join(data for data, _whole in self.parts)

    def whole(self) -> list[bytes]:
        """Return the records that nobody has touched, in order.

        One on a last line that has no end counts if it stands there alone, or with NULs behind it: whoever writes next
        cannot wait for a repair to look closer.
        """
        cut = max((number + 1 for number, (data, _whole) in enumerate(self.parts) if data.endswith(b"\n")), default=0)
        tail = self.parts[cut:]
        alone = tail and tail[0][1] and not b"".join(data for data, _whole in tail[1:]).strip(b"\0")
        return [data for data, whole in [*self.parts[:cut], *(tail[:1] if alone else [])] if whole]

    def hurt(self, damage: str, rng: random.Random) -> None:
        """Do one damage to it."""
        place = rng.randrange(len(self.parts) + 1)
        if damage == "nuls":
            self.parts.insert(place, (bytes(rng.randrange(1, 900)), False))
        elif damage == "torn":
            line = record_line(rng.randrange(900, 999))
            self.parts.insert(place, (line[: rng.randrange(1, len(line) - 1)], False))
        elif damage == "interleave":
            self.parts.insert(place, (interleaved(rng), False))
        elif self.parts and damage == "newline":
            self.parts = [part for number, part in enumerate(self.parts) if number != place or part[0] != b"\n"]
        elif self.parts:
            place = rng.randrange(len(self.parts))
            data = bytearray(self.parts[place][0])
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            self.parts[place] = bytes(data), False

    def cut(self, length: int) -> None:
        """Cut the file after that many bytes."""
        kept = []
        for data, whole in self.parts:
            kept.append((data[:length], whole and length >= len(data)))
            length = max(0, length - len(data))
        self.parts = [part for part in kept if part[0]]


def interleaved(rng: random.Random) -> bytes:
    """Return what two writers leave that write at once without a lock and die."""
    lines = [record_line(rng.randrange(700, 800))[:-1], record_line(rng.randrange(800, 900))[:-1]]
    out = bytearray()
    while all(lines):
        which = rng.randrange(2)
        size = rng.randrange(1, 1 + max(1, len(lines[which]) // 2))
        out += lines[which][:size]
        lines[which] = lines[which][size:]
    return bytes(out)


def is_within(part: Sequence[bytes], whole: Sequence[bytes]) -> bool:
    """Tell whether the lines stand in the others, in that order."""
    rest: Iterator[bytes] = iter(whole)
    return all(line in rest for line in part)


def bytes_of(*pieces: bytes) -> Counter[int]:
    """Count the bytes that carry something: newlines end lines, and NULs are counted by their number alone."""
    found = Counter(b"".join(pieces))
    del found[0x0A], found[0]
    return found


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 4), damages=_damages, cut=st.none() | st.floats(0, 1))
def test_any_damage_mends_to_the_whole_records(
    count: int, damages: list[tuple[str, random.Random]], cut: float | None
) -> None:
    """Cut, flipped, glued, interleaved or filled with NULs, a file mends to its whole records, and the rest is kept."""
    pile = Pile(count)
    for damage, rng in damages:
        pile.hurt(damage, rng)
    if cut is not None:
        pile.cut(int(cut * len(pile.data)))
    folder = DatasetFolder(Path(tempfile.mkdtemp(dir=_SHM)))
    try:
        with Ledger.open(folder) as ledger:
            begin(ledger)
            path = folder.lines(Kind.ACCEPTED)
            path.write_bytes(pile.data)
            mend(_ABSENT, ledger)

            kept = path.read_bytes()
            assert not kept or kept.endswith(b"\n")
            lines = kept.split(b"\n")[:-1]
            assert is_within(pile.whole(), lines)
            for line in lines:
                assert parse_strict(line)["dataset"] == "d"
            aside = [data for _file, _at, data, _why in quarantined(folder)] + torn(folder)
            assert bytes_of(kept, *aside) == bytes_of(pile.data)
            assert picture(ledger) == fresh_picture(folder)
            assert (ledger.bad_lines(), ledger.duplicates()) == ([], 0)
            mend(_ABSENT, ledger)
            assert path.read_bytes() == kept
    finally:
        shutil.rmtree(folder.path)


def torn(folder: DatasetFolder) -> list[bytes]:
    """Return what was cut off the file's end."""
    if not folder.torn.exists():
        return []
    entries = [json.loads(line) for line in folder.torn.read_bytes().splitlines()]
    return [base64.b64decode(entry["base64"]) for entry in entries if entry["base64"] is not None]
