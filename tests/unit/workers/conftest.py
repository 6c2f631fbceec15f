"""Fixtures of the workers' tests: the work list in a real Redis, and a dataset folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kombu.transport.redis
import pytest

from app import broker as brokers
from app import manifest, settings
from app.ledger import Ledger
from app.places import DatasetFolder, Keys, dataset_folder
from app.queue import Queue
from tests.conftest import Broker

DATASET = "d"


@pytest.fixture(autouse=True)
def _kombu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back after the test what it changes in kombu."""
    module = kombu.transport.redis
    for owner, name in (
        (module.QoS, "restore_unacked_once"),
        (module.QoS, "restore_visible"),
        (module.QoS, "ack"),
        (module.QoS, "reject"),
        (module, "time"),
        (module.Channel, "_disconnect_pools"),
        (module.Channel, "_create_client"),
        (module.Transport, "register_with_event_loop"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture
def books(broker: Broker) -> Iterator[Queue]:
    """Return the work list, with one dataset that is known and empty."""
    client = brokers.connect(brokers.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    made.register(DATASET, "f" * 16, {"model": "toy"})
    yield made
    client.close()


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Return the folder of the dataset folders, which does not exist yet."""
    return tmp_path / "prepared"


@pytest.fixture
def folder(prepared: Path) -> DatasetFolder:
    """Return the dataset's folder as enqueue leaves it: a manifest, and no record yet."""
    made = dataset_folder(prepared, DATASET)
    with Ledger.open(made) as opened:
        manifest.fix_settings(opened, DATASET, settings.load(settings.GenerationSettings), {}, new=False)
    return made


@pytest.fixture
def ledger(folder: DatasetFolder) -> Iterator[Ledger]:
    """Return the dataset's open ledger."""
    with Ledger.open(folder) as opened:
        yield opened
