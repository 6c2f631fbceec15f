"""The cheap look before every enqueue: refuses what the servers' own words show would waste the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from app import settings
from app.errors import UsageError
from app.preflight import Job, Report, Server
from app.settings import GenerationSettings, ServerSettings
from producer.doctor.looking import Look, LookFailedError

_LOOK_S = 2.0
"""Seconds for all servers; one that has not answered by then is left alone."""
_WHOLE_S = 15.0
"""Seconds for the look with the start of its process, on a busy machine."""

Tell = Callable[[str], None]


class Gate:
    """A look that is under way, or none where the settings name no server."""

    def __init__(self, look: Look | None) -> None:
        self._look = look

    def check(self, tell: Tell) -> None:
        """Wait for the look's end; tell of servers that cannot be used now.

        Raises UsageError, before anything is queued, where a server would refuse what a dataset asks, or pass over it.
        """
        if self._look is None:
            return
        try:
            report = self._look.report(timeout_s=_WHOLE_S)
        except LookFailedError as error:
            tell(f"{error}; everything is queued without it.")
            return
        if found := findings(report):
            raise UsageError(f"{' '.join(found)} Nothing was queued (--no-preflight queues it all the same).")
        for server in report.servers:
            if server.state != "up":
                tell(f"{sentence_of(server)}; everything is queued all the same.")


@contextlib.contextmanager
def opened(generations: Mapping[str, GenerationSettings], *, wanted: bool = True) -> Iterator[Gate]:
    """Start a look at the settings' servers, for these datasets, and end it however the command ends."""
    if not wanted or not generations or not settings.load(ServerSettings).model_urls:
        yield Gate(None)
        return
    contents = {name: generation.content() for name, generation in generations.items()}
    with Look(Job(generations=contents, timeout_s=_LOOK_S)) as look:
        yield Gate(look)


def findings(report: Report) -> list[str]:
    """Return a sentence for each thing that servers would refuse or pass over, each thing once."""
    where: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for server in report.servers:
        for dataset, refusals in server.refusals.items():
            for one in refusals:
                urls, datasets = where.setdefault((one.finding, one.remedy), ([], []))
                urls += [server.url] if server.url not in urls else []
                datasets += [dataset] if dataset not in datasets else []
    several = len({name for server in report.servers for name in server.refusals}) > 1
    return [
        f"{'; '.join(datasets) + ': ' if several else ''}{', '.join(urls)}: {finding}; {remedy}."
        for (finding, remedy), (urls, datasets) in where.items()
    ]


_STATES = {
    "down": "it cannot be reached from here",
    "silent": "it does not answer",
    "refuses": "it refuses our requests",
    "unwell": "it answers with an error",
}


def sentence_of(server: Server) -> str:
    """Return why a server cannot be used now, as the start of a sentence."""
    return f"the model server {server.url}: {_STATES[server.state]} ({server.words})"
