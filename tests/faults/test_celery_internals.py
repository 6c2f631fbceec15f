"""The inside of Celery and kombu that `workers/leases.py` leans on: a version that changes it fails here, loudly."""

from __future__ import annotations

import inspect
import re

import celery
import celery.apps.worker
import kombu
import kombu.transport.redis
import kombu.transport.virtual.base
import pytest
from celery import signals
from celery.worker import request, state
from celery.worker.consumer import Consumer

from app.celery import app

pytestmark = pytest.mark.fault

_RESTORE = kombu.transport.virtual.base.QoS.restore_unacked_once


def test_celery_and_kombu_are_of_the_versions_that_were_studied() -> None:
    """Both are 5.7; before a newer one is allowed, docs/design/lease.md and `workers/leases.py` must be read again."""
    assert celery.__version__.startswith("5.7.")
    assert kombu.__version__.startswith("5.7.")


def test_a_closing_channel_gives_back_what_it_delivered_in_one_method() -> None:
    """`restore_unacked_once` is the one place to stop that; it cancels its finalizer and flushes before anything."""
    assert list(inspect.signature(_RESTORE).parameters) == ["self", "stderr"]
    source = inspect.getsource(_RESTORE)
    body = source[source.rindex('"""') :]
    assert body.index("self._on_collect.cancel()") < body.index("self._flush()") < body.index("self._delivered")
    assert "restore_unacked_once" in inspect.getsource(kombu.transport.virtual.base.Channel.close)
    assert "restore_unacked_once" not in vars(kombu.transport.redis.QoS)


def test_a_late_ack_finds_the_pool_that_its_channel_had() -> None:
    """A channel drops its pool in one method, makes another only where it has none, and acks go through it."""
    channel = kombu.transport.redis.Channel
    assert "self._pool = None" in inspect.getsource(channel._disconnect_pools)
    pool = inspect.getattr_static(channel, "pool")
    assert isinstance(pool, property)
    assert pool.fget is not None
    assert "if self._pool is None" in inspect.getsource(pool.fget)
    assert "self.pool" in inspect.getsource(channel._create_client)
    assert "conn_or_acquire" in inspect.getsource(kombu.transport.redis.QoS.pipe_or_acquire)


def test_deliveries_come_back_by_their_score_alone() -> None:
    """A delivery is noted with the time as its score, taken back by that score, and gone from both keys when acked."""
    qos = kombu.transport.redis.QoS
    assert "zadd(self.unacked_index_key" in inspect.getsource(qos.append)
    sweep = inspect.getsource(qos.restore_visible)
    assert "time() - self.visibility_timeout" in sweep
    assert "self.unacked_index_key" in sweep
    forget = inspect.getsource(qos._remove_from_indices)
    assert "zrem(self.unacked_index_key" in forget
    assert "hdel(self.unacked_key" in forget
    channel = kombu.transport.redis.Channel
    assert callable(channel.conn_or_acquire)
    assert channel.unacked_key == "unacked"
    assert channel.unacked_index_key == "unacked_index"


def test_kombu_tells_the_time_of_deliveries_by_one_name() -> None:
    """`time` of the transport's module is called for the score and for the look back, and for nothing else."""
    source = inspect.getsource(kombu.transport.redis)
    assert "from time import monotonic, sleep, time" in source
    assert len(re.findall(r"(?<![\w.])time\(\)", source)) == 3
    assert inspect.getsource(kombu.transport.redis.QoS.append).count("time()") == 2
    assert inspect.getsource(kombu.transport.redis.QoS.restore_visible).count("time()") == 1


def test_an_ack_that_fails_leaves_its_delivery_counted() -> None:
    """`ack` and `reject` send to Redis first and count after it, so that whoever catches the failure must count."""
    qos, plain = kombu.transport.redis.QoS, kombu.transport.virtual.base.QoS
    assert inspect.getsource(qos.ack).index("execute()") < inspect.getsource(qos.ack).index("super().ack(")
    assert list(inspect.signature(qos.reject).parameters) == ["self", "delivery_tag", "requeue"]
    assert "super().ack(delivery_tag)" in inspect.getsource(qos.reject)
    assert "_quick_ack" in inspect.getsource(plain.ack)


def test_a_connection_can_read_its_password_anew() -> None:
    """A connection's credential provider reaches redis-py, and its copies keep it."""
    assert "credential_provider" in inspect.signature(kombu.Connection.__init__).parameters
    channel = kombu.transport.redis.Channel
    assert "conninfo.credential_provider" in inspect.getsource(channel._connparams)
    assert "'credential_provider'" in inspect.getsource(kombu.Connection._info)


def test_every_transport_option_is_one_that_kombu_reads() -> None:
    """No option of ours is ignored: each names an attribute of kombu's channel or is read by it."""
    source = inspect.getsource(kombu.transport.redis)
    for name in app.conf.broker_transport_options:
        assert f"'{name}'" in source or name in vars(kombu.transport.redis.Channel), name


def test_running_requests_are_known_with_their_delivery_tags() -> None:
    """`state.requests` maps ids to requests, whose message has the tag whose score is refreshed."""
    assert isinstance(state.requests, dict)
    assert "self._message = message" in inspect.getsource(request.Request.__init__)
    assert inspect.signature(state.task_reserved).parameters["add_request"].default == state.requests.__setitem__


def test_the_consumer_can_follow_queues_and_keep_time() -> None:
    """Queues can be added and cancelled while it runs, and its timer repeats calls."""
    for name in ("add_task_queue", "cancel_task_queue"):
        assert callable(getattr(Consumer, name))
    assert callable(kombu.Consumer.consuming_from)
    assert "timer" in inspect.signature(Consumer.__init__).parameters


def test_signals_can_be_made_warm() -> None:
    """Celery's own handler for SIGTERM can be put on other signals, and tells of each one."""
    handler = inspect.getsource(celery.apps.worker._shutdown_handler)
    assert celery.apps.worker.install_worker_term_handler.keywords == {"sig": "SIGTERM", "how": "Warm"}
    assert "signals.worker_shutting_down.send" in handler
    assert signals.worker_ready.name == "worker_ready"
