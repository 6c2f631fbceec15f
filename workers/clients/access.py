"""A model server's address and the key for it, which is sent with every request and shown nowhere."""

from __future__ import annotations

import base64
import re
import urllib.parse

from pydantic import SecretStr


class Access:
    """How one server is reached."""

    def __init__(self, url: str, api_key: SecretStr | None) -> None:
        """Take a base URL without `/v1`; a name and password in it go before the key."""
        self.base_url, login = _split_login(url)
        """The URL without name and password."""
        key = api_key.get_secret_value() if api_key else None
        self.authorization = login or (f"Bearer {key}" if key else None)
        self.headers = {"Accept-Encoding": "identity", "User-Agent": "promptmill"}
        """Those of every request."""
        if self.authorization:
            self.headers["Authorization"] = self.authorization
        self._secret = _secret_pattern(key, login)

    def hide(self, words: str) -> str:
        """Return a server's words without the secrets that it repeats."""
        return self._secret.sub("***", words) if self._secret else words


def _split_login(base_url: str) -> tuple[str, str | None]:
    """Return the URL without its user name and password, and these as an Authorization header."""
    parts = urllib.parse.urlsplit(base_url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return base_url, None
    token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), f"Basic {token}"


def _secret_pattern(key: str | None, login: str | None) -> re.Pattern[str] | None:
    """Return what finds the key and the login's token in a server's words; None where there is neither."""
    secrets = [re.escape(secret) for secret in (key, login and login.partition(" ")[2]) if secret]
    # Whole words only: a made-up key such as "x" is part of many words.
    return re.compile(rf"(?<![A-Za-z0-9])({'|'.join(secrets)})(?![A-Za-z0-9])") if secrets else None
