"""Keeps deliveries alive while they run, and takes the dataset queues in: Celery bootsteps (docs/design/lease.md)."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import kombu.transport.redis
import kombu.transport.virtual.base
import redis.exceptions
from celery import bootsteps
from celery.worker import state

from app.clock import RedisClock

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE = 5
_FOLLOW_S = 1.0
_WRITE_PROBE_S = 1.0
_WRITE_PROBE_KEY = "write-probe"


class LeaseKeeper(bootsteps.StartStopStep):  # type: ignore[misc] # celery is untyped
    """Refreshes the score of every running delivery, so that only a dead worker's deliveries run out.

    kombu gives a delivery back when its score in `unacked_index` is older than the visibility timeout; it never
    refreshes that score itself. After a lost connection, state.requests still knows the deliveries that run.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)
    clock = RedisClock()
    """The clock of all scores."""

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Refresh at once (a connection may have been away for long) and then several times per lease."""
        # What a lost connection leaves behind holds sockets, in cycles that the collector would go through hours later.
        gc.collect()
        visibility_s = consumer.task_consumer.channel.visibility_timeout
        self.refresh(consumer)
        self._timer = consumer.timer.call_repeatedly(visibility_s / _BEATS_PER_LEASE, self.refresh, (consumer,))

    def stop(self, _consumer: Any) -> None:
        """Stop refreshing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refresh(self, consumer: Any) -> None:
        """Set the score of every delivery that this worker holds to now."""
        tags = {request._message.delivery_tag for request in list(state.requests.values())}  # noqa: SLF001 no public name
        channel = consumer.task_consumer.channel
        try:
            with channel.conn_or_acquire() as client:
                self.clock.ask(client)  # before the first delivery is noted, too
                if tags:
                    client.zadd(channel.unacked_index_key, dict.fromkeys(tags, self.clock.now()), xx=True)
        except redis.exceptions.RedisError:
            logger.debug("deliveries could not be refreshed; the connection is coming back", exc_info=True)


class QueueFollower(bootsteps.StartStopStep):  # type: ignore[misc] # celery is untyped
    """Reads the queues of all known datasets, and of none that is paused."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    wanted: Callable[[], tuple[set[str], set[str]]] = staticmethod(lambda: (set(), set()))
    """Returns the queues to read and those not to; set at the worker's start."""

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Read the queues at once, and look for changes every second."""
        self.follow(consumer)
        self._timer = consumer.timer.call_repeatedly(_FOLLOW_S, self.follow, (consumer,))

    def stop(self, _consumer: Any) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def follow(self, consumer: Any) -> None:
        """Begin or cease to read queues."""
        read, ceased = self.wanted()
        tasks = consumer.task_consumer
        for name in sorted(read):
            if not tasks.consuming_from(name):
                try:
                    consumer.add_task_queue(name)
                except redis.exceptions.ResponseError:
                    logger.debug("%s is read when Redis takes writes again", name, exc_info=True)
        for name in sorted(ceased):
            if tasks.consuming_from(name):
                consumer.cancel_task_queue(name)


def keep_running_work_over_blips(stopping: Callable[[], bool]) -> None:
    """Stop kombu from giving running deliveries back when a connection is lost and Redis is not.

    kombu's channel gives all its deliveries back when it closes, so that a network blip runs every task twice. They
    are still running here and LeaseKeeper goes on refreshing them; only a worker that ends gives them back.
    """
    qos_class, channel_class = kombu.transport.redis.QoS, kombu.transport.redis.Channel
    restore, disconnect = qos_class.restore_unacked_once, channel_class._disconnect_pools  # noqa: SLF001 no public name

    def restore_unacked_once(qos: Any, stderr: Any = None) -> None:
        if stopping():
            restore(qos, stderr)  # type: ignore[no-untyped-call]
            return
        qos._on_collect.cancel()  # noqa: SLF001 what the original does first
        qos._flush()  # noqa: SLF001 same

    def disconnect_pools(channel: Any) -> None:
        pool = channel._pool  # noqa: SLF001 same
        disconnect(channel)  # type: ignore[no-untyped-call]
        # What still runs is acked through the closed channel later, when its transport may know no address any more.
        # The pool that it had connects anew.
        channel._pool = pool  # noqa: SLF001 same

    qos_class.restore_unacked_once = restore_unacked_once  # type: ignore[method-assign]
    channel_class._disconnect_pools = disconnect_pools  # type: ignore[method-assign] # noqa: SLF001 same


def free_the_slot_of_a_lost_ack() -> None:
    """Let a delivery that could not be acked or handed back no longer count as one that runs.

    kombu would count it for ever while its own connection lasts (a Redis that refuses writes or a changed password
    spoils the acks alone), and once every slot had lost one the worker would wait for ever. Such a delivery comes back
    when its score is old, and finds its record or is asked again.
    """
    qos_class, plain = kombu.transport.redis.QoS, kombu.transport.virtual.base.QoS
    acknowledge, turn_down = qos_class.ack, qos_class.reject

    def ack(qos: Any, delivery_tag: str) -> None:
        try:
            acknowledge(qos, delivery_tag)  # type: ignore[no-untyped-call]
        except redis.exceptions.RedisError:
            plain.ack(qos, delivery_tag)  # type: ignore[no-untyped-call]
            raise

    def reject(qos: Any, delivery_tag: str, requeue: bool = False) -> None:
        try:
            turn_down(qos, delivery_tag, requeue)  # type: ignore[no-untyped-call]
        except redis.exceptions.RedisError:
            plain.ack(qos, delivery_tag)  # type: ignore[no-untyped-call]
            raise

    qos_class.ack = ack  # type: ignore[method-assign]
    qos_class.reject = reject  # type: ignore[method-assign]


def keep_time_by_redis(clock: RedisClock) -> None:
    """Let deliveries be noted and taken back by Redis' clock.

    kombu writes each worker's own time into a set that all workers compare with theirs: one whose clock is an hour
    ahead would take everybody's running deliveries back, and never its own if it is behind. When Redis' own clock was
    set, nothing is taken back until every living worker has had the time to refresh its deliveries.
    """
    qos_class = kombu.transport.redis.QoS
    take_back = qos_class.restore_visible

    def restore_visible(qos: Any, *args: Any, **options: Any) -> None:
        with qos.channel.conn_or_acquire() as client:
            clock.ask(client)
        if not clock.stepped_within(qos.visibility_timeout):
            take_back(qos, *args, **options)  # type: ignore[no-untyped-call]

    kombu.transport.redis.time = clock.now
    qos_class.restore_visible = restore_visible  # type: ignore[assignment]


def wait_for_a_redis_that_takes_writes() -> None:
    """Let a consumer that connects wait while Redis is full or read-only, and leave no connection open if it fails.

    kombu writes as soon as it is connected. Refused, Celery would connect anew several times a second, each time with
    a traceback and without closing what it had opened. Taking back what ran out is left for later meanwhile.
    """
    transport_class, qos_class = kombu.transport.redis.Transport, kombu.transport.redis.QoS
    register, take_back = transport_class.register_with_event_loop, qos_class.restore_visible

    def restore_visible(qos: Any, *args: Any, **options: Any) -> None:
        try:
            take_back(qos, *args, **options)  # type: ignore[no-untyped-call]
        except redis.exceptions.ResponseError:
            logger.debug("deliveries that ran out could not be taken back; Redis takes no writes", exc_info=True)

    def register_with_event_loop(transport: Any, connection: Any, loop: Any) -> None:
        try:
            for channel in connection.channels:
                _wait_for_writes(channel)
            register(transport, connection, loop)  # type: ignore[no-untyped-call]
        except BaseException:
            transport.close_connection(connection)
            raise

    transport_class.register_with_event_loop = register_with_event_loop  # type: ignore[method-assign]
    qos_class.restore_visible = restore_visible  # type: ignore[assignment]


def _wait_for_writes(channel: Any) -> None:
    refused = False
    while True:
        try:
            with channel.conn_or_acquire() as client:
                client.set(_WRITE_PROBE_KEY, 1, px=1000)
        except redis.exceptions.ResponseError as error:
            if not refused:
                logger.warning("Redis takes no writes (%s); no new sample is taken until it does", error)
            refused = True
            state.maybe_shutdown()
            time.sleep(_WRITE_PROBE_S)
        else:
            if refused:
                logger.warning("Redis takes writes again")
            return


def reuse_redis_clients() -> None:
    """Let kombu's channels keep the client that they build anew, at some cost, for every delivery and every ack.

    Such a client is a thread-safe shell around the channel's pool of connections, and lives as long as the pool.
    """
    channel_class = kombu.transport.redis.Channel
    create = channel_class._create_client  # noqa: SLF001 no public name

    def create_client(channel: Any, asynchronous: bool = False) -> Any:
        if asynchronous:  # one with a connection of its own
            return create(channel, asynchronous=True)  # type: ignore[no-untyped-call]
        kept = getattr(channel, "_mill_client", None)
        if kept is None or kept.connection_pool is not channel.pool:
            kept = channel._mill_client = create(channel)  # type: ignore[no-untyped-call] # noqa: SLF001 ours
        return kept

    channel_class._create_client = create_client  # type: ignore[method-assign] # noqa: SLF001 same
