"""Redis URLs in every form, and what a server must be like."""

from __future__ import annotations

import contextlib
import json
import traceback
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import kombu
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from app import broker, settings
from app.broker import BrokerUrl, Client
from app.errors import BrokerError, BrokerFullError, BrokerUnreachableError, SettingError
from app.settings import BrokerSettings, StoreSettings
from producer.ports import free_port
from tests.conftest import RedisFactory

NASTY_PASSWORD = "pa#ss/w[o]?r:d@%&+ é"  # noqa: S105  every character that means something in a URL


@contextlib.contextmanager
def _connected(url: BrokerUrl) -> Iterator[Client]:
    client = broker.connect(url)
    yield client
    client.close()


def _kombu_ping(url: BrokerUrl, prefix: str) -> bytes | None:
    """Let kombu, as Celery uses it, put a message on a queue; return what `prefix`'s queue then holds."""
    with kombu.Connection(url.celery, transport_options={"global_keyprefix": prefix}) as connection:
        queue = connection.SimpleQueue("hello")
        queue.put("world")
        queue.close()
    with _connected(url) as client:
        return client.lpop(f"{prefix}hello")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "shown", "url"),
    [
        ("redis://", "redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://h", "redis://h:6379/0", "redis://h:6379/0"),
        ("redis://h:7000/3", "redis://h:7000/3", "redis://h:7000/3"),
        ("redis://h/3/", "redis://h:6379/3", "redis://h:6379/3"),
        ("redis://h?db=3", "redis://h:6379/3", "redis://h:6379/3"),
        ("redis://:pw@h/1", "redis://h:6379/1", "redis://:pw@h:6379/1"),
        ("redis://me:p%23w@h/1", "redis://h:6379/1", "redis://me:p%23w@h:6379/1"),
        ("redis://me@h", "redis://h:6379/0", "redis://me@h:6379/0"),
        ("redis://:a:b@c@h", "redis://h:6379/0", "redis://:a%3Ab%40c@h:6379/0"),
        ("redis://:50%@h", "redis://h:6379/0", "redis://:50%25@h:6379/0"),
        ("redis://[::1]:7000/0", "redis://[::1]:7000/0", "redis://[::1]:7000/0"),
        ("rediss://h", "rediss://h:6379/0", "rediss://h:6379/0?ssl_cert_reqs=required"),
        ("rediss://h?ssl_cert_reqs=none", "rediss://h:6379/0", "rediss://h:6379/0?ssl_cert_reqs=none"),
        (
            "rediss://h/1?ssl_ca_certs=/ca.pem",
            "rediss://h:6379/1",
            "rediss://h:6379/1?ssl_ca_certs=%2Fca.pem&ssl_cert_reqs=required",
        ),
    ],
)
def test_network_urls(text: str, shown: str, url: str) -> None:
    """A URL is completed the same way for both libraries, and shown without user and password."""
    parsed = broker.parse(text)
    assert (parsed.shown, parsed.client, parsed.celery, str(parsed)) == (shown, url, url, shown)


@pytest.mark.parametrize(
    ("text", "client", "celery"),
    [
        ("unix:///run/r.sock", "unix:///run/r.sock?db=0", "redis+socket:///run/r.sock?virtual_host=0"),
        ("redis+socket:///run/r.sock", "unix:///run/r.sock?db=0", "redis+socket:///run/r.sock?virtual_host=0"),
        ("unix:///run/r.sock?db=2", "unix:///run/r.sock?db=2", "redis+socket:///run/r.sock?virtual_host=2"),
        ("redis+socket:///r?virtual_host=2", "unix:///r?db=2", "redis+socket:///r?virtual_host=2"),
        ("unix://:p%23@/r", "unix://:p%23@/r?db=0", "redis+socket://:p%23@/r?virtual_host=0"),
        ("unix://me:pw@/r", "unix://me:pw@/r?db=0", "redis+socket://me:pw@/r?virtual_host=0"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock?db=0", "redis+socket:///run/a@b.sock?virtual_host=0"),
    ],
)
def test_socket_urls(text: str, client: str, celery: str) -> None:
    """A socket may be written in either library's spelling; both get their own."""
    parsed = broker.parse(text)
    assert (parsed.client, parsed.celery) == (client, celery)
    assert parsed.shown == f"unix:///{client.replace('@/', '//').rpartition('//')[2].removeprefix('/')}"


@pytest.mark.parametrize("place", ["redis://:{}@h/0", "rediss://me:{}@h:7000"])
@pytest.mark.parametrize("password", ["Qx#Zy", "Qx/Zy", "Qx[Zy", "Qx?Zy", "77/Zy", "77#Zy", "77?Zy", "?Zy", "#", "/"])
def test_raw_passwords_are_refused_unseen(place: str, password: str) -> None:
    """A password that cuts the URL in two is refused with advice and without any part of it."""
    with pytest.raises(SettingError, match=r"^MILL_REDIS_URL cannot be used: ") as caught:
        broker.parse(place.format(password))
    shown = str(caught.value)
    assert not {part for part in ("Qx", "Zy", "77") if part in shown}
    assert "percent-encode" in shown
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("place", ["unix://:{}@/r", "redis+socket://:{}@/r?db=0"])
def test_raw_passwords_of_sockets_are_understood(place: str) -> None:
    """Before a socket's path a password can be told apart as it is, and is encoded for both libraries."""
    assert broker.parse(place.format("Q#/[?:@Z")) == broker.parse(place.format("Q%23%2F%5B%3F%3A%40Z"))


@given(password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_any_encoded_password_arrives(password: str) -> None:
    """Percent-encoded, any password reaches both libraries as it is; given apart from the URL it needs no encoding."""
    encoded = urllib.parse.quote(password, safe="")
    for parsed in (broker.parse(f"redis://:{encoded}@h/1"), broker.parse("redis://h/1", password=password)):
        connection = kombu.Connection(parsed.celery)
        assert connection.password == password
        assert (connection.hostname, connection.virtual_host) == ("h", "1")
        assert redis.connection.parse_url(parsed.client)["password"] == password
        assert parsed.shown == "redis://h:6379/1"
        assert repr(parsed) == "BrokerUrl(shown='redis://h:6379/1')"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "localhost:6379",
            "http://h",
            "amqp://h",
            "sentinel://h",
            "redis:/h",
            "redis://h:port/0",
            "redis://h:99999/0",
        ),
        *("redis://h/zero", "redis://h/-1", "redis://h/0?timeout=3", "redis://h/0/1", "unix://run/r.sock", "unix://"),
        *("unix:///r?db=one", "redis+socket:///r?virtual_host=-1"),
    ],
)
def test_urls_that_cannot_be_used(text: str) -> None:
    """What is no Redis URL is refused in one sentence that names the variable, with the code for wrong settings."""
    with pytest.raises(SettingError, match=r"^MILL_REDIS_URL cannot be used: .*\.$") as caught:
        broker.parse(text)
    assert caught.value.exit_code == 2


def _resolve(tmp_path: Path, **values: object) -> BrokerUrl:
    store = settings.load(StoreSettings, state_dir=tmp_path)
    return broker.resolve(settings.load(BrokerSettings, **values), store)


def test_password_from_variable_or_file(tmp_path: Path) -> None:
    """A password given apart is put into a URL without one; the URL's own wins, and the variable wins over the file."""
    file = tmp_path / "password"
    file.write_text(f"{NASTY_PASSWORD}\nsecond line\n", encoding="utf-8")
    quoted = urllib.parse.quote(NASTY_PASSWORD, safe="")
    assert _resolve(tmp_path, redis_url="redis://h", redis_password_file=file).client == f"redis://:{quoted}@h:6379/0"
    both = _resolve(tmp_path, redis_url="redis://me@h", redis_password="pw", redis_password_file=file)  # noqa: S106
    assert both.client == "redis://me:pw@h:6379/0"
    assert _resolve(tmp_path, redis_url="redis://:own@h", redis_password="pw").client == "redis://:own@h:6379/0"  # noqa: S106
    assert _resolve(tmp_path, redis_url="unix:///r", redis_password="p/").celery.startswith("redis+socket://:p%2F@/r")  # noqa: S106


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n"])
def test_a_password_file_without_a_password(content: bytes | None, tmp_path: Path) -> None:
    """A password file that is missing, empty or no text is named."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match=r"MILL_REDIS_PASSWORD_FILE cannot be used: .*/password"):
        _resolve(tmp_path, redis_url="redis://h", redis_password_file=file)


def test_the_server_of_producer_up_is_found(tmp_path: Path) -> None:
    """Without a URL the recorded local server is used, else Redis on this machine; a URL wins over both."""
    assert _resolve(tmp_path).shown == "redis://127.0.0.1:6379/0"
    (tmp_path / "broker.json").write_text(json.dumps({"url": "redis://127.0.0.1:7777/0", "pid": 1}))
    assert _resolve(tmp_path).shown == "redis://127.0.0.1:7777/0"
    assert _resolve(tmp_path, redis_url=" redis://h/1 ").shown == "redis://h:6379/1"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"url": 1}', b"{}", b"\xff"])
def test_a_damaged_record_of_the_local_server(content: bytes, tmp_path: Path) -> None:
    """A damaged note about the local server counts as none."""
    (tmp_path / "broker.json").write_bytes(content)
    assert _resolve(tmp_path).shown == "redis://127.0.0.1:6379/0"


def test_a_plain_server_is_good(new_redis: RedisFactory) -> None:
    """A server with Redis' own defaults passes, and kombu and our client meet in the same database."""
    url = broker.parse(f"{new_redis().url.removesuffix('/0')}/3")
    broker.check(url)
    assert _kombu_ping(url, "t:") is not None


def test_any_password_and_both_sockets_work(new_redis: RedisFactory, tmp_path: Path) -> None:
    """A password of special characters works over TCP and over either spelling of a socket, for kombu and for us."""
    socket = tmp_path / "r.sock"
    quoted = urllib.parse.quote(NASTY_PASSWORD, safe="")
    server = new_redis(options=["--unixsocket", str(socket)])
    server.client().config_set("requirepass", NASTY_PASSWORD)
    texts = [
        f"redis://:{quoted}@127.0.0.1:{server.port}/2",
        f"unix://:{quoted}@{socket}?db=2",
        f"redis+socket://:{quoted}@{socket}?virtual_host=2",
    ]
    for text in texts:
        url = broker.parse(text)
        with _connected(url) as client:
            broker.check(url)
            client.incr("met")
        assert _kombu_ping(url, "t:") is not None
    with _connected(broker.parse(texts[0])) as client:
        assert client.get("met") == b"3"


@pytest.mark.parametrize("password", [None, "wrong-hunter2"])
def test_a_wrong_password_is_told(password: str | None, new_redis: RedisFactory) -> None:
    """A missing or wrong password is told at once, without a word of it."""
    server = new_redis(password="right-hunter2")  # noqa: S106  the test's own server
    url = broker.parse(f"redis://127.0.0.1:{server.port}/0", password=password)
    with pytest.raises(BrokerUnreachableError) as caught:
        broker.check(url)
    assert str(caught.value).startswith(f"Redis at {url.shown} refuses the user or password")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_user_with_too_few_rights_is_told(new_redis: RedisFactory) -> None:
    """A user who may log in and nothing else gets the server's own reason, without the password."""
    server = new_redis()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "me", "on", ">hunter2", "+ping")
    url = broker.parse(f"redis://me:hunter2@127.0.0.1:{server.port}/0")
    with pytest.raises(BrokerError, match="refused a command") as caught:
        broker.check(url)
    assert "hunter2" not in str(caught.value)


def test_nobody_there() -> None:
    """Where no server listens, one sentence says so and how to get one."""
    url = broker.parse(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(BrokerUnreachableError, match=r"cannot be reached; start it"):
        broker.check(url)


def test_a_server_that_evicts_is_refused(new_redis: RedisFactory) -> None:
    """A server that would drop queued prompts for want of memory is refused, with the command that mends it."""
    server = new_redis(maxmemory="50mb", policy="allkeys-lru")
    url = broker.parse(server.url)
    with _connected(url) as client:
        with pytest.raises(BrokerError, match=r"allkeys-lru.*CONFIG SET maxmemory-policy noeviction"):
            broker.check(url)
        client.config_set("maxmemory-policy", "noeviction")
        broker.check(url)
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "0")
        broker.check(url)


def test_a_full_server_is_told(new_redis: RedisFactory) -> None:
    """A server whose memory is full is told as that, and what to do."""
    url = broker.parse(new_redis(maxmemory="1").url)
    with _connected(url) as client, pytest.raises(redis.exceptions.OutOfMemoryError) as caught:
        client.set("key", "value")
    error = broker.translate(caught.value, url)
    assert isinstance(error, BrokerFullError)
    assert "is full" in str(error)
    assert "give it more memory" in str(error)


@pytest.mark.parametrize(
    ("raised", "cls", "words"),
    [
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), BrokerError, "is read-only"),
        (redis.exceptions.TimeoutError("Timeout"), BrokerUnreachableError, "cannot be reached"),
        (redis.exceptions.ResponseError("ERR wrong"), BrokerError, "refused a command: ERR wrong."),
    ],
)
def test_other_troubles(raised: Exception, cls: type[BrokerError], words: str) -> None:
    """Whatever else a client raises becomes one sentence with the server's address."""
    error = broker.translate(raised, broker.parse("redis://:pw@h"))
    assert type(error) is cls
    assert str(error).startswith("Redis at redis://h:6379/0 ")
    assert words in str(error)


@pytest.mark.parametrize(("value", "expected"), [(b"a", "a"), ("a", "a"), (None, ""), (b"\xff", "\ufffd"), (7, "7")])
def test_replies_as_text(value: bytes | str | int | None, expected: str) -> None:
    """A reply reads as text, whatever the server sent."""
    assert broker.text(value) == expected
