"""Says how Flower is started on this machine and where it answers: on another port when its own is taken."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping

from app.errors import MillError, SettingError
from producer import ports

FIRST_PORT = 5555
_PORTS_TRIED = 50


@dataclasses.dataclass(frozen=True)
class FlowerPlan:
    """Where Flower will answer."""

    host: str
    """What this machine connects to."""
    port: int
    first_port: int
    """The port that was wanted."""
    url: str

    @property
    def arguments(self) -> list[str]:
        """What follows `celery -A app` on the command line."""
        return ["flower", f"--port={self.port}"]

    def answers(self) -> bool:
        """Say whether something accepts connections there."""
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            return False
        return True


def plan(environ: Mapping[str, str]) -> FlowerPlan:
    """Choose the port: FLOWER_PORT or 5555, or the next one that is free. Flower reads its other variables itself.

    Raises SettingError for a FLOWER_PORT that is no port, MillError when many ports in a row are taken.
    """
    address = environ.get("FLOWER_ADDRESS") or "127.0.0.1"
    first = _wanted_port(environ)
    for port in range(first, min(first + _PORTS_TRIED, 65536)):
        if ports.is_free(port, address):
            host = "127.0.0.1" if address in {"0.0.0.0", "::"} else address  # noqa: S104 - what the user asked for
            scheme = "https" if environ.get("FLOWER_CERTFILE") else "http"
            prefix = environ.get("FLOWER_URL_PREFIX", "").strip("/")
            return FlowerPlan(host=host, port=port, first_port=first, url=f"{scheme}://{host}:{port}/{prefix}")
    raise MillError(f"Flower found no free port from {first} on; set FLOWER_PORT to a free one.")


def _wanted_port(environ: Mapping[str, str]) -> int:
    text = environ.get("FLOWER_PORT") or str(FIRST_PORT)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise SettingError(f"FLOWER_PORT cannot be used: {text!r} is not a port from 1 to 65535.")
    return int(text)
