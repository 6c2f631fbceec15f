"""Every path under the prepared folder and every Redis key, on one page."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import unicodedata
from pathlib import Path

from app.errors import StoreError, UsageError
from app.records import Kind, filename_safe

MAX_DATASET_NAME_BYTES = 200
EXTRACTION_SUFFIX = ".hidden"
"""Ends the name of every dataset whose samples are hidden states, and of no other."""

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
    holds_turns: bool = False
    """Whether its records are single turns of conversations."""

    @property
    def manifest(self) -> Path:
        """Where the prompts came from and every setting that changes content."""
        return self.path / "manifest.json"

    @property
    def index(self) -> Path:
        """The rebuildable SQLite index of the JSONL files."""
        return self.path / "index.sqlite"

    @property
    def shared_index(self) -> Path:
        """The same for a folder that several machines use: one without a write-ahead log."""
        return self.path / "index.shared.sqlite"

    @property
    def lock(self) -> Path:
        """The file that writers of this folder flock."""
        return self.path / ".lock"

    @property
    def torn(self) -> Path:
        """Bytes cut off a torn tail."""
        return self.path / "torn.jsonl"

    @property
    def quarantine(self) -> Path:
        """Bytes that a repair moved out of the files, with the reason."""
        return self.path / "quarantine.jsonl"

    @property
    def repair_lock(self) -> Path:
        """The file that a repair of this folder flocks, beside the writers' lock."""
        return self.path / ".repair.lock"

    @property
    def journal(self) -> Path:
        """Which files are just being replaced together (app/exchange.py); there for moments only."""
        return self.path / ".exchange.json"

    @property
    def progress(self) -> Path:
        """The latest snapshot, replaced atomically."""
        return self.path / "progress.json"

    @property
    def progress_log(self) -> Path:
        """One appended snapshot per interval."""
        return self.path / "progress.jsonl"

    @property
    def all_turns(self) -> Path:
        """The folder that holds, for each fingerprint of settings, one that remembers single turns of conversations."""
        return self.path / "turns"

    def turns(self, settings: str) -> DatasetFolder:
        """Return the one of those folders for the settings of that fingerprint."""
        return DatasetFolder(self.all_turns / filename_safe(settings), holds_turns=True)

    def torn_words(self, kind: Kind) -> str:
        """Return what becomes of a line of `kind` that was torn."""
        if self.holds_turns:
            return "that turn is asked again if its conversation is not recorded yet"
        if kind in {Kind.PENDING, Kind.REFUSED}:
            return "the next producer enqueue of the same input writes it again"
        return "the sample is asked again"

    def lines(self, kind: Kind) -> Path:
        """Return the append-only file whose lines say `kind`."""
        return self.path / FILE_OF_KIND[kind]


def dataset_folder(prepared: Path, dataset: str) -> DatasetFolder:
    """Return the paths of `dataset` under the prepared folder."""
    return DatasetFolder(prepared / folder_name(dataset))


def existing_folder(prepared: Path, dataset: str) -> DatasetFolder:
    """Return the folder that enqueue made for the dataset; a worker never makes one.

    Raises StoreError when it is not there: records in another folder would look lost.
    """
    folder = dataset_folder(prepared, dataset)
    if not folder.manifest.exists():
        raise StoreError(
            f"{folder.path.absolute()} is not the folder of the dataset {dataset!r}: it has no manifest.json; set this "
            "worker's MILL_PREPARED_DIR to the folder that producer enqueue wrote to."
        )
    return folder


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
    <p>deaths:<d>              hash    sample id -> "deaths|points": workers and servers that died over it
    <p>crashes:<d>             hash    sample id -> unexpected errors while it was asked
    <p>suspects                hash    "<d>|<sample id>" -> "owner|how" of suspects in flight (docs/design/poison.md)
    <p>lane                    string  suspects recorded since the last death in the lane; expires
    <p>rates:<d>               hash    "<unix second>:<kind>" -> samples, "<unix second>:tokens" -> output tokens
    <p>stats:<d>               hash    counters, latency:<bucket>, length:<bucket>, fault:<kind> -> how many so far
    <p>run:<d>                 hash    the present run of work: began, resumed, paused_at, paused_s, before (its stats)
    <p>changed                 string  unix seconds at which a worker last came or went
    <p>worker:<owner>          string  heartbeat as JSON, expires
    <p>workers                 set     owners that have sent a heartbeat
    <p>permits:<endpoint>      hash    owner -> "held|wanted|expiry" of requests in flight
    <p>endpoints               set     names of the endpoints that workers have used
    <p>endpoint:<endpoint>     hash    state, since, reason, url: the shared breaker; gauges: its /metrics, as JSON
    <p>bound                   string  requests in flight per model server, in the place of MILL_MAX_IN_FLIGHT
    <p>probe:<endpoint>        string  the worker whose turn it is to probe; expires
    <p>turn:<name>             string  who does a periodic duty (sweep, progress, look.<endpoint>, ...); expires
    <p>mill.<d>                list    Celery's queue of tickets (kombu)
    <p>extract.<d>             list    the same for a dataset of hidden states (its name ends in `.hidden`)
    <p>unacked, unacked_index  hash, zset   Celery's deliveries not yet acked (kombu)
    <p>unacked_mutex           string  the worker that takes deliveries of the dead back just now (kombu); expires
    <p>_kombu.binding*         set, zset   the routes to Celery's queues (kombu)
    <p>write-probe             string  what a worker writes to see whether Redis takes writes again; expires
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
        """Hash: sample id -> deaths of those that asked it."""
        return f"{self.prefix}deaths:{folder_name(dataset)}"

    @property
    def suspects(self) -> str:
        """Hash: suspect in flight -> who asks it, and how it flies."""
        return f"{self.prefix}suspects"

    @property
    def lane(self) -> str:
        """Suspects recorded since the last death in the lane."""
        return f"{self.prefix}lane"

    def crashes(self, dataset: str) -> str:
        """Hash: sample id -> unexpected errors while it was asked."""
        return f"{self.prefix}crashes:{folder_name(dataset)}"

    def rates(self, dataset: str) -> str:
        """Hash: per-second tallies."""
        return f"{self.prefix}rates:{folder_name(dataset)}"

    def stats(self, dataset: str) -> str:
        """Hash: what has been counted of finished samples and failed calls."""
        return f"{self.prefix}stats:{folder_name(dataset)}"

    def run(self, dataset: str) -> str:
        """Hash: the present run of work."""
        return f"{self.prefix}run:{folder_name(dataset)}"

    @property
    def changed(self) -> str:
        """When a worker last came or went."""
        return f"{self.prefix}changed"

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

    @property
    def bound(self) -> str:
        """The bound on requests in flight that a person has set."""
        return f"{self.prefix}bound"

    def probe(self, endpoint: str) -> str:
        """Whose turn it is to probe."""
        return f"{self.prefix}probe:{endpoint}"

    def turn(self, name: str) -> str:
        """Whose turn a periodic duty is."""
        return f"{self.prefix}turn:{name}"

    def queue(self, dataset: str) -> str:
        """Return the list that kombu keeps for the dataset's queue."""
        return f"{self.prefix}{queue_name(dataset)}"


def is_extraction(dataset: str) -> bool:
    """Tell whether the dataset's samples are hidden states, which other workers make than those that ask servers."""
    return dataset.endswith(EXTRACTION_SUFFIX)


def refuse_extraction(dataset: str) -> None:
    """Raise UsageError for a name that is kept for hidden states."""
    if is_extraction(dataset):
        raise UsageError(
            f"{dataset!r} cannot be the name of a dataset of prompts: {EXTRACTION_SUFFIX} ends the names of those that "
            "producer extract makes; choose another --dataset."
        )


def suspect_field(dataset: str, sample_id: str) -> str:
    """Return the field of the hash of suspects in flight that stands for a sample."""
    return f"{folder_name(dataset)}|{sample_id}"


def queue_name(dataset: str) -> str:
    """Return the name of the dataset's Celery queue."""
    return f"{'extract' if is_extraction(dataset) else 'mill'}.{folder_name(dataset)}"


def public_url(url: str) -> str:
    """Return a URL without user and password."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def endpoint_name(url: str) -> str:
    """Return a short stable name for an endpoint's base URL, for Redis keys and logs; it holds no credentials."""
    host = public_url(url).partition("://")[2]
    return f"{filename_safe(host)[:40]}-{hashlib.sha256(url.encode()).hexdigest()[:6]}"
