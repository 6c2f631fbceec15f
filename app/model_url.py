"""The address of a model server, as people write it."""

from __future__ import annotations

import re
import urllib.parse

_UNFIT = re.compile(r"[\s\x00-\x1f\x7f]")
"""White space and control characters."""


def base_url(url: str) -> str:
    """Return a server's base URL without a trailing slash or `/v1`.

    Raises ValueError for anything that is not http(s)://host.
    """
    text = url.strip().rstrip("/")
    text = text.removesuffix("/v1").rstrip("/")
    scheme, _, rest = text.partition("://")
    if scheme not in {"http", "https"} or not rest.strip("/"):
        shown = url.strip().rpartition("@")[2]  # what stands before it may be a password
        raise ValueError(f"{shown!r} is not an http:// or https:// URL, such as http://127.0.0.1:8000/v1")
    if _UNFIT.search(text):
        raise ValueError("a URL holds white space or a control character; put a comma between two servers' URLs")
    if not _has_readable_host(text):
        raise ValueError(
            "a URL's host or port cannot be read; percent-encode special characters in its password (/ is %2F, "
            "@ is %40) and put an IPv6 address into brackets"
        )
    return text


def _has_readable_host(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0) and "@" not in parts.path + parts.query
    except ValueError:
        return False
