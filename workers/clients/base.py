"""What every wire protocol's client promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from app.records import Completion, Message
from workers.clients.backends import Backend
from workers.faults import Fault


class CallFailed(Exception):  # noqa: N818 - it says what happened; the error is the fault that it carries
    """A call that brought no completion."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One question to a model server; nothing in it is copied or changed."""

    messages: list[Message]
    model: str
    sampling: dict[str, Any]
    """Request fields as they are sent, at the top level."""
    request_id: str
    """Names this very call in the server's log."""
    tools: list[dict[str, Any]] | None = None
    seed: int | None = None
    want_token_ids: bool = True
    """Ask for the exact token ids; a server that cannot give them is asked without."""
    on_token: Callable[[], None] | None = None
    """Told whenever tokens of a streamed answer come."""

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters that it is asked with."""
        return {*self.sampling, *(("seed",) if self.seed is not None else ())}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A completion and how long it took."""

    completion: Completion
    latency_s: float
    """Seconds from sending the request that was answered to the end of its answer."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a cheap look at a server shows."""

    alive: bool
    """Whether it can be sent requests, as far as a look without generating can tell."""
    words: str
    """Why not, or "ok"."""
    models: tuple[str, ...] = ()
    """The names of the models that it lists; empty where it lists none."""
    refuses: bool = False
    """Whether it is there but takes no requests with our key."""
    timed_out: bool = False
    """Whether it let the look wait in vain."""


PROBE_TIMEOUT_S = 30.0
"""Seconds for a look at a server; SGLang's /health generates a token and may take 20 s."""


class Client(Protocol):
    """A client for one endpoint, to be made and used inside one event loop."""

    name: str
    """The protocol's name, as records carry it."""

    @property
    def backend(self) -> Backend:
        """What the server was found to be."""

    async def identify(self, *, again: bool = False) -> Backend:
        """Return what the server is, asking it the first time and whenever it may be another one (`again`).

        Never raises: a server that does not answer in time counts as not recognised.
        """

    def refusal(self, request: Request) -> str | None:
        """Return a sentence on what this server would not act on in the request, or None: it may be asked."""

    async def complete(self, request: Request) -> Answer:
        """Ask once and return the completion.

        Raises CallFailed with a classified fault, or MillError where this worker can ask the server nothing as it is
        set up; anything else that it raises is a bug. Cancelling it makes the server stop generating.
        """

    async def probe(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Look at the server without generating anything; never raises for a server that is down."""

    async def read_metrics(self, *, timeout_s: float) -> bytes | None:
        """Return the server's `/metrics` page, empty where it has none; None where it does not answer in time."""

    async def close(self) -> None:
        """Close all connections."""
