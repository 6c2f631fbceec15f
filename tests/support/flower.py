"""A true Flower for tests: `celery -A app flower` on a free port, and requests to it."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from producer.ports import free_port
from tests.support.processes import ManagedProcess

READY = "Visit me at"
_TIMEOUT_S = 30


@dataclasses.dataclass(frozen=True)
class Answer:
    """What Flower has answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    def json(self) -> Any:
        """Return the body as parsed JSON."""
        return json.loads(self.body)


class FlowerProcess(ManagedProcess):
    """A Flower with the shipped configuration; it can be killed and started again on its port."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        log_dir: Path,
        arguments: tuple[str, ...] = (),
        port: int | None = None,
        login: str | None = None,
    ) -> None:
        """Start it; `login` is `user:password`, set in Flower and sent with each request."""
        self.port = port or free_port()
        self.login = login
        secret = {"FLOWER_BASIC_AUTH": login} if login else {}
        command = [sys.executable, "-m", "celery", "-A", "app", "flower", f"--port={self.port}", *arguments]
        super().__init__(command, log_dir=log_dir, name="flower", env={**env, **secret})

    def wait_ready(self, timeout_s: float = 60.0) -> Self:
        """Wait until it answers."""
        self.wait_for_output(READY, timeout_s)
        return self

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        body: object = None,
        headers: Mapping[str, str] | None = None,
        login: str | None = "",
    ) -> Answer:
        """Send one request; redirects are not followed. `login` replaces Flower's own; None sends none."""
        sent = dict(headers or {})
        who = self.login if login == "" else login
        if who:
            sent["Authorization"] = f"Basic {base64.b64encode(who.encode()).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def data(self) -> dict[str, Any]:
        """Return what the page's data endpoint says."""
        answer = self.ask("/pipeline/data")
        assert answer.status == 200, answer
        document = answer.json()
        assert isinstance(document, dict)
        return document

    def press(self, order: object, *, token: str | bool = True, login: str | None = "") -> Answer:
        """Send what a button of the page sends; `token` is the XSRF token: True for the page's, False for none."""
        headers = {"Content-Type": "application/json"}
        cookie = self.ask("/pipeline").headers.get("set-cookie", "").partition(";")[0]
        if cookie:
            headers["Cookie"] = cookie
        if token is True:
            token = cookie.partition("=")[2].strip('"')
        if token is not False:
            headers["X-XSRFToken"] = token
        return self.ask("/pipeline/control", method="POST", body=order, headers=headers, login=login)
