"""`celery -A app flower` is local, bounded, and shows samples and the reasons of failures; the user's options win."""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import pytest

from app.dashboard import defaults
from producer.ports import free_port
from tests.conftest import Broker
from tests.support.processes import ManagedProcess, run_command, wait_until

FlowerFactory = Callable[..., ManagedProcess]


@pytest.fixture
def port() -> int:
    """Return a free port."""
    return free_port()


@pytest.fixture
def flower(broker: Broker, port: int, tmp_path: Path) -> Iterator[FlowerFactory]:
    """Start the shipped Flower on the port, with variables and arguments of the test's own."""
    running: list[ManagedProcess] = []

    def start(*arguments: str, **variables: str) -> ManagedProcess:
        env = {"MILL_REDIS_URL": broker.url, "MILL_KEY_PREFIX": broker.key_prefix, **variables}
        command = [sys.executable, "-m", "celery", "-A", "app", "flower", f"--port={port}", *arguments]
        running.append(ManagedProcess(command, log_dir=tmp_path, name="flower", env=env))
        running[-1].wait_for_output("Visit me at", 60)
        return running[-1]

    yield start
    for process in running:
        process.close()


def get(port: int, path: str, login: str | None = None) -> tuple[int, str]:
    """Return the status and the text of a page."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - our own http address
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def columns(page: str) -> list[str]:
    """Return the columns of the tasks page."""
    return re.findall(r'data-column="(\w+)"', page)


def rows(port: int) -> list[dict[str, Any]]:
    """Return the rows of the tasks page, as the page itself asks for them."""
    query = "draw=1&start=0&length=10&order[0][column]=0&order[0][dir]=desc&columns[0][data]=received"
    _status, text = get(port, f"/tasks/datatable?{query}")
    found = json.loads(text)["data"]
    assert isinstance(found, list)
    return found


def test_flower_is_local_and_shows_a_failed_sample_readably(
    flower: FlowerFactory, broker: Broker, port: int, tmp_path: Path
) -> None:
    """Without any option: this machine only, dataset and sample id first, the reason without its class name."""
    flower(MILL_STATE_DIR=str(tmp_path / "state"))
    assert get(port, "/healthcheck") == (200, "OK")
    assert columns(get(port, "/tasks")[1])[:3] == ["args", "state", "exception"]
    assert (tmp_path / "state" / "flower-cookie-secret").stat().st_mode & 0o777 == 0o600
    if sys.platform == "linux":
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)

    send_events(broker)
    found = wait_until(lambda: [row for row in rows(port) if row["state"] == "FAILURE"], 30, "the failed sample's row")
    assert found[0]["args"] == "news s-7"
    assert found[0]["uuid"] == "news:s-7"
    assert found[0]["exception"] == "timeout after 4 attempts: no answer within 1800 s"
    wait_until(lambda: 'le="1800.0"' in get(port, "/metrics/flower")[1], 30, "a bucket for half an hour")


def send_events(broker: Broker) -> None:
    """Tell Flower of a failed sample and a slow one, as a worker does."""
    app = celery.Celery(broker=broker.url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": broker.key_prefix}
    wait_until(lambda: broker.client.pubsub_numpat() > 0, 30, "Flower's subscription to events")
    with app.connection_for_write() as connection, app.events.Dispatcher(connection, hostname="w@test") as dispatcher:
        dispatcher.send("task-received", uuid="news:s-7", name="generate", args="news s-7", kwargs="", retries=0)
        reason = "SampleFailedError('timeout after 4 attempts: no answer within 1800 s\\nlast answer: 504')"
        dispatcher.send("task-failed", uuid="news:s-7", exception=reason, traceback="")
        dispatcher.send("task-succeeded", uuid="news:s-8", name="generate", runtime=1700.0, result="")
    app.close()


def test_the_users_variables_and_arguments_win(flower: FlowerFactory, port: int) -> None:
    """A FLOWER_ variable beats our defaults, a command-line option beats both, and a login is asked for."""
    flower(
        "--url_prefix=mill",
        FLOWER_TASKS_COLUMNS="name,worker",
        FLOWER_URL_PREFIX="other",
        FLOWER_BASIC_AUTH="me:pass word",
    )
    assert get(port, "/mill/tasks")[0] == 401
    status, page = get(port, "/mill/tasks", login="me:pass word")
    assert (status, columns(page)) == (200, ["name", "worker"])


def test_flower_refuses_the_network_without_a_login(broker: Broker, port: int, tmp_path: Path) -> None:
    """An address that others can reach is refused with one sentence, whichever way it was given."""
    command = [sys.executable, "-m", "celery", "-A", "app", "flower", f"--port={port}"]
    by_option = run_command([*command, "--address=0.0.0.0"], env={"MILL_REDIS_URL": broker.url}, cwd=tmp_path)
    by_variable = run_command(command, env={"MILL_REDIS_URL": broker.url, "FLOWER_ADDRESS": "::"}, cwd=tmp_path)
    for done in (by_option, by_variable):
        assert done.code == 1
        assert "Traceback" not in done.stderr
        assert "FLOWER_BASIC_AUTH" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_login(address: str) -> None:
    """Every spelling of this machine's own address is let through."""
    defaults.require_login_beyond_localhost({"address": address})


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "10.0.0.5", "gpu-host"])  # noqa: S104 - these are refused
def test_other_addresses_need_a_login(address: str) -> None:
    """Any address that is not surely this machine's own needs a login, and is fine with one, or behind a socket."""
    with pytest.raises(defaults.RefusedAddressError, match="without a login"):
        defaults.require_login_beyond_localhost({"address": address})
    for way in ({"basic_auth": ["me:secret"]}, {"auth": ".*@example.org"}, {"unix_socket": "/run/flower.sock"}):
        defaults.require_login_beyond_localhost({"address": address, **way})


@pytest.mark.parametrize("login", ["", ":", "me:", ":secret", "me"])
def test_half_a_login_is_refused(login: str) -> None:
    """A login without a user or a password, which Flower would take, is refused even on this machine."""
    with pytest.raises(defaults.RefusedAddressError, match="lacks its user or its password"):
        defaults.require_login_beyond_localhost({"basic_auth": [login]})


def test_only_what_nobody_set_is_set(tmp_path: Path) -> None:
    """Options that the user has given are left out of the configuration, which would beat them."""
    secret = tmp_path / "state" / "secret"
    given = {"address": "127.0.0.1", "max_tasks": 7}
    chosen = defaults.flower_options(given, cookie_file=secret)
    assert not set(given) & set(chosen)
    assert chosen["cookie_secret"] == secret.read_text()
    again = defaults.flower_options({"cookie_secret": "mine"}, cookie_file=secret)
    assert "cookie_secret" not in again
    assert again["max_tasks"] == defaults.MAX_TASKS


def test_the_login_secret_lasts(tmp_path: Path) -> None:
    """A restart of Flower logs nobody out; where the secret cannot be kept, Flower makes its own."""
    path = tmp_path / "secret"
    assert defaults.kept_secret(path) == defaults.kept_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("")
    assert defaults.kept_secret(tmp_path / "file" / "secret") is None


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("SampleFailedError('no answer within 1800 s')", "no answer within 1800 s"),
        ('workers.Error("it\'s full", 3)', "it's full"),
        ("Error('first\\nsecond')", "first"),
        ("Error('cut off in the mid", "Error('cut off in the mid"),
        ("Error(unquoted reason)", "unquoted reason"),
        ("Error()", "Error()"),
        ("Error('')", "Error('')"),
        ("Worker was lost", "Worker was lost"),
        (None, None),
    ],
)
def test_reasons_lose_their_class_and_nothing_else(told: object, shown: object) -> None:
    """The first line of the message is shown; what is not an exception's text form stays as it is."""
    assert defaults.readable_reason(told) == shown
    assert defaults.format_task(types.SimpleNamespace(exception=told)).exception == shown


def test_a_long_reason_is_cut() -> None:
    """A server's endless error page does not fill the dashboard."""
    shown = defaults.readable_reason(f"Error({'x' * 10_000!r})")
    assert len(shown) == defaults.MAX_REASON_CHARS
