"""What chaos runs have brought to light, each as a small test of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from redis import Redis

from app.errors import DiskFullError
from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import assert_balanced, assert_quiet, prompts
from tests.support.folders import largest_file, pen
from tests.support.mill import Mill
from tests.support.processes import PROJECT_ROOT, run_command, wait_until

_READ_AND_CLOSE = """
import pathlib, sys
from app.ledger import Ledger
from app.places import DatasetFolder
with Ledger.open(DatasetFolder(pathlib.Path(sys.argv[1]))) as ledger:
    ledger.catch_up()
    print(sorted(ledger.look_up(["first", "second"])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_opening_a_folder_anew_keeps_the_locks_on_its_index(tmp_path: Path) -> None:
    """A process that opens a folder twice still holds the index's locks, so that no other one deletes the log of it."""
    folder = DatasetFolder(tmp_path / "d")
    with Ledger.open(folder) as ledger:
        ledger.commit([pen("first")])
        assert ledger.totals().samples == 1
        with Ledger.open(folder) as second:
            assert second.totals().samples == 1
        done = run_command([sys.executable, "-c", _READ_AND_CLOSE, str(folder.path)], env={}, cwd=PROJECT_ROOT)
        assert done.stdout == "['first']\n", done

        held = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [path for path in held if path.startswith(str(folder.index)) and path.endswith("(deleted)")]
        ledger.commit([pen("second")])
    done = run_command([sys.executable, "-c", _READ_AND_CLOSE, str(folder.path)], env={}, cwd=PROJECT_ROOT)
    assert done.stdout == "['first', 'second']\n", done


def test_a_folder_on_a_full_disk_is_left_as_it_was(tmp_path: Path) -> None:
    """The proof that a folder can be written leaves no file behind when there is no room for it."""
    folder = DatasetFolder(tmp_path)
    with largest_file(1), pytest.raises(DiskFullError):
        Ledger(folder).check_writable()
    assert not list(tmp_path.iterdir())
    assert not folder.lines(Kind.ACCEPTED).exists()


def _refused(client: Redis) -> int:
    """Return how many commands Redis has refused because it is full."""
    return int(client.info("errorstats").get("errorstat_OOM", {}).get("count", 0))


@pytest.mark.slow
@pytest.mark.fault
def test_a_full_redis_is_waited_for_with_the_connections_that_there_are(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory
) -> None:
    """While Redis takes no writes a worker opens no ever new connections and logs no tracebacks; then it goes on."""
    own = new_redis(aof=True)
    mill.env["MILL_REDIS_URL"] = own.url
    model_server(latency_s=0.1)
    rows = prompts(200)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(8)
    client = own.client()
    before = len(client.client_list())

    client.config_set("maxmemory", 2**20)
    worker.wait_for_output("Redis takes no writes")
    refused = _refused(client)
    wait_until(lambda: _refused(client) >= refused + 10, 60, "more writes that Redis refuses", detail=mill.tails)
    during = len(client.client_list())
    client.config_set("maxmemory", 0)
    worker.wait_for_output("Redis takes writes again")
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert during < before + 8
    assert_balanced(mill, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())
