"""Small pages of a model server, read without the libraries that a worker needs, so that a look costs no second."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.clients.access import Access

_MOST_BYTES = 4 * 1024 * 1024


class Page(NamedTuple):
    """An answer to a GET request."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    asked_at: float
    """Unix seconds by this machine's clock, in the middle between question and answer."""

    @property
    def document(self) -> Mapping[str, Any]:
        """The JSON object that it holds; empty where it holds none, or is no success."""
        if self.status != 200:
            return {}
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class Reader:
    """Reads the pages of one server until a deadline; for one thread."""

    def __init__(self, access: Access, *, deadline: float) -> None:
        """Take the server and a monotonic time."""
        self._access = access
        self._deadline = deadline

    def read(self, path: str) -> Page:
        """Return a page; raises OSError or http.client.HTTPException where none comes in time."""
        parts = urllib.parse.urlsplit(self._access.base_url)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = made(parts.hostname or "", parts.port, timeout=left_s)
        try:
            before = time.time()
            connection.request("GET", f"{parts.path}{path}", headers=self._access.headers)
            answer = connection.getresponse()
            middle = (before + time.time()) / 2
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Page(answer.status, headers, answer.read(_MOST_BYTES), middle)
        finally:
            connection.close()
