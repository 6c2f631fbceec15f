"""Every path under the prepared folder and every Redis key, on one page."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import unicodedata
from pathlib import Path

from app.errors import UsageError
from app.records import Kind, filename_safe

MAX_DATASET_NAME_BYTES = 200

FILE_OF_KIND = {
    Kind.REFUSED: "refused.jsonl",
    Kind.PENDING: "samples.jsonl",
    Kind.FAILED: "failures.jsonl",
    Kind.REJECTED: "rejected.jsonl",
    Kind.ACCEPTED: "raw_responses.jsonl",
}
"""The append-only files of a dataset folder, and what a line in each says of its id."""


@functools.lru_cache(maxsize=4096)
def folder_name(dataset: str) -> str:
    """Return the one folder name of a dataset; no two names share one, not even on a case-insensitive disk.

    A name of a-z 0-9 . _ - (not starting with . or -) is its own folder. Any other name becomes its safe
    characters, `~` and eight hex digits of its SHA-256.

    Raises UsageError for a name that is empty, too long, or holds control characters.
    """
    if not dataset.strip():
        raise UsageError("A dataset needs a name that is not empty; give one with --dataset NAME.")
    if len(dataset.encode("utf-8", "surrogatepass")) > MAX_DATASET_NAME_BYTES:
        raise UsageError(f"The dataset name is longer than {MAX_DATASET_NAME_BYTES} bytes; choose a shorter one.")
    if any(unicodedata.category(char) in {"Cc", "Cs"} for char in dataset):
        raise UsageError(f"The dataset name {dataset!r} holds control characters; choose a printable one.")
    safe = filename_safe(dataset)
    plain = safe == dataset and safe == safe.lower() and safe[0] not in ".-"
    if plain and safe not in _DEVICE_NAMES:
        return safe
    digest = hashlib.sha256(dataset.encode("utf-8")).hexdigest()[:8]
    return f"{safe.lower().lstrip('-.') or '_'}~{digest}"


_DEVICE_NAMES = frozenset({"con", "nul", "aux", "prn"})


@dataclasses.dataclass(frozen=True)
class DatasetFolder:
    """The paths of one dataset: `prepared/<dataset>/...`."""

    path: Path

    @property
    def manifest(self) -> Path:
        """Where the prompts came from and every setting that changes content."""
        return self.path / "manifest.json"

    @property
    def index(self) -> Path:
        """The rebuildable SQLite index of the JSONL files."""
        return self.path / "index.sqlite"

    @property
    def lock(self) -> Path:
        """The file that writers of this folder flock."""
        return self.path / ".lock"

    @property
    def torn(self) -> Path:
        """Bytes cut off a torn tail."""
        return self.path / "torn.jsonl"

    @property
    def progress(self) -> Path:
        """The latest snapshot, replaced atomically."""
        return self.path / "progress.json"

    @property
    def progress_log(self) -> Path:
        """One appended snapshot per interval."""
        return self.path / "progress.jsonl"

    def lines(self, kind: Kind) -> Path:
        """Return the append-only file whose lines say `kind`."""
        return self.path / FILE_OF_KIND[kind]


def dataset_folder(prepared: Path, dataset: str) -> DatasetFolder:
    """Return the paths of `dataset` under the prepared folder."""
    return DatasetFolder(prepared / folder_name(dataset))


@dataclasses.dataclass(frozen=True)
class StateDir:
    """The paths of the local services: `.promptmill/...`."""

    path: Path

    @property
    def broker(self) -> Path:
        """What is known of the embedded Redis-compatible server: url, pid, run id."""
        return self.path / "broker.json"

    @property
    def services(self) -> Path:
        """What is known of the local workers and Flower."""
        return self.path / "services.json"

    @property
    def logs(self) -> Path:
        """The folder of the background processes' logs."""
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        """The file that `up`, `scale` and `down` flock."""
        return self.path / ".lock"


@dataclasses.dataclass(frozen=True)
class Keys:
    """Every Redis key, behind one prefix. Dataset keys use the dataset's folder name.

    key                        type    meaning
    <p>datasets                hash    dataset name -> folder name
    <p>paused                  hash    dataset name -> why it is paused
    <p>settings:<d>            hash    fingerprint -> generation settings as JSON; `current` -> fingerprint
    <p>prompts:<d>             hash    sample id -> payload (Sample as JSON) of what is still to do
    <p>flights:<d>             hash    sample id -> "owner|unix seconds" of the worker that is asking it
    <p>again:failed:<d>        set     ids in prompts that are on disk as failed (so they are not counted twice)
    <p>again:rejected:<d>      set     the same for rejected ones
    <p>deaths:<d>              hash    sample id -> how many owners died while asking it
    <p>crashes:<d>             hash    sample id -> unexpected errors while it was asked
    <p>rates:<d>               hash    "<unix second>:<kind>" -> samples, "<unix second>:tokens" -> output tokens
    <p>session:<d>             string  unix seconds at which the present run of work began
    <p>worker:<owner>          string  heartbeat as JSON, expires
    <p>workers                 set     owners that have sent a heartbeat
    <p>permits:<endpoint>      hash    owner -> "held|wanted|expiry" of requests in flight
    <p>endpoints               set     names of the endpoints that workers have used
    <p>endpoint:<endpoint>     hash    state, since, reason, url: the shared breaker
    <p>probe:<endpoint>        string  the worker whose turn it is to probe; expires
    <p>turn:<name>             string  who does a periodic duty (sweep, progress); expires
    <p>mill.<d>                list    Celery's queue of tickets (kombu)
    <p>unacked, unacked_index  hash, zset   Celery's deliveries not yet acked (kombu)
    """

    prefix: str = "mill:"

    @property
    def datasets(self) -> str:
        """Hash: dataset name -> folder name."""
        return f"{self.prefix}datasets"

    @property
    def paused(self) -> str:
        """Hash: dataset name -> why it is paused."""
        return f"{self.prefix}paused"

    @property
    def unacked(self) -> str:
        """Hash of kombu: delivery tag -> message."""
        return f"{self.prefix}unacked"

    @property
    def workers(self) -> str:
        """Set: owners that have sent a heartbeat."""
        return f"{self.prefix}workers"

    def settings(self, dataset: str) -> str:
        """Hash: fingerprint -> settings."""
        return f"{self.prefix}settings:{folder_name(dataset)}"

    def prompts(self, dataset: str) -> str:
        """Hash: sample id -> payload."""
        return f"{self.prefix}prompts:{folder_name(dataset)}"

    def flights(self, dataset: str) -> str:
        """Hash: sample id -> owner and start."""
        return f"{self.prefix}flights:{folder_name(dataset)}"

    def again(self, dataset: str, kind: Kind) -> str:
        """Set: ids being asked again that are on disk as failed or rejected."""
        return f"{self.prefix}again:{kind}:{folder_name(dataset)}"

    def deaths(self, dataset: str) -> str:
        """Hash: sample id -> owners that died while asking it."""
        return f"{self.prefix}deaths:{folder_name(dataset)}"

    def crashes(self, dataset: str) -> str:
        """Hash: sample id -> unexpected errors while it was asked."""
        return f"{self.prefix}crashes:{folder_name(dataset)}"

    def rates(self, dataset: str) -> str:
        """Hash: per-second tallies."""
        return f"{self.prefix}rates:{folder_name(dataset)}"

    def session(self, dataset: str) -> str:
        """When the present run of work began."""
        return f"{self.prefix}session:{folder_name(dataset)}"

    def worker(self, owner: str) -> str:
        """A worker's heartbeat."""
        return f"{self.prefix}worker:{owner}"

    def permits(self, endpoint: str) -> str:
        """Hash: owner -> leased permits."""
        return f"{self.prefix}permits:{endpoint}"

    @property
    def endpoints(self) -> str:
        """Set: names of the endpoints that workers have used."""
        return f"{self.prefix}endpoints"

    def endpoint(self, endpoint: str) -> str:
        """The shared breaker."""
        return f"{self.prefix}endpoint:{endpoint}"

    def probe(self, endpoint: str) -> str:
        """Whose turn it is to probe."""
        return f"{self.prefix}probe:{endpoint}"

    def turn(self, name: str) -> str:
        """Whose turn a periodic duty is."""
        return f"{self.prefix}turn:{name}"

    def queue(self, dataset: str) -> str:
        """Return the list that kombu keeps for the dataset's queue."""
        return f"{self.prefix}{queue_name(dataset)}"


def queue_name(dataset: str) -> str:
    """Return the name of the dataset's Celery queue."""
    return f"mill.{folder_name(dataset)}"


def public_url(url: str) -> str:
    """Return a URL without user and password."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def endpoint_name(url: str) -> str:
    """Return a short stable name for an endpoint's base URL, for Redis keys and logs; it holds no credentials."""
    host = public_url(url).partition("://")[2]
    return f"{filename_safe(host)[:40]}-{hashlib.sha256(url.encode()).hexdigest()[:6]}"
