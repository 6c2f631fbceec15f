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
from tests.support.byte_tokenizer import PlainByteTokenizer
from workers.clients import fits
from workers.clients.base import CallFailed, Request
from workers.clients.make import make_client
from workers.faults import Fault, FaultKind
from workers.rendering import Tokenizer, Tokenizers


def asking(max_tokens: int = 100, *, prompt: str = "Hi", **sampling: Any) -> Request:
    """Return a request."""
    messages = [{"role": "user", "content": prompt}]
    return Request(
        messages=messages, model="toy-model", sampling={"max_tokens": max_tokens, **sampling}, request_id="r"
    )


def fault_of(completion: Completion, request: Request, context: int | None) -> Fault | None:
    """Return what is wrong with an answer."""
    try:
        fits.check_answer(completion, request, context)
    except CallFailed as failure:
        return failure.fault
    return None


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


def test_a_counted_prompt_fits_to_the_last_token() -> None:
    """Prompt and answer may fill the context, and not have one token more."""
    fits.check_prompt(900, asking(100), 1000)
    fits.check_prompt(901, asking(100), None)
    with pytest.raises(CallFailed, match=r"^prompt 901 \+ max_tokens 100 > context 1000 tokens of toy-model") as raised:
        fits.check_prompt(901, asking(100), 1000)
    assert (raised.value.fault.kind, raised.value.fault.retry) == (FaultKind.CONTEXT_OVERFLOW, False)


def test_short_prompts_are_not_counted() -> None:
    """Only a text that could fill what the answer leaves is worth a tokenizer's time."""
    assert not fits.may_overflow(asking(), 100_000)
    assert fits.may_overflow(asking(prompt="x" * 95_000), 100_000)
    assert not fits.may_overflow(asking(prompt="x" * 95_000), None)


@pytest.mark.parametrize(
    ("finish", "prompt", "made", "context", "is_overflow"),
    [
        ("length", 950, 50, 1000, True),
        ("length", 1000, 0, 1000, True),
        ("length", 949, 49, 1000, True),  # llama.cpp leaves a token or two
        ("length", 900, 100, 1000, False),  # all that was asked for
        ("length", 500, 50, 1000, False),  # something else cut it
        ("length", 950, 50, None, False),
        ("length", None, 50, 1000, False),
        ("stop", 950, 50, 1000, False),
    ],
)
def test_an_answer_that_the_context_cut_is_no_answer(
    finish: str, prompt: int | None, made: int, context: int | None, is_overflow: bool
) -> None:
    """Cut before max_tokens, with the context full: the sample does not fit. Everything else is as it was."""
    usage = Usage(prompt_tokens=prompt, completion_tokens=made)
    fault = fault_of(Completion(finish_reason=finish, usage=usage), asking(100), context)
    assert (fault is not None) == is_overflow
    if fault is not None:
        assert fault.kind is FaultKind.CONTEXT_OVERFLOW
        assert fault.message == (
            f"prompt {prompt} + max_tokens 100 > context 1000 tokens of toy-model: the server cut the answer after "
            f"{made} tokens"
        )


def ask(server: ModelServer, request: Request) -> Completion | Fault:
    """Ask a server with a real client that has found out what it is."""

    async def story() -> Completion | Fault:
        client = make_client(server.url, ServerSettings(), Tokenizers(None), max_connections=2)
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


def test_a_clamped_and_an_empty_answer_of_a_real_server_fail_with_the_numbers() -> None:
    """A server cuts max_tokens down in silence, to nothing where the prompt fills the context: that is no record."""
    frame = len("<|user|>\n<|assistant|>")
    with ModelServer(default=Rule(content="y" * 500), max_model_len=1000) as server:
        clamped = ask(server, asking(300, prompt="x" * (900 - frame)))
        empty = ask(server, asking(300, prompt="x" * (1000 - frame)))
        whole = ask(server, asking(300, prompt="x"))
        with pytest.raises(ValueError, match="max_tokens 1000 does not fit into the context of 1000 tokens"):
            ask(server, asking(1000))
        assert len(server.requests) == 3
    assert isinstance(clamped, Fault)
    assert clamped.message == (
        "prompt 900 + max_tokens 300 > context 1000 tokens of toy-model: the server cut the answer after 100 tokens"
    )
    assert isinstance(empty, Fault)
    assert (empty.kind, empty.message[-5:]) == (FaultKind.CONTEXT_OVERFLOW, "okens")
    assert "prompt 1000 + max_tokens 300 > context 1000" in empty.message
    assert isinstance(whole, Completion)
    assert (whole.finish_reason, whole.usage.completion_tokens) == ("length", 300)


def ask_counting(server: ModelServer, protocol: Literal["auto", "sglang", "vllm-tokens"], request: Request) -> Fault:
    """Ask with a tokenizer at hand, as MILL_TOKENIZER gives one; return the fault."""

    async def story() -> Fault:
        tokenizers = Tokenizers("toy-model")
        tokenizers._loaded["toy-model"] = Tokenizer(PlainByteTokenizer(), "toy-model")
        client = make_client(server.url, ServerSettings(protocol=protocol), tokenizers, max_connections=2)
        try:
            await client.identify()
            with pytest.raises(CallFailed) as raised:
                await client.complete(request)
            return raised.value.fault
        finally:
            await client.close()

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("protocol", "dialect"), [("auto", "vllm"), ("auto", "sglang"), ("sglang", "sglang"), ("vllm-tokens", "vllm")]
)
def test_a_counted_prompt_that_does_not_fit_is_not_sent(
    protocol: Literal["auto", "sglang", "vllm-tokens"], dialect: str
) -> None:
    """Where the tokenizer is at hand the sample fails at once with the numbers, and no request is made."""
    with ModelServer(dialect=dialect, max_model_len=1000) as server:
        fault = ask_counting(server, protocol, asking(300, prompt="x" * 800))
        assert server.requests == ()
    assert fault.kind is FaultKind.CONTEXT_OVERFLOW
    assert re.fullmatch(
        r"prompt 8\d\d \+ max_tokens 300 > context 1000 tokens of toy-model; it was not sent", fault.message
    )
