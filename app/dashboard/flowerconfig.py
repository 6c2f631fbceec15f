"""Flower executes this file at its start (FLOWER_CONF names it); its variables become options.

They would win over FLOWER_ variables, so only options that nobody has set appear here.
"""

from __future__ import annotations

from tornado.options import options as _tornado_options

from app.dashboard import defaults as _defaults
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
