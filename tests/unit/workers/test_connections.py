"""Connections under a thousand first requests, and those that the server closes while they are idle."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import socket
import time
from collections import Counter

import pytest

from app.settings import ServerSettings
from producer.simulator.rules import Rule
from producer.simulator.server import ModelServer
from workers.clients import transport
from workers.clients.base import CallFailed, Client, Request
from workers.clients.make import make_client
from workers.rendering import Tokenizers


def _request(number: int) -> Request:
    return Request(
        messages=[{"role": "user", "content": "hi"}],
        model="toy-model",
        sampling={"max_tokens": 9},
        request_id=f"s{number}-a1",
    )


async def _outcome(client: Client, number: int) -> str:
    try:
        await client.complete(_request(number))
    except CallFailed as failure:
        return f"{failure.fault.kind}: {failure.fault.message}"
    return "ok"


def _burn() -> None:
    while True:
        pass


def test_a_busy_worker_is_no_connect_timeout() -> None:
    """A loop that comes round more slowly than the whole timeout still connects: its own time is not the server's."""

    async def hog() -> None:
        while True:
            time.sleep(0.15)  # noqa: ASYNC251 - the loop stands still, which is the point
            await asyncio.sleep(0)

    async def story() -> None:
        with ModelServer() as server:
            client = make_client(server.url, ServerSettings(connect_timeout_s=0.1), Tokenizers(None), max_connections=4)
            busy = asyncio.create_task(hog())
            try:
                assert await _outcome(client, 0) == "ok"
            finally:
                busy.cancel()
                await client.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_server_that_takes_no_connection_is_a_connect_timeout() -> None:
    """Its queue of connections is full, as behind a firewall: the fault says for how long, and what sets that."""

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
            address = "{}:{}".format(*full.getsockname())
            servers = ServerSettings(connect_timeout_s=0.3)
            client = make_client(f"http://{address}", servers, Tokenizers(None), max_connections=4)
            try:
                outcomes = await asyncio.gather(*(_outcome(client, number) for number in range(3)))
            finally:
                await client.close()
            assert (
                outcomes == [f"connect_timeout: no connection to {address} within 0.3 s (MILL_CONNECT_TIMEOUT_S)"] * 3
            )

    asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.slow
def test_a_thousand_first_requests_all_connect_on_a_busy_machine() -> None:
    """On a busy machine no connection runs into its timeout: few are opened at once, the others wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("a thousand connections need 4,096 file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    burners = [multiprocessing.get_context("fork").Process(target=_burn, daemon=True) for _ in range(2)]

    async def story() -> None:
        with ModelServer(default=Rule(delay_s=5)) as server:
            servers = ServerSettings(connect_timeout_s=5)
            client = make_client(server.url, servers, Tokenizers(None), max_connections=1000)
            try:
                outcomes = await asyncio.gather(*(_outcome(client, number) for number in range(1000)))
            finally:
                await client.close()
            assert Counter(outcomes) == {"ok": 1000}
            assert server.accepted_connections >= 1000

    for burner in burners:
        burner.start()
    try:
        asyncio.run(asyncio.wait_for(story(), 240))
    finally:
        for burner in burners:
            burner.terminate()
            burner.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("stream", [False, True])
def test_no_request_is_lost_to_a_connection_that_closes_when_it_is_used_again(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """Even a client that keeps connections longer than the server loses nothing: a race is asked again at once."""
    monkeypatch.setattr(transport, "KEEPALIVE_EXPIRY_S", 60.0)
    idle_s = 0.05

    async def reuse(client: Client, lane: int) -> list[str]:
        pauses = random.Random(lane)
        outcomes = []
        for number in range(20):
            outcomes.append(await _outcome(client, lane * 100 + number))
            await asyncio.sleep(idle_s + pauses.uniform(-0.004, 0.004))  # around the moment of the close
        return outcomes

    async def story() -> None:
        with ModelServer(keep_alive_s=idle_s) as server:
            client = make_client(server.url, ServerSettings(stream=stream), Tokenizers(None), max_connections=32)
            try:
                lanes = await asyncio.gather(*(reuse(client, lane) for lane in range(20)))
            finally:
                await client.close()
            assert Counter(outcome for lane in lanes for outcome in lane) == {"ok": 400}

    asyncio.run(asyncio.wait_for(story(), 60))
