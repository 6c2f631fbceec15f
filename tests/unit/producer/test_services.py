"""How background processes are recognised, stopped and read, and what `up` says before it starts anything."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app.errors import MillError, SettingError, StoreError, UnwritableError, UsageError
from app.places import StateDir
from app.settings import BrokerSettings, ServerSettings, StoreSettings, WorkerSettings, child_environment
from producer import local_broker, local_flower, ports, processes, service_book, service_logs, state_lock
from producer.processes import Process
from producer.service_book import Services
from producer.services import LocalServices
from tests.support.processes import wait_until

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    """Collect processes that are killed after the test."""
    made: list[Process] = []
    yield made
    for process in made:
        processes.signal_process(process, signal.SIGKILL)
    processes.wait_gone(made, seconds=10)


def spawn(folder: Path, code: str, name: str = "thing") -> Process:
    """Start a Python program in the background."""
    command = [sys.executable, "-c", code]
    return processes.start(name, command, log=folder / f"{name}.log", env=child_environment())


def local(folder: Path, **server: object) -> LocalServices:
    """Return services of a state folder of the test's own."""
    return LocalServices(
        broker=BrokerSettings(),
        store=StoreSettings(prepared_dir=folder / "prepared", state_dir=folder / "state"),
        server=ServerSettings(**server),  # type: ignore[arg-type]
        worker=WorkerSettings(),
    )


def test_a_process_runs_in_a_session_of_its_own(tmp_path: Path, started: list[Process]) -> None:
    """Ctrl-C in the terminal that started a service does not reach it."""
    process = spawn(tmp_path, "import time; time.sleep(600)")
    started.append(process)
    assert processes.is_alive(process)
    assert os.getsid(process.pid) == process.pid


def test_a_process_that_ended_is_not_alive(tmp_path: Path) -> None:
    """An ended child counts as ended at once, though its parent lives and has not asked for it."""
    process = spawn(tmp_path, "print('done')")
    assert processes.wait_gone([process], seconds=30) == ()
    assert processes.own_words(process) == "done\n"


def test_a_recycled_process_id_is_never_signalled(tmp_path: Path, started: list[Process]) -> None:
    """A process that only has the recorded id, not the recorded start, is somebody else's."""
    process = spawn(tmp_path, "import time; time.sleep(600)")
    started.append(process)
    predecessor = msgspec.structs.replace(process, started="an earlier moment")
    assert not processes.is_alive(predecessor)
    assert not processes.signal_process(predecessor, signal.SIGKILL)
    assert processes.is_alive(process)


def test_a_process_that_ignores_sigterm_is_killed_with_a_message(tmp_path: Path, started: list[Process]) -> None:
    """Stopping ends for certain, and says when it took a SIGKILL."""
    process = spawn(tmp_path, STUBBORN)
    started.append(process)
    wait_until(lambda: "ready" in processes.own_words(process), 30, "the program's first line")
    said: list[str] = []
    processes.stop([process], seconds=0.2, say=said.append)
    assert not processes.is_alive(process)
    assert len(said) == 1
    assert "was killed" in said[0]


def test_waiting_for_a_process_that_fails_quotes_its_reason(tmp_path: Path) -> None:
    """Of a long log, the line that tells the error is the one people get to read."""
    process = spawn(tmp_path, "import sys; print('hello'); sys.exit('Error: the port is taken')")
    trouble = processes.wait_ready(process, lambda: False, seconds=30)
    assert trouble == "it ended: Error: the port is taken"


def test_a_log_only_counts_from_where_the_process_began(tmp_path: Path) -> None:
    """What an earlier process of the same name wrote is not taken for the new one's words."""
    first = spawn(tmp_path, "print('ready')")
    processes.wait_gone([first], seconds=30)
    second = spawn(tmp_path, "print('other')")
    processes.wait_gone([second], seconds=30)
    assert processes.own_words(second) == "other\n"


def test_following_yields_new_lines_whole_and_survives_a_log_that_begins_anew(tmp_path: Path) -> None:
    """A half-written line waits for its end, whatever bytes it holds; a log that was cut is read from its beginning."""
    state = StateDir(tmp_path)
    state.logs.mkdir()
    log = state.logs / "mill1.log"
    log.write_bytes(b"old\n")
    lines = service_logs.logs(state, follow=True, lines=1)
    assert next(lines) == ("mill1", "old")
    writer = threading.Timer(0.3, log.write_bytes, [b"old\n\xff\xfenew\nhalf"])
    writer.start()
    assert next(lines) == ("mill1", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}new")
    writer.join()
    log.write_bytes(b"n\n")
    assert next(lines) == ("mill1", "n")
    (state.logs / "mill2.log").write_bytes(b"a worker that came later\n")
    assert next(lines) == ("mill2", "a worker that came later")


def test_logs_are_chosen_by_the_beginning_of_a_name(tmp_path: Path) -> None:
    """`producer logs mill` shows every worker's last lines; a name without a log is refused with those there are."""
    state = StateDir(tmp_path)
    with pytest.raises(UsageError, match="nothing was started"):
        service_logs.log_files(state)
    state.logs.mkdir()
    for name in ("mill1", "mill2", "flower"):
        (state.logs / f"{name}.log").write_text(f"first\nlast of {name}\n")
    assert list(service_logs.logs(state, "mill", lines=1)) == [("mill1", "last of mill1"), ("mill2", "last of mill2")]
    followed = service_logs.logs(state, "flower", follow=True, lines=2)
    assert [line for _name, line in itertools.islice(followed, 2)] == ["first", "last of flower"]
    with pytest.raises(UsageError, match="flower, mill1, mill2"):
        service_logs.log_files(state, "milk")


def test_flower_moves_to_the_next_free_port() -> None:
    """Another program on Flower's port costs a different port, not the dashboard."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        plan = local_flower.plan({"FLOWER_PORT": str(taken), "FLOWER_URL_PREFIX": "/mill/"})
    assert plan.first_port == taken
    assert plan.port > taken
    assert plan.url == f"http://127.0.0.1:{plan.port}/mill"
    assert f"--port={plan.port}" in plan.arguments
    assert not plan.answers()


@pytest.mark.parametrize("port", ["0", "70000", "five", "-1"])
def test_a_flower_port_that_is_none_is_refused(port: str) -> None:
    """A wrong FLOWER_PORT is named before anything starts."""
    with pytest.raises(SettingError, match="FLOWER_PORT"):
        local_flower.plan({"FLOWER_PORT": port})


def test_no_free_port_for_flower_is_one_sentence() -> None:
    """When no port of the machine's address can be had, the sentence says which setting helps."""
    with pytest.raises(MillError, match="set FLOWER_PORT"):
        local_flower.plan({"FLOWER_ADDRESS": "203.0.113.7"})


def test_free_ports_lie_below_the_range_of_outgoing_connections() -> None:
    """A broker that comes back finds its port free, and nobody who knocks meanwhile connects to himself."""
    port = ports.free_port()
    assert 15_000 <= port < 32_000
    assert ports.is_free(port)


def test_workers_without_a_model_server_are_refused(tmp_path: Path) -> None:
    """`up` names the missing setting before it starts anything."""
    with pytest.raises(SettingError, match="MILL_MODEL_URLS"):
        local(tmp_path).up(workers=1)
    assert not (tmp_path / "state").exists()


def test_scaling_what_does_not_run_is_refused(tmp_path: Path) -> None:
    """`scale` before `up` says what to type."""
    with pytest.raises(UsageError, match="producer up --workers"):
        local(tmp_path).scale(3)


def test_down_with_nothing_running_is_harmless(tmp_path: Path) -> None:
    """`down` may be typed any number of times."""
    assert local(tmp_path).down() == ()
    assert local(tmp_path).down() == ()


def test_an_unwritable_state_folder_is_one_sentence(tmp_path: Path) -> None:
    """A file in the folder's place is named, with the setting that moves the folder."""
    (tmp_path / "state").write_text("a file")
    with pytest.raises(UnwritableError, match="MILL_STATE_DIR"):
        local(tmp_path).down()


def test_a_damaged_record_of_services_counts_as_none(tmp_path: Path) -> None:
    """A file cut by a crash does not stop the commands that would replace it."""
    services = local(tmp_path)
    services.store.state.path.mkdir()
    services.store.state.services.write_text('{"workers": [')
    services.store.state.broker.write_text("{")
    assert services.running() == Services()


def test_only_what_still_runs_is_reported(tmp_path: Path, started: list[Process]) -> None:
    """Dead processes drop out of the record; what is new since before is told apart."""
    alive = spawn(tmp_path, "import time; time.sleep(600)", "mill1")
    dead = spawn(tmp_path, "pass", "mill2")
    started.append(alive)
    processes.wait_gone([dead], seconds=30)
    state = StateDir(tmp_path)
    service_book.write(state, Services(workers=(alive, dead), flower=dead, flower_url="http://gone/", beside=(dead,)))
    now = service_book.read(state)
    assert now == Services(workers=(alive,))
    assert service_book.minus(now, Services()).all == (alive,)
    assert service_book.minus(now, now).all == ()


def test_the_record_with_the_password_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """Other people on a shared machine cannot read the broker's password."""
    path = tmp_path / "broker.json"
    path.write_text("{}")
    path.chmod(0o644)
    local_broker.write_private(path, b"secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_held_state_folder_makes_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two `up` at once do not start two brokers: the second says that it waits, and gives up with one sentence."""
    monkeypatch.setattr(state_lock, "WAIT_S", 0.3)
    state, said = StateDir(tmp_path), list[str]()
    with state_lock.held(state, say=said.append), pytest.raises(StoreError, match="wait until"):  # noqa: SIM117
        with state_lock.held(state, say=said.append):
            pytest.fail("two held it")
    assert said == ["Waiting for another command that starts or stops services here."]
    with state_lock.held(state, say=said.append):
        assert len(said) == 1
