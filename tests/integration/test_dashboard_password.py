"""The page's own connections to a Redis whose password is changed while Flower runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.dashboard.watch import Watch
from tests.conftest import RedisFactory

_FIRST = "the first"


def test_a_password_that_is_changed_blinds_no_page(
    new_redis: RedisFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page and metrics read the password file for each new connection, so that they go on without a restart."""
    server = new_redis(password=_FIRST)
    file = tmp_path / "password"
    file.write_text(_FIRST + "\n", encoding="utf-8")
    monkeypatch.setenv("MILL_REDIS_URL", f"redis://127.0.0.1:{server.port}/0")
    monkeypatch.setenv("MILL_REDIS_PASSWORD_FILE", str(file))
    monkeypatch.setenv("MILL_PREPARED_DIR", str(tmp_path / "prepared"))
    monkeypatch.setenv("MILL_STATE_DIR", str(tmp_path / "state"))
    watch = Watch.from_settings()

    def reachable() -> Any:
        return json.loads(watch._read_data())["snapshot"]["broker"]["reachable"]

    try:
        assert reachable() is True
        client = server.client()
        client.config_set("requirepass", "the second")
        client.client_kill_filter(_type="normal", skipme=True)
        assert reachable() is False
        file.write_text("the second\n", encoding="utf-8")
        assert reachable() is True
        assert b"promptmill_" in asyncio.run(watch.metrics()).body
    finally:
        watch.close()
