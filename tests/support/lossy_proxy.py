"""A network between a client and a server that can lose an answer: the server has done the work, nobody hears of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

_CHUNK = 65536


class LossyProxy:
    """Carries bytes between clients and one server on 127.0.0.1; after `lose_answer` the next answer is lost."""

    def __init__(self, port: int) -> None:
        """Listen on a free port for the server at `port`."""
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._losing = b""
        self._sockets: list[socket.socket] = []
        self.lost = 0
        """Answers that were lost so far."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()

    def lose_answer(self, word: bytes) -> None:
        """Lose the answer to the next request that holds `word`, and cut the connection."""
        with self._lock:
            self._losing = word

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                lose = threading.Event()
                threading.Thread(target=self._carry_requests, args=(client, server, lose), daemon=True).start()
                threading.Thread(target=self._carry_answers, args=(client, server, lose), daemon=True).start()

    def _carry_requests(self, client: socket.socket, server: socket.socket, lose: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                with self._lock:
                    if self._losing and self._losing in data:
                        self._losing = b""
                        lose.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _carry_answers(self, client: socket.socket, server: socket.socket, lose: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(_CHUNK):
                if lose.is_set():
                    self.lost += 1
                    break
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
