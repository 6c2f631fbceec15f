"""What is rehearsed, and what is assumed of the model and its server."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path

from app.errors import UsageError
from app.records import filename_safe
from app.settings import ENV_PREFIX, GenerationSettings, QueueSettings, WorkerSettings
from producer.formats.hub import PREFIX
from producer.services import slots_each
from producer.simulator.realistic import Traits

DATASET = "rehearsal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A rehearsal as it was asked for."""

    source: str
    """The source as it was typed."""
    opened: str
    """The source as it is opened from any folder."""
    reading: tuple[str, ...]
    """The options of `enqueue` that say how the source is read, `--limit` aside."""
    limit: int
    """The most rows that are rehearsed."""
    rows: int | None
    """Rows of the whole run; None where they are not known."""
    generation: GenerationSettings
    worker: WorkerSettings
    request_timeout_s: float | None
    """Simulated seconds; None where workers find it out by themselves."""
    queue: QueueSettings
    max_in_flight: int
    workers: int
    traits: Traits
    keep: Path | None
    """Where the records shall stay."""

    @property
    def slots(self) -> int:
        """Slots of each worker, as `producer up` gives them."""
        return slots_each(self.max_in_flight, self.workers)

    def in_flight_for(self, mean_tokens: float) -> int:
        """Return how many requests in flight use the whole server, if an answer has so many tokens on average."""
        generating = self.traits.server_tokens_per_second / self.traits.tokens_per_second
        waiting = self.traits.server_tokens_per_second / mean_tokens * self.traits.first_token_s
        return math.ceil(generating + waiting)

    def settings(self) -> dict[str, str]:
        """Return the MILL_ variables of the processes, the times of the workers as fast as the server's."""
        speedup = self.traits.speedup
        values = {
            **self.generation.content(),
            "max_in_flight": self.max_in_flight,
            "max_pending": max(self.queue.max_pending, self.limit),  # nobody takes samples while they are queued
            "max_row_mb": self.queue.max_row_mb,
            "max_attempts": self.worker.max_attempts,
            "backoff_s": self.worker.backoff_s / speedup,
            "backoff_max_s": self.worker.backoff_max_s / speedup,
            "request_timeout_s": "auto" if self.request_timeout_s is None else self.request_timeout_s / speedup,
        }
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        return {f"{ENV_PREFIX}{name.upper()}": text for name, text in texts.items()}

    def server_words(self) -> list[str]:
        """Return the options of the simulated server."""
        traits = {name: value for name, value in dataclasses.asdict(self.traits).items() if name != "seed"}
        words = [word for name, value in traits.items() for word in (f"--{name.replace('_', '-')}", repr(value))]
        return [*words, *(("--model", self.generation.model) if self.generation.model else ())]

    def commands(self, workers: int) -> list[str]:
        """Return the command lines of the real run."""
        stem = self.source.rstrip("/").rpartition("/")[2].partition(".")[0].partition("@")[0]
        name = filename_safe(stem.removeprefix("hf:").partition(":")[0]).lower()
        enqueue = ["producer", "enqueue", self.source, "--dataset", name, *self.reading]
        enqueue += ["--max-tokens", str(self.generation.max_tokens)]
        return [
            "export MILL_MODEL_URLS=http://HOST:8000/v1",
            f"export MILL_MAX_IN_FLIGHT={self.max_in_flight}",
            f"producer up --workers {workers}",
            shlex.join(enqueue),
            "producer monitor --until-done",
        ]


def opened_from_anywhere(source: str) -> str:
    """Return a source as it is opened from any folder: what lies here by its whole path, all else unchanged."""
    prefix = PREFIX if source.startswith((f"{PREFIX}/", f"{PREFIX}.", f"{PREFIX}~")) else ""
    path = Path(source.removeprefix(prefix)).expanduser()
    return f"{prefix}{path.resolve()}" if path.exists() else source


def check_keep(folder: Path) -> None:
    """Refuse a folder for the records that holds something already, or cannot be made. Raises UsageError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--keep {folder} cannot be used: it is there already and not empty; name a new folder.")
    above = next(one for one in folder.absolute().parents if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--keep {folder} cannot be used: nothing can be written to {above}; name another folder.")
