"""Which Redis server is used, and how it is spoken to: one URL for Celery, Flower and our own client."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
import redis.credentials
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.errors import BrokerError, BrokerFullError, BrokerUnreachableError, SettingError
from app.places import StateDir
from app.settings import DEFAULT_REDIS_URL, BrokerSettings, StoreSettings

if TYPE_CHECKING:
    from redis.typing import EncodableT

SCHEMES = ("redis", "rediss", "redis+socket", "unix")
_CONNECT_TIMEOUT_S = 5
_SOCKET_TIMEOUT_S = 60
_COMMAND_TIMEOUT_S = 8
"""For what somebody waits for in front of a terminal."""
_HANGING_TIMEOUT_S = 1
_MOST_CONNECTIONS = 32
_UNREADABLE = (
    "MILL_REDIS_URL cannot be used: host, port or database cannot be read; percent-encode special characters "
    "in the password (# is %23, / is %2F, [ is %5B, @ is %40), or put it into MILL_REDIS_PASSWORD."
)
_ACCEPTED = "accepted are redis://HOST:PORT/DB, rediss://..., unix:///PATH and redis+socket:///PATH"

Client = redis.Redis


class PasswordFile(redis.credentials.CredentialProvider):
    """Reads the password for each new connection, so that it can be changed while workers run."""

    def __init__(self, path: Path, user: str) -> None:
        self._path = path
        self._user = user

    def read(self) -> str:
        """Return the file's first line.

        Raises SettingError.
        """
        try:
            return self._path.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, IndexError, UnicodeDecodeError) as error:
            message = f"MILL_REDIS_PASSWORD_FILE cannot be used: {self._path} has no first line to read."
            raise SettingError(message) from error

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return what redis-py sends to a server that it has connected to.

        Raises redis.exceptions.AuthenticationError for a file that cannot be read, for it may be written just now.
        """
        try:
            password = self.read()
        except SettingError as error:
            raise redis.exceptions.AuthenticationError(str(error)) from error
        return (self._user, password) if self._user else (password,)


@dataclasses.dataclass(frozen=True)
class BrokerUrl:
    """A Redis URL in the spellings of both libraries; its text form holds no password."""

    client: str = dataclasses.field(repr=False)
    """For redis-py."""
    celery: str = dataclasses.field(repr=False)
    """For kombu."""
    shown: str
    """For people: user and password left out."""
    login: PasswordFile | None = dataclasses.field(default=None, repr=False, compare=False)
    """Where the password of each new connection is read, if it is in a file; the URLs hold the one of now."""

    def __str__(self) -> str:
        """Return the form for people."""
        return self.shown


def recorded_url(state: StateDir) -> str | None:
    """Return the URL of the server that `producer up` started, if it recorded one."""
    try:
        value = json.loads(state.broker.read_bytes())
    except PermissionError as error:
        raise SettingError(
            f"{state.broker} may not be read by this user, so the server that producer up started is not known; set "
            "MILL_REDIS_URL."
        ) from error
    except (OSError, ValueError):
        return None
    url = value.get("url") if isinstance(value, dict) else None
    return url if isinstance(url, str) else None


def resolve(broker: BrokerSettings, store: StoreSettings) -> BrokerUrl:
    """Return the URL in use: MILL_REDIS_URL, else the server of `producer up`, else localhost.

    Raises SettingError, which never quotes a part of the password.
    """
    if broker.redis_url is not None:
        text = broker.redis_url.get_secret_value().strip()
    else:
        text = recorded_url(store.state) or DEFAULT_REDIS_URL
    if broker.redis_password is not None or broker.redis_password_file is None:
        return parse(text, password=broker.redis_password.get_secret_value() if broker.redis_password else None)
    login = PasswordFile(broker.redis_password_file, "")
    bare, url = parse(text), parse(text, password=login.read())
    if bare.client == url.client:  # the URL has a password of its own
        return url
    user = urllib.parse.unquote(urllib.parse.urlsplit(url.client).username or "")
    return dataclasses.replace(url, login=PasswordFile(broker.redis_password_file, user))


def parse(text: str, *, password: str | None = None) -> BrokerUrl:
    """Return the spellings of a Redis URL.

    Raises SettingError, which never quotes a part of the password.
    """
    scheme, separator, _rest = text.partition("://")
    if scheme not in SCHEMES or not separator:
        raise SettingError(f"MILL_REDIS_URL cannot be used: its scheme is not known; {_ACCEPTED}.")
    try:
        return (_parse_socket if scheme in {"unix", "redis+socket"} else _parse_network)(text, password)
    except ValueError:
        # The parser's own message quotes what it takes for a port, which may be a piece of the password.
        raise SettingError(_UNREADABLE) from None


def _parse_network(text: str, password: str | None) -> BrokerUrl:
    parts = urllib.parse.urlsplit(text)
    if parts.fragment or "@" in parts.path + parts.query:
        raise ValueError("the password cut the URL in two")
    host, port = parts.hostname or "localhost", parts.port or 6379
    options = dict(urllib.parse.parse_qsl(parts.query))
    database = _database(options.pop("db", "") or parts.path.strip("/"))
    if not all(name.startswith("ssl_") for name in options):  # kombu takes no others
        raise SettingError("MILL_REDIS_URL cannot be used: its options may only be db and those that begin with ssl_.")
    if parts.scheme == "rediss":
        options.setdefault("ssl_cert_reqs", "required")
    shown_host = f"[{host}]" if ":" in host else host
    plain = f"{shown_host}:{port}/{database}"
    suffix = f"?{urllib.parse.urlencode(options)}" if options else ""
    url = f"{parts.scheme}://{_login(parts.username, parts.password, password)}{plain}{suffix}"
    return BrokerUrl(client=url, celery=url, shown=f"{parts.scheme}://{plain}")


def _parse_socket(text: str, password: str | None) -> BrokerUrl:
    rest = text.partition("://")[2]
    login, _, path = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    path, _, query = path.partition("?")
    if not path.startswith("/"):
        raise SettingError(
            "MILL_REDIS_URL cannot be used: a socket's path begins with /, as in unix:///run/redis.sock."
        )
    options = dict(urllib.parse.parse_qsl(query))
    database = _database(options.get("db") or options.get("virtual_host") or "")
    user, _, secret = login.partition(":")
    login = _login(user, secret, password)
    return BrokerUrl(
        client=f"unix://{login}{path}?db={database}",
        celery=f"redis+socket://{login}{path}?virtual_host={database}",
        shown=f"unix://{path}?db={database}",
    )


def _login(user: str | None, secret: str | None, password: str | None) -> str:
    """Return `user:password@` in the one encoding that both libraries decode alike; `secret` wins over `password`."""
    name = urllib.parse.quote(urllib.parse.unquote(user or ""), safe="")
    word = urllib.parse.quote(urllib.parse.unquote(secret) if secret else password or "", safe="")
    if word:
        return f"{name}:{word}@"
    return f"{name}@" if name else ""


def _database(text: str) -> int:
    number = int(text or 0)
    if number < 0:
        raise ValueError("negative")
    return number


def connect(
    url: BrokerUrl,
    *,
    connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    timeout_s: float = _SOCKET_TIMEOUT_S,
    retry: Retry | None = None,
    most: int = _MOST_CONNECTIONS,
) -> Client:
    """Return a client that survives dropped connections; it connects at the first command.

    Its connections, `most` at the same time, are shared by any number of threads: the next one waits for one to come
    free. Without `retry` a failed command is tried again as redis-py does.
    """
    patience = {} if retry is None else {"retry": retry}
    pool = redis.BlockingConnectionPool.from_url(
        url.client,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=timeout_s,
        health_check_interval=25,
        max_connections=most,
        timeout=timeout_s,
        **patience,
    )
    if url.login is not None:
        pool.connection_kwargs.update(username=None, password=None, credential_provider=url.login)
    return redis.Redis.from_pool(pool)


def connect_for_command(url: BrokerUrl, *, hanging: bool = False) -> Client:
    """Return a client for a command: it reconnects once, and gives a server up that says nothing for some seconds.

    One that is `hanging`, as was seen just now, is given up sooner.
    """
    timeout_s = _HANGING_TIMEOUT_S if hanging else _COMMAND_TIMEOUT_S
    return connect(
        url, connect_timeout_s=min(timeout_s, _CONNECT_TIMEOUT_S), timeout_s=timeout_s, retry=_reconnecting()
    )


def _reconnecting() -> Retry:
    """Return what takes a dropped connection up again, once, and asks no server twice that does not answer."""
    return Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,))


def check(url: BrokerUrl) -> None:
    """Prove within a few seconds that the server answers, takes the password and does not evict.

    Raises BrokerUnreachableError or BrokerError.
    """
    client = connect(url, timeout_s=_CONNECT_TIMEOUT_S, retry=_reconnecting(), most=1)
    with translated(url), contextlib.closing(client):
        memory = client.info("memory")
    if danger := eviction_danger(memory, str(url)):
        raise BrokerError(danger)


def eviction_danger(memory: Mapping[str, Any], shown: str) -> str | None:
    """Return a sentence if a server whose INFO says this of its memory may drop keys."""
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if int(memory.get("maxmemory", 0)) > 0 and policy != "noeviction":
        return (
            f"Redis at {shown} evicts keys when it is full (maxmemory-policy {policy}), which would drop queued "
            "prompts in silence; run: redis-cli CONFIG SET maxmemory-policy noeviction."
        )
    return None


def translate(error: Exception, url: BrokerUrl) -> BrokerError:
    """Return the one-sentence error for what a Redis client raised."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return BrokerUnreachableError(
            f"Redis at {url} refuses the user or password; check MILL_REDIS_URL, MILL_REDIS_PASSWORD or "
            "MILL_REDIS_PASSWORD_FILE."
        )
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return BrokerFullError(
            f"Redis at {url} is full (maxmemory reached); give it more memory, then run the same command again."
        )
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return BrokerError(f"Redis at {url} is read-only (a replica?); point MILL_REDIS_URL at the primary.")
    if isinstance(error, (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)):
        if url.shown.startswith("rediss://"):
            return BrokerUnreachableError(
                f"Redis at {url} cannot be reached with TLS; check that a server speaks TLS there and that its "
                "certificate is trusted, or use redis://."
            )
        return BrokerUnreachableError(
            f"Redis at {url} cannot be reached; start it (producer up starts one) or set MILL_REDIS_URL."
        )
    return BrokerError(f"Redis at {url} refused a command: {error}.")


@contextlib.contextmanager
def translated(url: BrokerUrl) -> Iterator[None]:
    """Turn what a Redis client raises into one-sentence errors."""
    try:
        yield
    except redis.exceptions.RedisError as error:
        raise translate(error, url) from error


def text(value: EncodableT | None) -> str:
    """Return a reply as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
