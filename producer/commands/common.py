"""What several commands open before their work: the broker, a dataset's folder, the console."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator

from app import broker, setting_checks, settings
from app.broker import BrokerUrl, Client
from app.errors import UsageError
from app.ledger import Ledger
from app.places import dataset_folder
from app.queue import Queue
from app.settings import StoreSettings

_LIVE_EVERY_S = 0.2
_PLAIN_EVERY_S = 10.0
_CLEAR = "\r\x1b[2K"


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

    def for_hanging(self) -> Bench:
        """Return the same with a connection that waits for a second only, for a Redis that did not answer."""
        client = broker.connect_for_command(self.url, hanging=True)
        return dataclasses.replace(self, client=client, books=Queue(client, self.books.keys))


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


@contextlib.contextmanager
def open_bench(*, check: bool = True) -> Iterator[Bench]:
    """Connect to Redis; whatever its client raises meanwhile becomes a one-sentence error.

    Raises SettingError, or BrokerError when Redis cannot be used (with `check`) or stops being usable.
    """
    warn_of_unknown_settings()
    at, store = settings.load(settings.BrokerSettings), settings.load(settings.StoreSettings)
    url = broker.resolve(at, store)
    if check:
        broker.check(url)
    with broker.translated(url), contextlib.closing(broker.connect_for_command(url)) as client:
        yield Bench(url, client, Queue(client, at.keys), store)


def check_settings() -> None:
    """Read every setting of this machine, so that a mistyped one ends a command before it makes or reads anything.

    The settings of generation are left to the command, whose options may stand in for them.
    Raises SettingError.
    """
    for group in settings.GROUPS:
        if group is not settings.GenerationSettings:
            settings.load(group)


def warn_of_unknown_settings() -> None:
    """Tell of MILL_ variables that have no effect."""
    for sentence in setting_checks.unknown_variables():
        note(sentence)


def warn_of_unusable_settings() -> None:
    """Tell of settings whose values end the commands that read them; for commands that go on without them."""
    for sentence in setting_checks.unusable_values():
        note(sentence)


def say(line: str) -> None:
    """Write a line of results to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def note(sentence: str) -> None:
    """Write a remark to standard error."""
    sys.stderr.write(f"producer: {sentence}\n")
    sys.stderr.flush()


class ProgressLine:
    """Progress on standard error: one line that is rewritten in a terminal, a line every 10 s elsewhere."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live = sys.stderr.isatty()
        self._every_s = _LIVE_EVERY_S if self._live else _PLAIN_EVERY_S
        self._next = clock() + (0.0 if self._live else self._every_s)

    def show(self, line: str) -> None:
        """Show the line, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._every_s
        if self._live:
            sys.stderr.write(f"{_CLEAR}{line}")
            sys.stderr.flush()
        else:
            note(line)

    def close(self) -> None:
        """Clear the line."""
        if self._live:
            sys.stderr.write(_CLEAR)
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
