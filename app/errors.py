"""The family of failures that promptmill tells its users about.

MillError                     anything a person should read as one sentence; `exit_code` says how the command ends
├── UsageError                wrong usage or settings (exit 2)
│   ├── SettingError          a setting's value cannot be used
│   ├── SourceError           the input cannot be opened or understood as a whole
│   ├── ManifestMismatchError the dataset was started with other settings
│   └── ParametersRefusedError  the model server would not act on them (workers/caller.py)
├── BrokerError               Redis cannot be used as it is (exit 1)
│   ├── BrokerUnreachableError  nobody answers, or the password is wrong
│   └── BrokerFullError         Redis refuses writes for want of memory
├── StoreError                the dataset folder cannot be used (exit 1)
│   ├── UnwritableError         missing rights, a file in its place, a read-only disk
│   ├── LockedError             somebody holds the folder's lock for too long (app/lock.py)
│   └── DiskFullError           no space left
├── LookFailedError           the model servers could not be looked at (producer/doctor/looking.py; exit 1)
├── ModelUnusableError        a model to read states from cannot be used (workers/extract/model.py; exit 1)
└── IncompleteError           the command ran, but something is incomplete or failed (exit 1)
    └── NothingExportedError    no record passed (producer/export/report.py)

Faults of a single model call are values (`workers.faults.Fault`), not exceptions, until a sample is given up.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INCOMPLETE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class MillError(Exception):
    """Something a person should read as one sentence: what, where and what to do."""

    exit_code = EXIT_INCOMPLETE


class UsageError(MillError):
    """The command or its settings are wrong."""

    exit_code = EXIT_USAGE


class SettingError(UsageError):
    """A setting's value cannot be used."""


class SourceError(UsageError):
    """The input cannot be opened or understood as a whole."""


class ManifestMismatchError(UsageError):
    """The dataset was started with settings that change what a record means."""


class BrokerError(MillError):
    """Redis cannot be used as it is."""


class BrokerUnreachableError(BrokerError):
    """Nobody answers at the Redis URL, or the password is wrong."""


class BrokerFullError(BrokerError):
    """Redis refuses writes because its memory is full."""


class StoreError(MillError):
    """The dataset folder cannot be used."""


class UnwritableError(StoreError):
    """The dataset folder or one of its files cannot be written."""


class DiskFullError(StoreError):
    """The disk that holds the dataset folder has no space left."""


class IncompleteError(MillError):
    """The command ran to its end, but something is incomplete or failed."""
