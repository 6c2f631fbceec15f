"""A stand-in for the Hugging Face hub that takes one dataset and remembers what it was sent."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class Hub:
    """What came in, and where the stand-in listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.refuses = False


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer the calls of an upload of small files."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        if self.hub.refuses:
            self._answer({"error": "You do not have the rights"}, 403)
        elif self.path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            self._answer({"url": f"{self.hub.url}/datasets/my-org/chat", "name": "my-org/chat"})
        elif self.path == "/api/validate-yaml":
            self._answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
            )
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{self.hub.url}/datasets/my-org/chat/commit/1"
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})
        else:
            self._answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        """Know nothing else."""
        self._answer({"error": self.path}, 404)

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Run the stand-in on a free port of 127.0.0.1."""
    handler = type("Handler", (_Handler,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    handler.hub = hub
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
