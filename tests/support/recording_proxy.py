"""Stands before a model server that nobody here wrote, and keeps what it was asked."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from typing import Any, Self

_TIMEOUT_S = 120.0


class RecordingProxy:
    """Forwards each request to a server on 127.0.0.1 and its whole answer back."""

    def __init__(self, port: int) -> None:
        """Listen on a free port for the server at `port`."""
        self.requests: list[dict[str, Any]] = []
        """The bodies of all chat requests so far, in the order of their arrival."""
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(port, self.requests))
        self._thread = threading.Thread(target=self._server.serve_forever, name="recording-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """The base URL, without `/v1`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"


def _handler_of(port: int, requests: list[dict[str, Any]]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/chat/completions":
                requests.append(json.loads(body))
            self._forward(body)

        def _forward(self, body: bytes | None) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
            try:
                connection.request(self.command, self.path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    return Handler
