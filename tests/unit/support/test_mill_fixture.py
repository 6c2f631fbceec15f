"""The fixtures give every process of a test one consistent environment."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from app.records import Kind
from tests.conftest import Broker, ModelServerFactory
from tests.support.jsonl_check import check_jsonl
from tests.support.mill import Mill


def test_environment_names_this_tests_servers(
    mill_env: dict[str, str], broker: Broker, model_server: ModelServerFactory, tmp_path: Path
) -> None:
    """The environment holds the test's Redis, folders and every model server asked for so far."""
    assert "MILL_MODEL_URLS" not in mill_env
    first, second = model_server(), model_server(model="other")
    assert mill_env["MILL_MODEL_URLS"] == f"{first.url},{second.url}"
    assert mill_env["MILL_REDIS_URL"] == broker.url
    assert mill_env["MILL_KEY_PREFIX"] == broker.key_prefix
    assert mill_env["MILL_PREPARED_DIR"] == str(tmp_path / "prepared")


def test_rows_are_written_as_jsonl(mill: Mill) -> None:
    """Rows become lines, and a plain text becomes a prompt."""
    path = mill.write_rows(["hello", {"id": "a", "prompt": "b\u2028c"}])
    assert check_jsonl(path).records == ({"prompt": "hello"}, {"id": "a", "prompt": "b\u2028c"})


def test_recorded_lines_are_awaited(mill: Mill) -> None:
    """Waiting for records counts whole lines of all final kinds, and says so when they do not come."""
    folder = mill.folder("Case X")
    folder.path.mkdir(parents=True)
    mill.out("Case X").write_bytes(b'{"id":"a"}\n{"id":"torn')
    append = threading.Timer(0.2, folder.lines(Kind.FAILED).write_bytes, [b'{"id":"b"}\n'])
    append.start()
    mill.wait_recorded(2, "Case X", timeout_s=10)
    append.join()
    with pytest.raises(AssertionError, match=r"3 recorded samples of Case X .*\nrecorded: 2"):
        mill.wait_recorded(3, "Case X", timeout_s=0.1)
