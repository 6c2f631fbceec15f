"""A server of a few fixed pages, for what the simulated model server does not tell: its clock, other makes."""

from __future__ import annotations

import contextlib
import email.utils
import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def page_server(
    pages: Mapping[str, Any], *, ahead_s: float = 0.0, key: str | None = None, hangs_elsewhere: bool = False
) -> Iterator[str]:
    """Serve JSON documents by path, with a clock that is so far ahead; yields the base URL.

    `key`: every request without this bearer token is refused, and the refusal repeats what was sent.
    `hangs_elsewhere`: every other path is never answered.
    """
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if hangs_elsewhere and self.path not in pages:
                over.wait()
                return
            sent = self.headers.get("Authorization", "")
            document, status = pages.get(self.path), 200
            if key is not None and sent != f"Bearer {key}":
                document, status = {"error": {"message": f"wrong key: {sent}"}}, 401
            body = json.dumps(document).encode()
            self.send_response_only(404 if document is None else status)
            self.send_header("Date", email.utils.formatdate(time.time() + ahead_s, usegmt=True))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
