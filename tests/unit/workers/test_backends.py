"""What a server is, found out by asking it, and what it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from app.settings import ServerSettings
from producer.ports import free_port
from producer.simulator.server import ModelServer
from tests.support.fake_client import until
from workers.clients.backends import DIALECTS, UNKNOWN, Backend, identify
from workers.clients.link import Link
from workers.clients.parameters import Allowance

URL = "http://server:8000"
Site = Mapping[str, Any]


def models(owner: str, **more: Any) -> dict[str, Any]:
    """Return a list of one model."""
    return {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner, **more}]}


def found(site: Site, *, url: str = URL, headers: Mapping[str, str] | None = None) -> tuple[Backend, list[str]]:
    """Return what a server with these documents is taken for, and the paths that it was asked for."""
    asked: list[str] = []

    async def get(path: str) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        asked.append(path)
        return headers or {}, site.get(path, {})

    return asyncio.run(identify(url, get)), asked


@pytest.mark.parametrize(
    ("site", "label"),
    [
        ({"/v1/models": models("vllm"), "/version": {"version": "0.33.0"}}, "vllm 0.33.0"),
        ({"/v1/models": models("vllm")}, "vllm"),
        ({"/v1/models": models("sglang"), "/server_info": {"version": "0.5.23"}}, "sglang 0.5.23"),
        ({"/v1/models": models("sglang"), "/get_server_info": {"version": "0.4.9"}}, "sglang 0.4.9"),
        ({"/v1/models": models("llamacpp"), "/props": {"build_info": "b8681-x"}}, "llama.cpp b8681-x"),
        ({"/v1/models": models("tensorrt_llm"), "/version": {"version": "1.2.0"}}, "tensorrt-llm 1.2.0"),
        ({"/v1/models": models("me"), "/server_info": {"tokenizer_path": "m", "version": "0.5"}}, "sglang 0.5"),
        ({"/props": {"default_generation_settings": {}, "build_info": "b1"}}, "llama.cpp b1"),
        (
            {"/v1/models": models("local"), "/openapi.json": {"paths": {"/load_model": 1, "/v1/responses": 1}}},
            "transformers",
        ),
        ({"/v1/models": models("me"), "/openapi.json": {"paths": {"/inference/v1/generate": 1}}}, "vllm"),
        ({"/v1/models": models("openai")}, None),
        ({}, None),
        ({"/v1/models": {"data": "nonsense"}, "/openapi.json": {"paths": []}}, None),
        ({"/v1/models": {"data": [None, {"owned_by": ["vllm"]}]}}, None),
        ({"/v1/models": models("vllm"), "/version": {"version": "x\n" * 99}}, "vllm"),
    ],
)
def test_servers_are_known_by_what_they_say(site: Site, label: str | None) -> None:
    """The owner of its models tells a server, or else the paths that only it has; nonsense is no server's."""
    backend, asked = found(site)
    assert backend.label == label
    assert len(asked) <= 7
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize(
    ("site", "model", "context"),
    [
        ({"/v1/models": models("vllm", max_model_len=4096)}, "m", 4096),
        ({"/v1/models": models("vllm", max_model_len=4096)}, "an-adapter", 4096),
        ({"/v1/models": models("sglang", max_model_len=4096), "/server_info": {"context_length": 9}}, "m", 4096),
        ({"/v1/models": models("sglang"), "/server_info": {"version": "0.5", "context_length": 8192}}, "m", 8192),
        ({"/props": {"default_generation_settings": {"n_ctx": 2048}}}, "m", 2048),
        ({"/v1/models": models("tensorrt_llm"), "/version": {"version": "1.2.0"}}, "m", None),
        ({"/v1/models": models("openai")}, "m", None),
        ({"/v1/models": models("somebody", max_model_len=4096)}, "m", 4096),
        ({"/v1/models": models("somebody", max_model_len=4096)}, "another-behind-a-proxy", None),
        ({"/v1/models": models("vllm", max_model_len="much")}, "m", None),
        ({"/v1/models": models("vllm", max_model_len=-1)}, "m", None),
        ({}, "m", None),
    ],
)
def test_the_context_is_what_the_server_tells(site: Site, model: str, context: int | None) -> None:
    """Each make tells in its own place how many tokens fit; what is not told is not known."""
    assert found(site)[0].context_of(model) == context


def test_models_of_one_server_may_have_contexts_of_their_own() -> None:
    """Each model has its own context; of one that is not listed nothing is known then."""
    listed = [{"id": "a", "owned_by": "vllm", "max_model_len": 10}, {"id": "b", "owned_by": "x", "max_model_len": 20}]
    backend, _ = found({"/v1/models": {"data": listed}})
    assert [backend.context_of(name) for name in ("a", "b", "c")] == [10, 20, None]


def test_proxies_are_known_by_their_header_or_address() -> None:
    """LiteLLM says its version in a header, OpenRouter has one address; neither is asked for any other path."""
    backend, asked = found({"/v1/models": models("openai")}, headers={"x-litellm-version": "1.80.0"})
    assert (backend.label, asked) == ("litellm 1.80.0", ["/v1/models"])
    backend, asked = found({"/v1/models": models("x")}, url="https://openrouter.ai/api")
    assert (backend.label, asked) == ("openrouter", ["/v1/models"])
    assert backend.parameters is None


def test_a_published_schema_goes_before_the_list() -> None:
    """The parameters that a server publishes are those of its very version; a schema of something else is none."""
    names = ["messages", "model", "temperature", "top_p", "top_k", "seed", "stop", "brand_new"]
    schema = {"components": {"schemas": {"ChatCompletionRequest": {"properties": {name: {} for name in names}}}}}
    backend, _ = found({"/v1/models": models("vllm"), "/openapi.json": schema})
    assert backend.parameters == frozenset(names) | {"max_tokens", "max_completion_tokens"}
    for nonsense in ({"components": []}, {"components": {"schemas": {"ChatCompletionRequest": {"properties": {}}}}}):
        backend, _ = found({"/v1/models": models("vllm"), "/openapi.json": nonsense})
        assert backend.parameters == DIALECTS["vllm"].known


def _link(url: str) -> Link:
    servers = ServerSettings(request_timeout_s=9, connect_timeout_s=9, max_body_mb=1)
    return Link(url, servers, max_connections=4)


def test_a_server_is_asked_once_and_again_when_it_comes_back() -> None:
    """Many calls at once cost one round of questions; a server that has come back is asked anew."""

    async def story() -> None:
        with ModelServer() as server:
            link = _link(server.url)
            labels = {backend.label for backend in await asyncio.gather(*(link.identify() for _ in range(20)))}
            assert labels == {"vllm 0.33.0"}
            assert server.stats["paths"] == {"/v1/models": 1, "/version": 1, "/openapi.json": 1}
            server.set_options(dialect="sglang")
            assert (await link.identify()).label == "vllm 0.33.0"
            assert (await link.identify(again=True)).label == "sglang 0.5.23"
            assert link.backend.label == "sglang 0.5.23"
            await link.close()

    asyncio.run(story())


def test_a_server_that_is_down_is_not_recognised_and_asked_later() -> None:
    """Asking what is not there costs nothing and raises nothing; once it is up it is recognised."""

    async def story() -> None:
        port = free_port()
        link = _link(f"http://127.0.0.1:{port}")
        assert await link.identify() == UNKNOWN
        with ModelServer(port=port):
            assert await link.identify() == UNKNOWN  # it was asked just now
            assert (await link.identify(again=True)).label == "vllm 0.33.0"
        assert (await link.identify(again=True)).label == "vllm 0.33.0"  # what it was, while it is away
        await link.close()

    asyncio.run(story())


def test_a_server_that_refuses_us_for_now_is_asked_later() -> None:
    """A refused key says nothing of what the server is; it is recognised once it lets us in."""

    async def story() -> None:
        with ModelServer(api_key="sk-other") as server:
            link = _link(server.url)
            assert await link.identify() == UNKNOWN
            server.set_options(api_key=None)
            assert (await link.identify(again=True)).label == "vllm 0.33.0"
            await link.close()

    asyncio.run(story())


def test_a_silent_server_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and answers nothing counts as not recognised after a few seconds."""
    monkeypatch.setattr("workers.clients.link._IDENTIFY_TIMEOUT_S", 0.2)

    async def story() -> None:
        with ModelServer(hangs="everything") as server:
            link = _link(server.url)
            assert await link.identify() == UNKNOWN
            await until(lambda: server.stats["paths"] == {"/v1/models": 1})
            await link.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("backend", "name", "words"),
    [
        ("vllm", "repetition_penality", "vLLM does not know repetition_penality (did you mean repetition_penalty"),
        (
            "vllm",
            "guided_json",
            "vLLM does not know guided_json (did you mean structured_outputs?) and would pass over it; enqueue",
        ),
        ("sglang", "max_new_tokens", "SGLang does not know max_new_tokens (did you mean max_tokens?)"),
        ("llama.cpp", "repetition_penalty", "(did you mean repeat_penalty?)"),
        ("tensorrt-llm", "return_token_ids", "TensorRT-LLM does not know return_token_ids"),
        (
            "transformers",
            "top_k",
            "transformers serve does not know top_k (did you mean top_p or stop?) and would refuse every",
        ),
        ("transformers", "presence_penalty", "(did you mean frequency_penalty?)"),
    ],
)
def test_unknown_parameters_are_named_with_near_ones(backend: str, name: str, words: str) -> None:
    """The sentence names the parameter, the server, what it would do, near names, and the way out."""
    dialect = DIALECTS[backend]
    names = {"max_tokens", name}
    told = Allowance(everything=False).refusal(names, dialect.known, shown=dialect.shown, strict=dialect.strict)
    assert words in (told or "")
    assert "MILL_ALLOW_UNKNOWN_PARAMETERS=true" in (told or "")
    assert Allowance(everything=True).refusal(names, dialect.known, shown="", strict=True) is None


@pytest.mark.parametrize("backend", [name for name in DIALECTS if DIALECTS[name].known])
def test_every_server_takes_what_promptmill_itself_sends(backend: str) -> None:
    """What is always sent, and what asks for the ids, is known to each server."""
    dialect = DIALECTS[backend]
    assert dialect.known is not None
    assert {"model", "messages", "tools", "max_tokens", "seed", *dialect.ask_ids} <= dialect.known


def test_what_is_not_recognised_gets_everything() -> None:
    """A server that nobody knows is sent all parameters, as it always was."""
    assert Allowance(everything=False).refusal({"x"}, UNKNOWN.parameters, shown="", strict=False) is None
