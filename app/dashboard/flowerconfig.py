"""Flower executes this file at its start (FLOWER_CONF names it): its variables become options, and our page enters.

Variables would win over FLOWER_ variables, so only options that nobody has set appear here.
"""

from __future__ import annotations

from flower import urls as _urls
from tornado.options import options as _tornado_options

from app.dashboard import defaults as _defaults
from app.dashboard import handlers as _handlers
from app.dashboard import metrics_handlers as _metrics_handlers
from app.dashboard import seam as _seam
from app.dashboard.watch import Watch as _Watch
from app.settings import StoreSettings as _StoreSettings
from app.settings import load as _load

try:
    globals().update(
        _defaults.flower_options(
            _defaults.given_options(_tornado_options._options.values()),  # noqa: SLF001 - tornado lists them nowhere else
            cookie_file=_load(_StoreSettings).state.path / "flower-cookie-secret",
        )
    )
except _defaults.RefusedAddressError as _refusal:
    raise SystemExit(str(_refusal)) from None

_watch = _Watch.from_settings()
_routes = [*_handlers.routes(_watch), *_metrics_handlers.routes(_watch)]
_seam.install(_routes, handlers=_urls.handlers, settings=_urls.settings)
