"""Free TCP ports below the range that the kernel gives to outgoing connections.

A server that is stopped and comes back must find its port free, and a client that knocks at a dead port of the
outgoing range can, on loopback, connect to itself.
"""

from __future__ import annotations

import random
import socket

_LOWEST, _HIGHEST = 15_000, 31_999
_TRIES = 200


def bound_socket(port: int = 0) -> socket.socket:
    """Return a TCP socket bound to 127.0.0.1, not yet listening; port 0 takes a free one.

    Raises OSError when the port is taken.
    """
    candidates = [port] if port else random.Random().sample(range(_LOWEST, _HIGHEST), _TRIES)  # noqa: S311 ports
    for number, candidate in enumerate(candidates, start=1):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", candidate))
        except OSError:
            sock.close()
            if number == len(candidates):
                raise
            continue
        return sock
    raise OSError("no candidate port")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with bound_socket() as sock:
        return int(sock.getsockname()[1])
