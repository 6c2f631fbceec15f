"""Prompt and answer fit into the context, or the sample fails with the numbers; nothing is cut in silence."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import pytest

from app.records import Completion, Usage
from app.settings import ServerSettings
from producer.simulator.rules import Rule
from producer.simulator.server import ModelServer
from tests.support.byte_tokenizer import loaded_tokenizers
from workers.clients import fits
from workers.clients.backends import Backend
from workers.clients.base import CallFailed, Request
from workers.clients.make import make_client
from workers.faults import Fault, FaultKind
from workers.rendering import Tokenizers


def asking(max_tokens: int = 100, *, prompt: str = "Hi", **sampling: Any) -> Request:
    """Return a request."""
    messages = [{"role": "user", "content": prompt}]
    return Request(
        messages=messages, model="toy-model", sampling={"max_tokens": max_tokens, **sampling}, request_id="r"
    )


def told(usage: Usage, request: Request, *, finish: str = "length", context: int | None = 1000) -> list[str]:
    """Return what the record of an answer says of its end."""
    return fits.with_end_told(Completion(content="y", finish_reason=finish, usage=usage), request, context).notes


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_new_tokens": 3}, 3),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
        ({}, None),
    ],
)
def test_the_limit_is_the_one_that_servers_heed(sampling: dict[str, Any], asked: int | None) -> None:
    """Of several names the one that servers look at first counts; what is no number of tokens is none."""
    assert fits.asked_tokens(sampling) == asked


def test_an_answer_that_fills_the_context_alone_is_refused() -> None:
    """The sentence names both numbers, the model, and a length that would fit."""
    assert fits.refusal(asking(4095), 4096) is None
    assert fits.refusal(asking(8192), None) is None
    assert fits.refusal(asking(8192), 4096) == (
        "max_tokens 8192 does not fit into the context of 4096 tokens of toy-model; enqueue again with --max-tokens "
        "2048 or less and --new-settings, or start the server with a larger context; then resume the dataset"
    )
    assert fits.refusal(asking(4096), 4096) is not None


@pytest.mark.parametrize(("make", "most"), [("sglang", 900), ("vllm", 999), ("llama.cpp", 999), ("", 999)])
def test_a_counted_prompt_is_held_back_only_where_it_could_not_be_answered(make: str, most: int) -> None:
    """SGLang refuses a prompt that leaves max_tokens no room; the others answer it, and mostly to the end."""
    fits.check_prompt(most, asking(100), Backend(make, context=1000))
    fits.check_prompt(most + 1, asking(100), Backend(make))
    with pytest.raises(CallFailed) as raised:
        fits.check_prompt(most + 1, asking(100), Backend(make, context=1000))
    fault = raised.value.fault
    assert (fault.kind, fault.retry) == (FaultKind.CONTEXT_OVERFLOW, False)
    assert fault.message == (f"prompt {most + 1} + max_tokens 100 > context 1000 tokens of toy-model; it was not sent")


def test_short_prompts_are_not_counted() -> None:
    """Only a text that could fill what the answer leaves is worth a tokenizer's time."""
    sglang = Backend("sglang", context=100_000)
    assert not fits.may_overflow(asking(), sglang)
    assert not fits.may_overflow(asking(prompt="x" * 90_000), sglang)
    assert fits.may_overflow(asking(5_000, prompt="x" * 90_000), sglang)
    assert not fits.may_overflow(asking(5_000, prompt="x" * 90_000), Backend("vllm", context=100_000))
    assert fits.may_overflow(asking(prompt="x" * 95_000), Backend("vllm", context=100_000))
    assert not fits.may_overflow(asking(prompt="x" * 95_000), Backend("vllm"))


@pytest.mark.parametrize(
    ("finish", "prompt", "made", "context", "is_cut"),
    [
        ("length", 950, 50, 1000, True),
        ("length", 949, 49, 1000, True),  # llama.cpp leaves a token or two
        ("length", 900, 100, 1000, False),  # all that was asked for
        ("length", 500, 50, 1000, False),  # something else cut it
        ("length", 950, 50, None, False),
        ("length", None, 50, 1000, False),
        ("length", 998, None, 1000, False),
        ("stop", 950, 50, 1000, False),
    ],
)
def test_an_answer_that_the_context_cut_says_so(
    finish: str, prompt: int | None, made: int | None, context: int | None, *, is_cut: bool
) -> None:
    """Cut before max_tokens, with the context full: the record has the numbers. Everything else is as it was."""
    usage = Usage(prompt_tokens=prompt, completion_tokens=made)
    numbers = f"prompt {prompt} + max_tokens 100 > context 1000 tokens of toy-model"
    expected = [f"the end of the context cut the answer after {made} tokens: {numbers}"] if is_cut else []
    assert told(usage, asking(100), finish=finish, context=context) == expected
    assert fits.is_cut(Completion(notes=expected)) == is_cut


def test_a_prompt_that_left_no_room_has_no_answer() -> None:
    """Where no token came because the prompt fills the context, the sample fails with the numbers."""
    with pytest.raises(CallFailed) as failed:
        told(Usage(prompt_tokens=1000, completion_tokens=0), asking(100))
    assert failed.value.fault.kind is FaultKind.CONTEXT_OVERFLOW
    assert (
        failed.value.fault.message == "prompt 1000 + max_tokens 100 > context 1000 tokens of toy-model: no token came"
    )


def test_who_asked_for_as_many_tokens_as_fit_has_got_them() -> None:
    """Without max_tokens the rest of the context was asked for."""
    unbounded = Request(messages=[], model="toy-model", sampling={"max_tokens": None}, request_id="r")
    assert told(Usage(prompt_tokens=900, completion_tokens=100), unbounded) == []


Protocol = Literal["auto", "sglang", "vllm-tokens"]


def ask(
    server: ModelServer, request: Request, *, protocol: Protocol = "auto", counts: bool = False
) -> Completion | Fault:
    """Ask a server with a real client that has found out what it is; `counts`: with a tokenizer, by MILL_TOKENIZER."""

    async def story() -> Completion | Fault:
        tokenizers = loaded_tokenizers(named=True) if counts else Tokenizers(None)
        client = make_client(server.url, ServerSettings(protocol=protocol), tokenizers, max_connections=2)
        try:
            await client.identify()
            if why := client.refusal(request):
                raise ValueError(why)
            return (await client.complete(request)).completion
        except CallFailed as failure:
            return failure.fault
        finally:
            await client.close()

    return asyncio.run(story())


def test_a_clamped_answer_of_a_real_server_is_kept_and_an_empty_one_fails() -> None:
    """A server cuts max_tokens down in silence, to nothing where the prompt fills the context."""
    frame = len("<|user|>\n<|assistant|>")
    with ModelServer(default=Rule(content="y" * 500), max_model_len=1000) as server:
        clamped = ask(server, asking(300, prompt="x" * (900 - frame)))
        empty = ask(server, asking(300, prompt="x" * (1000 - frame)))
        whole = ask(server, asking(300, prompt="x"))
        with pytest.raises(ValueError, match="max_tokens 1000 does not fit into the context of 1000 tokens"):
            ask(server, asking(1000))
        assert len(server.requests) == 3
    assert isinstance(clamped, Completion)
    assert clamped.content == "y" * 100
    numbers = "prompt 900 + max_tokens 300 > context 1000 tokens of toy-model"
    assert clamped.notes == [f"the end of the context cut the answer after 100 tokens: {numbers}"]
    assert isinstance(empty, Fault)
    assert empty.kind is FaultKind.CONTEXT_OVERFLOW
    assert empty.message == "prompt 1000 + max_tokens 300 > context 1000 tokens of toy-model: no token came"
    assert isinstance(whole, Completion)
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 300)


@pytest.mark.parametrize(
    ("protocol", "dialect", "prompt"),
    [
        ("auto", "vllm", 1000),
        ("auto", "sglang", 800),
        ("sglang", "sglang", 800),
        ("vllm-tokens", "vllm", 1000),
    ],
)
def test_a_counted_prompt_that_cannot_be_answered_is_not_sent(protocol: Protocol, dialect: str, prompt: int) -> None:
    """Where the tokenizer is at hand the sample fails at once with the numbers, and no request is made."""
    with ModelServer(dialect=dialect, max_model_len=1000) as server:
        fault = ask(server, asking(300, prompt="x" * prompt), protocol=protocol, counts=True)
        assert server.requests == ()
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.CONTEXT_OVERFLOW
    assert re.fullmatch(
        r"prompt \d+ \+ max_tokens 300 > context 1000 tokens of toy-model; it was not sent", fault.message
    )


@pytest.mark.parametrize("protocol", ["auto", "vllm-tokens"])
def test_a_counted_prompt_with_too_little_room_is_answered_and_its_end_is_judged(protocol: Protocol) -> None:
    """A vLLM answers it: what ended by itself is whole, and what the context cut says so."""
    by_text = protocol == "auto"  # the byte tokenizer does not know the server's end token
    with ModelServer(default=Rule(content="y" * 20), max_model_len=1000, token_ids=not by_text) as server:
        whole = ask(server, asking(300, prompt="x" * 800), protocol=protocol, counts=True)
        server.set_rules(default=Rule(content="y" * 500))
        clamped = ask(server, asking(300, prompt="x" * 800), protocol=protocol, counts=True)
    assert isinstance(whole, Completion)
    assert (whole.content, whole.finish_reason) == ("y" * 20, "stop")
    assert isinstance(clamped, Completion)
    assert fits.is_cut(clamped)
