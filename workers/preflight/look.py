"""What the model servers say of themselves, without generating anything: who they are, and what they would refuse."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import http.client
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from app import settings
from app.places import public_url
from app.preflight import Job, Refusal, Server
from app.settings import GenerationSettings, ServerSettings
from workers.clients import fits
from workers.clients.access import Access
from workers.clients.backends import MODELS_PATH, UNKNOWN, Backend, identify, model_names
from workers.clients.base import Request
from workers.clients.make import class_of
from workers.clients.parameters import Allowance
from workers.preflight.pages import Page, Reader
from workers.rendering import template_fingerprint
from workers.wording import one_line, words_of_body

_NO_LIST = frozenset({404, 405, 501})
_REFUSED = frozenset({401, 403, 407})
_WORDS = 200
_LATE_S = 0.3
"""Seconds in which a look that was cut short at its deadline says what it has seen by then."""
_ONLY_ITS_OWN = frozenset({"vllm"})
"""Servers that answer 404 to every model that they do not list; others take any name, or know more than they list."""
_KWARGS = "chat_template_kwargs"


def look_at_all(job: Job, servers: ServerSettings) -> list[Server]:
    """Look at every server of the settings at the same time, for no longer than the job allows."""
    deadline = time.monotonic() + job.timeout_s
    found: dict[str, Server] = {}

    def look(url: str) -> None:
        found[url] = _look_at(url, servers, job, deadline)

    threads = [threading.Thread(target=look, args=(url,), daemon=True) for url in servers.model_urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline + _LATE_S - time.monotonic()))
    return [found.get(url) or _silent(url, job.timeout_s) for url in servers.model_urls]


def _look_at(url: str, servers: ServerSettings, job: Job, deadline: float) -> Server:
    access = Access(url, servers.api_key)
    reader = Reader(access, deadline=deadline)
    try:
        models = reader.read(MODELS_PATH)
    except TimeoutError:
        return _silent(url, job.timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last: a host that cannot be one
        words = one_line(access.hide(str(error)), _WORDS) or type(error).__name__
        return Server(url=public_url(url), state="down", words=words)
    server = _judged(url, models)
    server.words = access.hide(server.words)
    if server.state != "up":
        return server
    server.models = model_names(models.document)
    backend = _identified(access.base_url, reader, models) if servers.protocol != "openai" else UNKNOWN
    generations = {name: settings.generation_from_content(one) for name, one in job.generations.items()}
    server.backend, server.shown = backend.label, backend.shown
    server.switches_thinking = _KWARGS in (backend.parameters or ())
    if backend.name == "llama.cpp":
        server.template = _template(reader)
    for name, generation in generations.items():
        server.refusals[name] = list(_refusals(backend, server.models, generation, servers))
    first = next(iter(generations.values()), None)
    server.model = (first.model if first else None) or next(iter(server.models), None)
    server.context = backend.context_of(server.model or "")
    return server


def _silent(url: str, timeout_s: float) -> Server:
    return Server(url=public_url(url), state="silent", words=f"no answer within {timeout_s:g} s")


def _judged(url: str, models: Page) -> Server:
    """Return what the answer to the question for its models says of a server."""
    server = Server(url=public_url(url), state="up", clock_ahead_s=_clock_ahead(models))
    if models.status != 200 and models.status not in _NO_LIST:
        said = words_of_body(models.body)[0]
        server.words = one_line(f"HTTP {models.status} for {MODELS_PATH}: {said}", _WORDS).rstrip(": ")
        server.state = "refuses" if models.status in _REFUSED else "unwell"
    return server


def _clock_ahead(page: Page) -> float | None:
    """Return how many seconds the server's clock is ahead; its header tells whole seconds, cut off."""
    try:
        told = email.utils.parsedate_to_datetime(page.headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    return round(told + 0.5 - page.asked_at, 1)


def _identified(base_url: str, reader: Reader, models: Page) -> Backend:
    """Return what the server is; not recognised where it stops answering."""

    async def get(path: str) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        page = models if path == MODELS_PATH else reader.read(path)
        return page.headers, page.document

    try:
        return asyncio.run(identify(base_url, get))
    except (OSError, http.client.HTTPException):
        return UNKNOWN


def _template(reader: Reader) -> str | None:
    """Return the fingerprint of the chat template that llama.cpp shows, made as that of a tokenizer's."""
    try:
        text = reader.read("/props").document.get("chat_template")
    except (OSError, http.client.HTTPException):
        return None
    return template_fingerprint(text) if isinstance(text, str) and text else None


def _refusals(
    backend: Backend, models: list[str], generation: GenerationSettings, servers: ServerSettings
) -> Iterator[Refusal]:
    """Yield why a dataset with these settings would be paused at once."""
    if generation.model and backend.name in _ONLY_ITS_OWN and models and generation.model not in models:
        finding = f"{backend.shown} has no model {generation.model} but {', '.join(models)}"
        yield Refusal("model", finding, "give --model as the server lists it, or start the server with that model")
    request = Request(
        messages=[],
        model=generation.model or next(iter(models), "default"),
        sampling=generation.sampling("preflight"),
        seed=generation.seed,
        request_id="preflight",
    )
    context = backend.context_of(request.model)
    if context is not None and (lack := fits.lack_of_room(request, context)):
        remedy = f"give --max-tokens {fits.fitting(context)} or less, or start the server with a larger context"
        yield Refusal("context", lack, remedy)
    roomy = dataclasses.replace(backend, context=None, contexts=())
    allowance = Allowance(everything=servers.allow_unknown_parameters)
    why = class_of(servers.protocol).refuses(roomy, request, allowance)
    if why and "MILL_PROTOCOL" in why:
        yield Refusal("protocol", *_halves(why))
    elif why:
        remedy = "leave that out, or set MILL_ALLOW_UNKNOWN_PARAMETERS=true to send it all the same"
        yield Refusal("parameters", _halves(why)[0], remedy)


def _halves(sentence: str) -> tuple[str, str]:
    finding, _, remedy = sentence.partition("; ")
    return finding, remedy
