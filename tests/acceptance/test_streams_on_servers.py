"""Streamed answers of servers that nobody here wrote are the whole ones: llama.cpp and `transformers serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from app.records import Completion
from app.settings import ServerSettings
from tests.support.real_servers import RealServer, llama_server, make_tiny_model, transformers_server
from workers.clients.base import Request
from workers.clients.make import make_client
from workers.rendering import Tokenizers

pytestmark = pytest.mark.slow

_ANSWERS_S = 120.0
_PROMPTS = ("Name three fruits.", "Is water wet?", "Übersetze ins Englische: Guten Morgen 🌅")
_GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Run one llama.cpp server for this file."""
    with llama_server(tmp_path_factory.mktemp("llama")) as server:
        yield server


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Run one `transformers serve` for this file."""
    folder = tmp_path_factory.mktemp("transformers")
    with transformers_server(make_tiny_model(folder), folder) as server:
        yield server


def _answers(server: RealServer, *, stream: bool) -> list[Completion]:
    """Return the answers to all prompts, asked one after the other as a worker asks."""

    async def ask() -> list[Completion]:
        client = make_client(server.url, ServerSettings(stream=stream), Tokenizers(None), max_connections=2)
        try:
            await client.identify()
            model = (await client.probe()).models[0]
            answers = []
            for number, prompt in enumerate(_PROMPTS):
                request = Request(
                    messages=[{"role": "user", "content": prompt}],
                    model=model,
                    sampling=_GREEDY,
                    request_id=f"s{number}-{stream}",
                    want_token_ids=True,
                )
                answers.append((await client.complete(request)).completion)
            return answers
        finally:
            await client.close()

    return asyncio.run(asyncio.wait_for(ask(), _ANSWERS_S))


def _assert_same(streamed: Completion, whole: Completion) -> None:
    assert streamed.content or streamed.reasoning
    assert (streamed.finish_reason, streamed.tool_calls) == (whole.finish_reason, whole.tool_calls)
    assert streamed.usage.prompt_tokens == whole.usage.prompt_tokens
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert streamed.model == whole.model


def test_llama_cpp_streams_what_it_sends_whole(llama: RealServer) -> None:
    """Texts, ends and counts are the same; the ids are missing, as a note of the record says."""
    whole = _answers(llama, stream=False)
    for streamed, expected in zip(_answers(llama, stream=True), whole, strict=True):
        _assert_same(streamed, expected)
        assert (streamed.content, streamed.reasoning) == (expected.content, expected.reasoning)
        assert expected.output_ids
        assert streamed.output_ids is None
        assert [note for note in streamed.notes if "no ids" in note] == streamed.notes != []


def test_transformers_streams_what_it_sends_whole(transformers: RealServer) -> None:
    """Ends and counts are the same, and text and thought but for the blanks that it strips off whole ones."""
    whole = _answers(transformers, stream=False)
    for streamed, expected in zip(_answers(transformers, stream=True), whole, strict=True):
        _assert_same(streamed, expected)
        assert (streamed.content or "").strip() == (expected.content or "")
        assert (streamed.reasoning or "").strip() == (expected.reasoning or "")
