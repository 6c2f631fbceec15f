"""Runs the target model over what waits, in batches of like lengths; the slots wait for their part."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from app.errors import MillError
from app.extraction import Plan
from workers.extract import model as target
from workers.extract.model import OutOfMemoryError, TargetModel

logger = logging.getLogger(__name__)

_MOST_HELD_BYTES = 2 * 2**30
"""States in memory that are not on disk yet, above which no further batch is begun."""


@dataclasses.dataclass(frozen=True)
class States:
    """The hidden states of one sequence."""

    tensor: Any
    """A CPU tensor [tokens, len(layers) + 1, hidden_size]."""
    seconds: float
    """What the pass through the model took, for the whole batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A sequence that waits for the model."""

    plan: Plan
    ids: Sequence[int]
    done: Future[States] = dataclasses.field(default_factory=Future)


class Engine:
    """One thread that owns the device. There is no timer: while a batch runs, the next one gathers."""

    def __init__(
        self, device: str | None, *, load: Callable[[Plan, str | None], TargetModel] = target.load_model
    ) -> None:
        """`device`: as MILL_DEVICE says it; `load` brings a plan's model onto it."""
        self._device = device
        self._load = load
        self._changed = threading.Condition()
        self._waiting: collections.deque[Job] = collections.deque()
        self._held = 0
        self._ended = False
        self._model: TargetModel | None = None
        self._loaded: tuple[object, ...] = ()
        """What tells the loaded model from others."""
        self._smaller: dict[str, int] = {}
        """Model -> tokens of a batch, once a larger one did not fit the device."""
        self._thread = threading.Thread(target=self._run, name="mill-extract", daemon=True)

    @property
    def loaded(self) -> str | None:
        """Where the model runs, once it is loaded."""
        return self._model.device if self._model else None

    def start(self) -> None:
        """Start the thread; the model is loaded for the first job."""
        self._thread.start()

    def stop(self) -> None:
        """End after the batch that runs."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.cancel_waiting()
        self._thread.join(60)

    @contextlib.contextmanager
    def states(self, plan: Plan, ids: Sequence[int]) -> Iterator[States]:
        """Yield the states of a sequence; their memory counts as held until the block ends.

        Raises OutOfMemoryError if it does not fit the device even alone, ModelUnusableError, and CancelledError when
        the worker ends first.
        """
        job = Job(plan, ids)
        with self._changed:
            if self._ended:
                job.done.cancel()
            self._waiting.append(job)
            self._changed.notify_all()
        states = job.done.result()
        try:
            yield states
        finally:
            with self._changed:
                self._held -= states.tensor.nbytes
                self._changed.notify_all()

    def cancel_waiting(self) -> int:
        """Turn away every job whose batch has not begun; return how many there were."""
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
        return sum(job.done.cancel() for job in jobs)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._compute(batch)
            except (MillError, OutOfMemoryError) as error:
                _fail(batch, error)
            except Exception as error:  # the waiting slots hear of it; the engine goes on
                logger.exception("a batch of %d sequences could not be computed", len(batch))
                _fail(batch, error)

    def _next_batch(self) -> list[Job]:
        """Wait for jobs and take a batch of them; nothing at the end."""
        with self._changed:
            while not self._ended:
                if self._waiting and self._held < _MOST_HELD_BYTES:
                    plan = self._waiting[0].plan
                    batch = choose_batch(self._waiting, self._smaller.get(plan.model, plan.batch_tokens))
                    for job in batch:
                        self._waiting.remove(job)
                    if running := [job for job in batch if job.done.set_running_or_notify_cancel()]:
                        return running
                    continue
                self._changed.wait()
        return []

    def _compute(self, batch: Sequence[Job]) -> None:
        model = self._model_for(batch[0].plan)
        started = time.monotonic()
        try:
            tensors = model.states(batch[0].plan, [job.ids for job in batch])
        except OutOfMemoryError as error:
            target.free_cache()
            if len(batch) == 1:
                tokens = len(batch[0].ids)
                raise OutOfMemoryError(f"{tokens:,} tokens alone do not fit {model.device}: {error}") from error
            self._take_smaller(batch)
            for job in batch:
                self._compute_alone(job)
            return
        seconds = time.monotonic() - started
        with self._changed:
            self._held += sum(tensor.nbytes for tensor in tensors)
        for job, tensor in zip(batch, tensors, strict=True):
            job.done.set_result(States(tensor, seconds))

    def _compute_alone(self, job: Job) -> None:
        try:
            self._compute([job])
        except OutOfMemoryError as error:
            job.done.set_exception(error)

    def _take_smaller(self, batch: Sequence[Job]) -> None:
        padded = len(batch) * max(len(job.ids) for job in batch)
        model = batch[0].plan.model
        self._smaller[model] = max(1, min(self._smaller.get(model, padded), padded) // 2)
        logger.warning(
            "a batch of %d sequences (%d padded tokens) does not fit the device; they are run one by one, and batches "
            "have at most %d tokens from now on (--batch-tokens)",
            len(batch),
            padded,
            self._smaller[model],
        )

    def _model_for(self, plan: Plan) -> TargetModel:
        wanted = (plan.model, plan.dtype, plan.trust_remote_code)
        if self._model is None or self._loaded != wanted:
            self._model = None  # the old one's memory is wanted
            target.free_cache()
            try:
                self._model = self._load(plan, self._device)
            except OutOfMemoryError as error:
                words = f"The model {plan.model} does not fit the device: {error}"
                raise target.ModelUnusableError(f"{words}; MILL_DEVICE=auto spreads it over GPUs.") from error
            self._loaded = wanted
            logger.info("%s runs on %s", plan.model, self._model.device)
        return self._model


def _fail(batch: Sequence[Job], error: Exception) -> None:
    for job in batch:
        if not job.done.done():
            job.done.set_exception(error)


def choose_batch(waiting: Sequence[Job] | collections.deque[Job], batch_tokens: int) -> list[Job]:
    """Return the oldest job and those of its plan with lengths next to its own, as many as fit.

    A batch costs its longest sequence times their number. A sequence that is too long by itself is a batch of its own.
    """
    oldest = waiting[0]
    jobs = sorted((job for job in waiting if job.plan == oldest.plan), key=lambda job: len(job.ids))
    low = high = jobs.index(oldest)
    while True:
        room = batch_tokens // (high - low + 2)  # for each, if there is one more
        nearest = [at for at in (low - 1, high + 1) if 0 <= at < len(jobs) and len(jobs[max(at, high)].ids) <= room]
        if not nearest:
            return jobs[low : high + 1]
        at = min(nearest, key=lambda at: abs(len(jobs[at].ids) - len(oldest.ids)))
        low, high = min(low, at), max(high, at)
