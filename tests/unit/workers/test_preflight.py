"""The cheap look at model servers: what each says of itself, what it would refuse, and never longer than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from app.preflight import Job, Server
from app.settings import ServerSettings
from producer.ports import free_port
from producer.simulator.server import ModelServer
from tests.support.page_server import page_server
from workers.preflight.look import look_at_all


def look(urls: Sequence[str], timeout_s: float = 10.0, *, key: str | None = None, **generation: Any) -> list[Server]:
    """Look at servers for a dataset with these settings."""
    job = Job(generations={"d": {"max_tokens": 100, **generation}}, timeout_s=timeout_s)
    return look_at_all(job, ServerSettings(model_urls=tuple(urls), api_key=key))


def refusals(server: Server) -> list[tuple[str, str]]:
    """Return codes and findings of the dataset."""
    return [(one.code, one.finding) for one in server.refusals["d"]]


def test_a_server_is_seen_as_it_is_and_generates_nothing() -> None:
    """Make, version, models and context are told by its own pages; no question is asked."""
    with ModelServer(max_model_len=4096) as server:
        (seen,) = look([server.url])
        assert server.requests == ()
    assert seen == Server(
        url=server.url,
        state="up",
        backend="vllm 0.33.0",
        shown="vLLM 0.33.0",
        models=["toy-model"],
        model="toy-model",
        context=4096,
        switches_thinking=True,
        refusals={"d": []},
    )


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"model": "other"}, [("model", "vLLM 0.33.0 has no model other but toy-model")]),
        (
            {"max_tokens": 8192},
            [("context", "max_tokens 8192 does not fit into the context of 4096 tokens of toy-model")],
        ),
        (
            {"extra_body": {"guided_json": {}}},
            [
                (
                    "parameters",
                    "vLLM 0.33.0 does not know guided_json (did you mean structured_outputs?) and would pass over it",
                )
            ],
        ),
        ({"temperature": 0.7, "seed": 3, "max_tokens": 4095}, []),
    ],
)
def test_what_would_waste_the_run_is_found(generation: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """A model that is not there, an answer that cannot fit and a parameter that is not known are told in one look."""
    with ModelServer(max_model_len=4096) as server:
        (seen,) = look([server.url], **generation)
    assert refusals(seen) == expected


def test_several_findings_come_together() -> None:
    """One look tells all that is wrong, so that it need not be mended one by one."""
    with ModelServer(max_model_len=4096) as server:
        (seen,) = look([server.url], model="other", max_tokens=5000, extra_body={"x": 1})
    assert [code for code, _ in refusals(seen)] == ["model", "context", "parameters"]


def test_servers_that_cannot_be_used_are_told_apart() -> None:
    """Nobody there, silence, a refused key and an overloaded server are four things; one does not hold up another."""
    pages = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 50}]}}
    with ModelServer(hangs="everything") as silent, ModelServer(api_key="sk-1") as closed, page_server(pages) as well:
        gone = f"http://127.0.0.1:{free_port()}"
        seen = look([gone, silent.url, closed.url, well], 3.0)
    assert [one.state for one in seen] == ["down", "silent", "refuses", "up"]
    assert seen[1].words == "no answer within 3 s"
    assert seen[2].words == "HTTP 401 for /v1/models: Unauthorized"
    assert seen[3].context == 50


def test_a_host_that_cannot_be_one_is_down_at_once() -> None:
    """A name that no server can have is told as such, and is no silence."""
    (seen,) = look(["http://gpu..cluster:8000"])
    assert (seen.state, "label" in seen.words) == ("down", True)


def test_what_was_seen_before_the_time_was_over_is_told() -> None:
    """A server that lists its models and then says no more is up; what it is, is not known."""
    with page_server({"/v1/models": {"data": [{"id": "m"}]}}, hangs_elsewhere=True) as url:
        (seen,) = look([url], 1.0)
    assert (seen.state, seen.models, seen.backend) == ("up", ["m"], None)


def test_the_clock_of_a_server_is_compared() -> None:
    """The Date of its answer tells how far its clock is from ours; the simulated server tells none."""
    with page_server({"/v1/models": {"data": []}}, ahead_s=3600) as url:
        (seen,) = look([url])
    assert seen.clock_ahead_s == pytest.approx(3600, abs=3)
    with ModelServer() as server:
        assert look([server.url])[0].clock_ahead_s is None


def test_no_secret_is_in_what_was_seen() -> None:
    """Neither a key in the settings nor a password in the URL is repeated, though the server repeats it."""
    with page_server({}, key="right") as url:
        seen = look([url], key="sk-secret")
        login = look([url.replace("//", "//me:hunter2@")])
    assert (seen[0].state, login[0].url) == ("refuses", url)
    said = msgspec.json.encode([*seen, *login]).decode()
    assert "sk-secret" not in said
    assert "hunter2" not in said
    assert "bWU6aHVudGVyMg" not in said


def test_llama_cpp_shows_its_template_and_its_slot() -> None:
    """The context is that of one slot; the template has the fingerprint that a tokenizer's would have."""
    pages = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}]},
        "/props": {"build_info": "b1", "chat_template": "{{ x }}", "default_generation_settings": {"n_ctx": 2048}},
    }
    with page_server(pages) as url:
        (seen,) = look([url], model="any-name")
    assert (seen.backend, seen.context, seen.template) == ("llama.cpp b1", 2048, "e52c737297f7dad6")
    assert refusals(seen) == []


def test_a_protocol_that_the_server_does_not_speak_is_found() -> None:
    """SGLang's own protocol with a vLLM server would be refused; the remedy is the setting."""
    with ModelServer() as server:
        job = Job(generations={"d": {"max_tokens": 10}}, timeout_s=10)
        (seen,) = look_at_all(job, ServerSettings(model_urls=(server.url,), protocol="sglang"))
    (refusal,) = seen.refusals["d"]
    assert refusal.finding == "vLLM 0.33.0 has no /generate"
    assert refusal.remedy == "start the workers with MILL_PROTOCOL=auto"
