"""Every form of a Redis URL in every part of the product: TLS, users, odd passwords; bad ones end at once."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.ports import free_port
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import Finished
from tests.support.redis_server import RedisServer
from tests.support.tls import Authority, TlsDoor, find_openssl

_SECRET = "pl#um/s[1]@7%:?"  # noqa: S105  the test's own server
_QUOTED = urllib.parse.quote(_SECRET, safe="")
_SOON_S = 12.0
"""Seconds within which a bad URL is told, on a busy machine."""


@pytest.fixture
def locked_redis(new_redis: RedisFactory) -> RedisServer:
    """Return a Redis with a password of odd characters, and a user beside the default one."""
    server = new_redis()
    client = server.client()
    client.execute_command("ACL", "SETUSER", "miller", "on", f">{_SECRET}", "~*", "&*", "+@all")
    client.config_set("requirepass", _SECRET)
    return server


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return a certificate that no machine trusts by itself."""
    if find_openssl() is None:
        pytest.skip("openssl makes the certificates")
    return Authority(tmp_path / "tls")


@pytest.fixture
def tls(authority: Authority, new_redis: RedisFactory) -> Iterator[TlsDoor]:
    """Return a Redis that speaks TLS."""
    with TlsDoor(authority, new_redis().port) as door:
        yield door


def _work_through(mill: Mill, server_model: ModelServerFactory) -> str:
    """Enqueue, work and look, and return all that was said."""
    server_model()
    rows = prompts(6)
    said = mill.enqueue(rows)
    worker = mill.worker(concurrency=2)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    status = mill.run("status")
    assert worker.stop() == 0
    assert_quiet(worker.output())
    return said.stdout + said.stderr + status.stdout + status.stderr + worker.output()


@pytest.mark.slow
@pytest.mark.parametrize("login", [f":{_QUOTED}@", f"miller:{_QUOTED}@"], ids=["password", "user"])
def test_a_quoted_password_works_everywhere(
    mill: Mill, locked_redis: RedisServer, model_server: ModelServerFactory, login: str
) -> None:
    """A percent-encoded password of odd characters serves enqueue, worker and status, and none of them shows it."""
    mill.env["MILL_REDIS_URL"] = f"redis://{login}127.0.0.1:{locked_redis.port}/1"
    said = _work_through(mill, model_server)
    for piece in (_SECRET, _QUOTED, "pl#um", "s[1]"):
        assert piece not in said


@pytest.mark.slow
def test_redis_over_tls_with_a_private_authority(
    mill: Mill, authority: Authority, tls: TlsDoor, model_server: ModelServerFactory
) -> None:
    """With rediss:// and ssl_ca_certs everything runs over TLS, the certificate checked."""
    mill.env["MILL_REDIS_URL"] = f"rediss://127.0.0.1:{tls.port}/0?ssl_ca_certs={authority.authority}"
    said = _work_through(mill, model_server)
    assert f"rediss://127.0.0.1:{tls.port}/0" in said


def _assert_told_at_once(finished: Finished, began: float, *words: str) -> None:
    assert finished.code != 0
    assert time.monotonic() - began < _SOON_S
    lines = finished.stderr.strip().splitlines()
    assert len(lines) == 1, finished.stderr
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs=/nowhere/ca.pem"])
def test_a_certificate_that_nobody_trusts_is_told(mill: Mill, tls: TlsDoor, query: str) -> None:
    """A certificate of an unknown authority, or an authority's file that is not there, is one sentence at once."""
    mill.env["MILL_REDIS_URL"] = f"rediss://127.0.0.1:{tls.port}/0{query}"
    began = time.monotonic()
    _assert_told_at_once(mill.enqueue(["one"], expect=None), began, "cannot be reached with TLS", "certificate")


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://:pl#um@127.0.0.1:PORT/0", "percent-encode"),
        ("redis://:pl/um@127.0.0.1:PORT/0", "percent-encode"),
        ("redis://:pl[um@127.0.0.1:PORT/0", "percent-encode"),
        ("redis://:plum-wrong@127.0.0.1:PORT/0", "refuses the user or password"),
        ("redis://nobody:plum-wrong@127.0.0.1:PORT/0", "refuses the user or password"),
        ("redis://127.0.0.1:PORT/0", "refuses the user or password"),
        ("rediss://127.0.0.1:PORT/0", "cannot be reached with TLS"),
        ("redis://127.0.0.1:NOBODY/0", "cannot be reached"),
        ("http://127.0.0.1:PORT/plum", "its scheme is not known"),
        ("127.0.0.1:PORT", "its scheme is not known"),
        ("unix:///nowhere/plum.sock", "cannot be reached"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_at_once(mill: Mill, locked_redis: RedisServer, url: str, word: str) -> None:
    """Enqueue ends within seconds with one sentence, without a piece of the secret."""
    mill.env["MILL_REDIS_URL"] = url.replace("PORT", str(locked_redis.port)).replace("NOBODY", str(free_port()))
    began = time.monotonic()
    said = mill.enqueue(["one"], expect=None)
    _assert_told_at_once(said, began, word)
    for piece in ("pl#", "pl/", "pl[", "plum-", "um@"):
        assert piece not in said.stderr


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("redis://:pl#um@127.0.0.1:PORT/0", "percent-encode"),
        ("redis://:plum-wrong@127.0.0.1:PORT/0", "refuses the user or password"),
        ("redis://127.0.0.1:NOBODY/0", "cannot be reached"),
    ],
)
def test_a_worker_whose_url_cannot_be_used_ends_at_once(
    mill: Mill, locked_redis: RedisServer, model_server: ModelServerFactory, url: str, word: str
) -> None:
    """A worker says in one line what is wrong and ends; it does not try a wrong password again and again."""
    model_server()
    mill.env["MILL_REDIS_URL"] = url.replace("PORT", str(locked_redis.port)).replace("NOBODY", str(free_port()))
    began = time.monotonic()
    worker = mill.worker(wait=False)
    assert worker.wait(_SOON_S) != 0
    assert time.monotonic() - began < _SOON_S
    told = [line for line in worker.output().splitlines() if line.startswith("promptmill: ")]
    assert len(told) == 1
    assert word in told[0]
    assert_quiet(worker.output())
    assert "plum" not in worker.output()
