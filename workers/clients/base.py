"""What every wire protocol's client promises."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from app.records import Completion, Message
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


class Client(Protocol):
    """A client for one endpoint, to be made and used inside one event loop."""

    name: str
    """The protocol's name, as records carry it."""

    async def complete(self, request: Request) -> Answer:
        """Ask once and return the completion.

        Raises CallFailed with a classified fault; anything else that it raises is a bug. Cancelling it closes the
        connection, upon which servers stop generating.
        """

    async def probe(self) -> Probe:
        """Look at the server without generating anything; never raises for a server that is down."""

    async def close(self) -> None:
        """Close all connections."""
