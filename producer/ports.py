"""Finds free TCP ports for local services."""

from __future__ import annotations

import contextlib
import random
import socket

_LOWEST, _HIGHEST = 15_000, 31_999
_TRIES = 200
_LOOPBACK = "127.0.0.1"


def is_free(port: int, address: str = _LOOPBACK) -> bool:
    """Say whether a service could listen there now."""
    try:
        _bound(port, address).close()
    except OSError:
        return False
    return True


def bound_socket(port: int = 0) -> socket.socket:
    """Return a TCP socket bound to 127.0.0.1, not yet listening; port 0 takes a free one, as `free_port` does.

    Raises OSError when the port is taken.
    """
    if port:
        return _bound(port, _LOOPBACK)
    for candidate in random.SystemRandom().sample(range(_LOWEST, _HIGHEST), _TRIES):
        with contextlib.suppress(OSError):
            return _bound(candidate, _LOOPBACK)
    raise OSError(f"no TCP port from {_LOWEST} to {_HIGHEST} is free")


def free_port() -> int:
    """Return a port that was free a moment ago, below the range that systems give to outgoing connections.

    A service that comes back finds such a port free, and a client that knocks while the service is down cannot be
    given the same port for its own end and so connect to itself.
    """
    with bound_socket() as sock:
        return int(sock.getsockname()[1])


def _bound(port: int, address: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
