"""Finds free TCP ports for local services."""

from __future__ import annotations

import random
import socket

_LOWEST, _HIGHEST = 15_000, 31_999
_TRIES = 200


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Say whether a service could listen there now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a port that was free a moment ago, below the range that systems give to outgoing connections.

    A service that comes back finds such a port free, and a client that knocks while the service is down cannot be
    given the same port for its own end and so connect to itself.
    """
    for port in random.SystemRandom().sample(range(_LOWEST, _HIGHEST), _TRIES):
        if is_free(port):
            return port
    raise OSError(f"no TCP port from {_LOWEST} to {_HIGHEST} is free")
