"""What several commands open before their work: the broker, a dataset's folder, the console."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import types
from collections.abc import Iterator

from app import broker, settings
from app.broker import BrokerUrl, Client
from app.errors import UsageError
from app.ledger import Ledger
from app.places import dataset_folder
from app.queue import Queue
from app.settings import StoreSettings


@dataclasses.dataclass(frozen=True)
class Bench:
    """An open connection to Redis and the place of the files."""

    url: BrokerUrl
    client: Client
    books: Queue
    store: StoreSettings

    def ledger(self, dataset: str, *, create: bool = False) -> Ledger:
        """Open a dataset's folder.

        Raises UsageError when it does not exist and is not to be created.
        """
        return open_ledger(self.store, dataset, create=create)


def open_ledger(store: StoreSettings, dataset: str, *, create: bool = False) -> Ledger:
    """Open a dataset's folder.

    Raises UsageError when it does not exist and is not to be created.
    """
    folder = dataset_folder(store.prepared_dir, dataset)
    if not create and not folder.path.is_dir():
        raise UsageError(
            f"There is no dataset {dataset!r} in {store.prepared_dir}; producer status lists those that exist."
        )
    return Ledger.open(folder)


def open_bench(*, check: bool = True) -> Bench:
    """Connect to Redis.

    Raises SettingError, or BrokerError when it cannot be used (with `check`).
    """
    warn_of_unknown_settings()
    at, store = settings.load(settings.BrokerSettings), settings.load(settings.StoreSettings)
    url = broker.resolve(at, store)
    client = broker.connect(url)
    if check:
        broker.check(url)
    return Bench(url, client, Queue(client, at.keys), store)


def warn_of_unknown_settings() -> None:
    """Tell of MILL_ variables that have no effect."""
    for sentence in settings.unknown_variables():
        note(sentence)


def say(line: str) -> None:
    """Write a line of results to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(sentence: str) -> None:
    """Write a remark to standard error."""
    sys.stderr.write(f"producer: {sentence}\n")
    sys.stderr.flush()


class Interruption:
    """Whether Ctrl-C was pressed; a second one ends the command at once."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self) -> bool:
        """Tell whether it came."""
        return self.came

    def _on_signal(self, _number: int, _frame: types.FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextlib.contextmanager
def interruption() -> Iterator[Interruption]:
    """Turn the first Ctrl-C or SIGTERM into a flag, so that work stops between two steps and not inside one."""
    flag = Interruption()
    before = {number: signal.signal(number, flag._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}  # noqa: SLF001
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
