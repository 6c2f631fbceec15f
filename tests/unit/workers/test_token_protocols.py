"""The protocols that take token ids, SGLang's /generate and vLLM's /inference/v1/generate, against the fake server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Completion
from app.settings import ServerSettings
from producer.ports import free_port
from producer.simulator.rules import Rule
from producer.simulator.server import ModelServer
from producer.simulator.shapes import decode as decode_chat
from producer.simulator.tokens import END, MARKS, decode, encode
from tests.support.byte_tokenizer import PlainByteTokenizer, loaded_tokenizers
from tests.support.fake_client import until
from workers.clients.base import CallFailed, Client, Request
from workers.clients.make import make_client
from workers.faults import Fault
from workers.rendering import Tokenizers

DIALECT = {"sglang": "sglang", "vllm-tokens": "vllm"}
EOS = MARKS[END]
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

both = pytest.mark.parametrize("protocol", ["sglang", "vllm-tokens"])


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's story with a deadline."""
    asyncio.run(asyncio.wait_for(story, 60))


def request(text: str = "Say hi \U0001f305", **changes: Any) -> Request:
    """Return a question."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "model": "toy-model",
        "sampling": {"max_tokens": 200},
        "request_id": "s-r0-a1",
    }
    return Request(**{**fields, **changes})


@contextlib.asynccontextmanager
async def asking(
    server: ModelServer, protocol: str, *, loaded: PlainByteTokenizer | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """Hold a client for the length of a block."""
    servers = ServerSettings(protocol=protocol, **settings)
    client = make_client(server.url, servers, loaded_tokenizers(loaded), max_connections=8)
    try:
        yield client
    finally:
        await client.close()


async def ask(client: Client, **changes: Any) -> Completion:
    """Return the completion of one question."""
    return (await client.complete(request(**changes))).completion


async def fault_of(client: Client, **changes: Any) -> Fault:
    """Return the fault that one question fails with."""
    with pytest.raises(CallFailed) as failure:
        await client.complete(request(**changes))
    return failure.value.fault


@both
def test_the_ids_are_the_models_own(protocol: str) -> None:
    """The prompt is rendered here and sent as ids; the answer's ids are kept with their end, and decode to its text."""

    async def story() -> None:
        rule = Rule(reasoning="Hm, é.", content="Hi \U0001f305.")
        with ModelServer(default=rule, dialect=DIALECT[protocol]) as server:
            async with asking(server, protocol) as client:
                said = await ask(client)
            prompt = encode("<|im_start|>user\nSay hi \U0001f305<|im_end|>\n<|im_start|>assistant\n")
            [seen] = server.requests
            assert seen.body["input_ids" if protocol == "sglang" else "token_ids"] == prompt
            assert said.prompt_token_ids == prompt
            assert said.output_ids == [*encode("<think>Hm, é.</think>Hi \U0001f305."), EOS]
            assert decode(said.output_ids[:-1]) == f"<think>{said.reasoning}</think>{said.content}"
            assert (said.reasoning, said.content, said.raw) == ("Hm, é.", "Hi \U0001f305.", None)
            assert (said.ids, said.ids_end, said.finish_reason) == ("server", "eos", "stop")
            assert said.ids_check == ("ok" if protocol == "sglang" else None)
            assert len(said.template or "") == 16
            assert said.usage.prompt_tokens == len(prompt)
            assert said.usage.completion_tokens == len(said.output_ids)

    run(story())


def test_sglangs_names_and_its_limit_are_sent() -> None:
    """`max_new_tokens` is always said, for SGLang cuts at 128 without it; every parameter has its name there."""

    async def story() -> None:
        sampling = {
            "max_tokens": 300,
            "min_tokens": 2,
            "temperature": 0.5,
            "stop": ["END"],
            "priority": 3,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        with ModelServer(default=Rule(content="x" * 250), dialect="sglang") as server:
            async with asking(server, "sglang") as client:
                said = await ask(client, sampling=sampling, seed=7)
            assert (said.content, said.finish_reason) == ("x" * 250, "stop")
            [seen] = server.requests
            assert seen.body["rid"] == "s-r0-a1"
            assert seen.body["priority"] == 3
            assert seen.body["sampling_params"] == {
                "max_new_tokens": 300,
                "min_new_tokens": 2,
                "temperature": 0.5,
                "stop": ["END"],
                "sampling_seed": 7,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }

    run(story())


def test_vllms_parameters_are_sent() -> None:
    """VLLM gets its own names, the request id, and no template option among the sampling parameters."""

    async def story() -> None:
        with ModelServer() as server:
            async with asking(server, "vllm-tokens") as client:
                await ask(client, sampling={"max_tokens": 300, "top_k": 4, "reasoning_effort": "low"}, seed=7)
            [seen] = server.requests
            assert seen.body["request_id"] == seen.headers["x-request-id"] == "s-r0-a1"
            assert seen.body["sampling_params"] == {"max_tokens": 300, "top_k": 4, "seed": 7}

    run(story())


@both
@pytest.mark.parametrize(
    ("rule", "opened", "limit", "expected"),
    [
        (Rule(reasoning="Hm.", content="Yes."), True, 99, ("Hm.", "Yes.", "stop", "eos", None)),
        (Rule(reasoning="Hm.", content="Yes."), True, 3, ("Hm.", None, "length", "none", None)),
        (Rule(reasoning="Hm.", content="Yes."), False, 4, ("Hm.", None, "length", "none", None)),
        (Rule(reasoning="Hm.", content="Yes."), False, 6, ("Hm.", "Y", "length", "none", None)),
        (Rule(content="All thought."), True, 99, ("All thought.", None, "stop", "eos", None)),
        (Rule(content="a</think>b</think>c"), False, 99, (None, "a</think>b</think>c", "stop", "eos", None)),
        (
            Rule(content="<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
            False,
            999,
            (
                "So.",
                "Yes.",
                "stop",
                "eos",
                "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            ),
        ),
    ],
)
def test_thought_and_answer_come_apart(
    protocol: str, rule: Rule, *, opened: bool, limit: int, expected: tuple[Any, ...]
) -> None:
    """Thought ends at its closing tag, also where the prompt opened it; cut before, all of it is thought."""

    async def story() -> None:
        loaded = PlainByteTokenizer(opens_thought=opened)
        with ModelServer(default=rule, dialect=DIALECT[protocol]) as server:
            async with asking(server, protocol, loaded=loaded) as client:
                said = await ask(client, sampling={"max_tokens": limit})
        assert (said.reasoning, said.content, said.finish_reason, said.ids_end, said.raw) == expected

    run(story())


@both
def test_tool_calls_are_read_where_their_form_is_known(protocol: str) -> None:
    """Calls in Qwen's form become tool calls beside the whole text; others stay text, and the completion says so."""

    async def story() -> None:
        rules = [
            Rule(match="call", tool_calls=[CALL]),
            Rule(match="other", content="[TOOL_CALLS]f{}"),
            Rule(match="broken", content='<tool_call>\n{"name": "f", "argu\n</tool_call>'),
        ]
        with ModelServer(rules, dialect=DIALECT[protocol]) as server:
            async with asking(server, protocol) as client:
                called = await ask(client, text="call", tools=TOOLS)
                other = await ask(client, text="other", tools=TOOLS)
                broken = await ask(client, text="broken", tools=TOOLS)
                untooled = await ask(client, text="other")
        assert called.tool_calls is not None
        assert json.loads(called.tool_calls[0]["function"]["arguments"]) == {"a": "é"}
        assert (called.finish_reason, called.content, called.unparsed_calls) == ("tool_calls", None, False)
        assert "<tool_call>" in (called.raw or "")
        for said in (other, broken):
            assert (said.tool_calls, said.unparsed_calls, said.finish_reason) == (None, True, "stop")
        assert other.content == "[TOOL_CALLS]f{}"
        assert not untooled.unparsed_calls

    run(story())


def test_what_stops_an_answer_is_not_in_its_text() -> None:
    """VLLM leaves a stop string in the ids: the text ends before it, and the record says what ended it."""

    async def story() -> None:
        with ModelServer(default=Rule(content="Yes.END", finish_reason="stop")) as server:
            async with asking(server, "vllm-tokens") as client:
                by_end = await ask(client, sampling={"max_tokens": 99, "stop": ["OTHER"]})
                by_id = await ask(client, sampling={"max_tokens": 99, "stop_token_ids": [EOS]})
        assert (by_end.content, by_end.stop_reason, by_end.ids_end) == ("Yes.END", None, "eos")
        assert (by_id.content, by_id.stop_reason) == ("Yes.END", EOS)

    run(story())


@both
@pytest.mark.parametrize(
    ("rule", "changes", "kind"),
    [
        (Rule(finish_reason="abort"), {}, "aborted"),
        (Rule(finish_reason=None), {}, "unfinished"),
        (Rule(finish_reason="repetition"), {}, "unfinished"),
        (Rule(body='{"error": {"message": "no", "code": 500}}'), {}, "bad_answer"),
        (Rule(body="<html>busy</html>"), {}, "bad_answer"),
        (Rule(body="[]"), {}, "bad_answer"),
        (Rule(body="{}"), {}, "bad_answer"),
        (Rule(status=503, message="The request queue is full."), {}, "overloaded"),
        (Rule(status=500), {}, "server_error"),
        (Rule(), {"text": "x" * 2000}, "context_overflow"),
        (Rule(), {"messages": [{"role": "forbidden", "content": "x"}]}, "bad_request"),
        (Rule(), {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "bad_request"),
    ],
)
def test_what_is_no_answer_is_a_fault(protocol: str, rule: Rule, changes: dict[str, Any], kind: str) -> None:
    """Aborts, errors and prompts that cannot be rendered or do not fit have the fault that tells what to do."""

    async def story() -> None:
        with ModelServer(default=rule, dialect=DIALECT[protocol], max_model_len=1000) as server:
            async with asking(server, protocol) as client:
                fault = await fault_of(client, **changes)
        assert fault.kind == kind

    run(story())


def test_a_cancelled_request_is_aborted_on_the_server() -> None:
    """Whoever gives a request up tells SGLang so by its id, and a request that runs out of time is given up too."""

    async def story() -> None:
        with ModelServer(default=Rule(hang=True), dialect="sglang") as server:
            async with asking(server, "sglang", request_timeout_s=0.5) as client:
                assert (await fault_of(client, request_id="late-a1")).kind == "timeout"
                await until(lambda: server.aborts == ("late-a1",))
            async with asking(server, "sglang") as client:
                asked = asyncio.create_task(client.complete(request(request_id="cancelled-a1")))
                await until(lambda: server.in_flight == 1)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            assert server.aborts == ("late-a1", "cancelled-a1")
            assert server.in_flight == 0

    run(story())


def test_a_request_that_still_runs_from_an_earlier_life_is_aborted() -> None:
    """The same id twice is refused by the server; the orphan is aborted, and the next attempt has an id of its own."""

    async def story() -> None:
        rules = [Rule(hang=True, times=1)]
        with ModelServer(rules, dialect="sglang") as server:
            async with asking(server, "sglang") as orphan, asking(server, "sglang") as client:
                left = asyncio.create_task(orphan.complete(request()))
                await until(lambda: server.in_flight == 1)
                assert (await fault_of(client)).kind == "duplicate_id"
                await until(lambda: server.aborts == ("s-r0-a1",))
                assert (await ask(client, request_id="s-r0-a2")).content == "echo: Say hi \U0001f305"
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)

    run(story())


def test_a_server_that_is_gone_needs_no_abort() -> None:
    """Giving a request up never raises, even where nobody is left to be told."""

    async def story() -> None:
        server = ModelServer(dialect="sglang", port=free_port())
        async with asking(server, "sglang") as client:
            assert (await fault_of(client)).kind == "connect"

    run(story())


@both
def test_parameters_that_the_server_would_pass_over_are_named(protocol: str) -> None:
    """A misspelt parameter is refused with a near name, unless everything is to be sent."""

    async def story() -> None:
        asked = request(sampling={"max_tokens": 9, "repetition_penality": 1.1})
        with ModelServer(dialect=DIALECT[protocol]) as server:
            async with asking(server, protocol) as client:
                why = client.refusal(asked)
                assert why is not None
                assert "does not know repetition_penality (did you mean repetition_penalty" in why
                assert "MILL_ALLOW_UNKNOWN_PARAMETERS" in why
                assert client.refusal(request()) is None
            async with asking(server, protocol, allow_unknown_parameters=True) as client:
                assert client.refusal(asked) is None
                await client.complete(asked)
            assert server.requests[-1].body["sampling_params"]["repetition_penality"] == 1.1

    run(story())


@both
def test_a_server_of_another_make_is_refused_with_its_name(protocol: str) -> None:
    """A server that says that it is another one is not asked at all: its 404 would say nothing."""

    async def story() -> None:
        other = "vllm" if protocol == "sglang" else "sglang"
        with ModelServer(dialect=other) as server:
            async with asking(server, protocol) as client:
                await client.identify()
                why = client.refusal(request()) or ""
        assert "has no /" in why
        assert why.endswith("start the workers with MILL_PROTOCOL=auto")

    run(story())


def test_without_a_tokenizer_nothing_is_asked() -> None:
    """A tokenizer that cannot be loaded is the worker's trouble, told in one sentence, and costs no request."""

    async def story() -> None:
        with ModelServer(dialect="sglang") as server:
            async with asking(server, "sglang") as client:
                with pytest.raises(UsageError, match=r"transformers|MILL_TOKENIZER"):
                    await client.complete(request(model="/no/such/model"))
            assert server.requests == ()

    run(story())


@pytest.mark.parametrize(
    ("rule", "opened", "expected"),
    [
        (Rule(content="So"), True, (None, "So", "content")),
        (Rule(content="So"), False, ("So", None, None)),
        (Rule(content="So</think>Yes."), True, ("Yes.", "So", "content")),
        (Rule(content="Yes.", reasoning="So"), True, ("Yes.", "So", "reasoning")),
    ],
)
def test_chat_answers_are_checked_with_the_tokenizer(rule: Rule, *, opened: bool, expected: tuple[Any, ...]) -> None:
    """With MILL_TOKENIZER the ids of a prompt that opened a thought tell that a text without a tag is no answer."""

    class Toy(PlainByteTokenizer):
        """Decodes the ids of the fake server's chat endpoint, which are characters."""

        def decode(self, ids: list[int], **_options: Any) -> str:
            return decode_chat(ids) + ("<think>\n" if opened and decode_chat(ids).endswith("<|assistant|>") else "")

    async def story() -> None:
        with ModelServer(default=rule) as server:
            tokenizers = loaded_tokenizers(Toy(), model="toy", named=True)
            client = make_client(server.url, ServerSettings(), tokenizers, max_connections=8)
            await client.identify()
            said = await ask(client)
            await client.close()
        assert (said.content, said.reasoning, said.reasoning_field) == expected
        assert said.ids_check == "ok"

    run(story())


def test_a_missing_tokenizer_loses_no_chat_answer() -> None:
    """A tokenizer that is named and cannot be loaded is told before anything is asked."""

    async def story() -> None:
        with ModelServer() as server:
            client = make_client(server.url, ServerSettings(), Tokenizers("/no/such"), max_connections=8)
            with pytest.raises(UsageError, match=r"transformers|MILL_TOKENIZER"):
                await client.complete(request())
            await client.close()
            assert server.requests == ()

    run(story())
