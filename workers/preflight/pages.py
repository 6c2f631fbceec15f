"""Small pages of a model server, read without the libraries that a worker needs, so that a look costs no second."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from workers.clients.link import secret_pattern, split_login

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

    def __init__(self, url: str, *, api_key: str | None, deadline: float) -> None:
        """Take a base URL without `/v1`, whose user and password go before the key, and a monotonic time."""
        self.base_url, login = split_login(url)
        self._deadline = deadline
        self._secret = secret_pattern(api_key, login)
        authorization = login or (f"Bearer {api_key}" if api_key else None)
        self._headers = {"User-Agent": "promptmill", "Accept-Encoding": "identity"}
        if authorization:
            self._headers["Authorization"] = authorization

    def hide(self, words: str) -> str:
        """Return a server's words without the secrets that it repeats."""
        return self._secret.sub("***", words) if self._secret else words

    def read(self, path: str) -> Page:
        """Return a page; raises OSError or http.client.HTTPException where none comes in time."""
        parts = urllib.parse.urlsplit(self.base_url)
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = made(parts.hostname or "", parts.port, timeout=left_s)
        try:
            before = time.time()
            connection.request("GET", f"{parts.path}{path}", headers=self._headers)
            answer = connection.getresponse()
            middle = (before + time.time()) / 2
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Page(answer.status, headers, answer.read(_MOST_BYTES), middle)
        finally:
            connection.close()
