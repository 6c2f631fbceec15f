"""The addresses that Prometheus reads, behind the same login as the page."""

from __future__ import annotations

from typing import Any

import tornado.web
from flower.views.monitor import Metrics as FlowersMetrics

from app.dashboard.handlers import JsonHandler, refuse_strange_host, say_strange_host
from app.dashboard.metrics import CONTENT_TYPE
from app.dashboard.watch import Watch


def routes(watch: Watch) -> list[Any]:
    """Return what Flower's list of handlers gets before its own."""
    return [
        tornado.web.url(r"/metrics", MetricsHandler, {"watch": watch}),
        tornado.web.url(r"/metrics/flower", FlowersMetricsHandler),
    ]


class MetricsHandler(JsonHandler):
    """The run's metrics."""

    async def get(self) -> None:
        """Answer in Prometheus' text format."""
        self.require_user()
        seen = await self.looking.metrics()
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(seen.body)


class FlowersMetricsHandler(FlowersMetrics):  # type: ignore[misc] # Flower is untyped
    """Flower's own metrics: what it remembers of events since its start, and its own process."""

    def prepare(self) -> None:
        """Refuse what our own pages refuse."""
        refuse_strange_host(self)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say why in one sentence; the rest is Flower's."""
        if not say_strange_host(self, kwargs):
            super().write_error(status_code, **kwargs)

    async def get(self) -> None:
        """Answer as Flower does, but only to people who may see its pages."""
        if not self.current_user:
            raise tornado.web.HTTPError(401)
        await super().get()
