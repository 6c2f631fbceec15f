"""The recorded turns of a dataset's conversations, for whoever reads what their records leave out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from app.jsonl import Mending
from app.ledger import Ledger


class TurnLines:
    """Reads the turns beside one dataset's records, by settings and id. Use it as a context manager."""

    def __init__(self, ledger: Ledger) -> None:
        self._folder = ledger.folder
        self._ledgers = dict[str, Ledger | None]()
        self.mended = list[Mending]()
        """Torn tails that were mended when a file was opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for ledger in self._ledgers.values():
            if ledger is not None:
                ledger.close()

    def read(self, settings: str, ids: Sequence[str]) -> list[bytes | None]:
        r"""Return the line of each turn without its `\n`; None where there is none.

        Raises StoreError for a folder that cannot be used.
        """
        ledger = self._ledger(settings) if ids else None
        if ledger is None:
            return [None] * len(ids)
        entries = ledger.look_up(ids)
        return [ledger.read(entries[id_], id_) if id_ in entries else None for id_ in ids]

    def _ledger(self, settings: str) -> Ledger | None:
        if settings not in self._ledgers:
            folder = self._folder.turns(settings)
            found = Ledger(folder) if folder.path.is_dir() else None
            if found is not None:
                self.mended += found.catch_up()
            self._ledgers[settings] = found
        return self._ledgers[settings]
