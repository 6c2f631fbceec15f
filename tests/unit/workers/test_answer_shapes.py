"""Every known answer of every server becomes the record that it must become, field by field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from app.records import Completion, Record, Sample
from app.settings import ServerSettings, generation_from_content
from producer.simulator.server import ModelServer
from tests.support.answer_shapes import Shape
from tests.support.answer_shapes_native import NATIVE_SHAPES, QUESTION, REQUEST_ID, common_of
from tests.support.answer_shapes_of_all import CHAT_SHAPES, REASONS, body_of
from tests.support.byte_tokenizer import loaded_tokenizers
from workers.caller import Outcome
from workers.clients.answers import decode_answer, parse_chat_answer
from workers.clients.backends import DIALECTS
from workers.clients.base import CallFailed, Request
from workers.clients.exact import stop_ids_of, with_sure_ids
from workers.clients.make import make_client
from workers.outcomes import make_record
from workers.rendering import Tokenizers

_EMPTY = msgspec.to_builtins(Completion())
_NOT_IN_RECORDS = frozenset({"response_id", "model"})
"""Of a record's model its caller decides, who knows what was asked for."""
_PROTOCOLS = {"sglang": "sglang", "vllm": "vllm-tokens"}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
_ANSWERED = [shape for shape in CHAT_SHAPES if shape.fields is not None]
_FAULTS = [shape for shape in CHAT_SHAPES if shape.fields is None]


def _name(shape: Shape) -> str:
    return f"{shape.backend or 'other'}: {shape.name}"


def _read(shape: Shape) -> Completion:
    completion = parse_chat_answer(decode_answer(body_of(shape)), tools=shape.tools)
    keeps_end = DIALECTS[shape.backend].keeps_end
    return with_sure_ids(completion, keeps_end=keeps_end, stop_ids=stop_ids_of(shape.sampling))


@pytest.mark.parametrize("shape", _ANSWERED, ids=_name)
def test_an_answer_becomes_its_record(shape: Shape) -> None:
    """Each field of the completion is what the server said, and whatever it did not say is null; so it is recorded."""
    completion = _read(shape)
    expected = {**_EMPTY, **(shape.fields or {})}
    assert msgspec.to_builtins(completion) == expected
    assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion

    record = msgspec.to_builtins(_record_of(completion))
    assert {name: record[name] for name in expected if name not in _NOT_IN_RECORDS} == {
        name: value for name, value in expected.items() if name not in _NOT_IN_RECORDS
    }
    reason = REASONS.get((shape.backend, shape.name))
    assert (record["reason"], record["verdict"]) == (reason, "rejected" if reason else "accepted")


@pytest.mark.parametrize("shape", _FAULTS, ids=_name)
def test_what_is_no_answer_is_its_fault(shape: Shape) -> None:
    """An answer that was broken off, or is none, fails with the class that says what to do about it."""
    with pytest.raises(CallFailed) as failure:
        _read(shape)
    assert failure.value.fault.kind == shape.fault


def _record_of(completion: Completion) -> Record:
    outcome = Outcome(
        completion=completion,
        fault=None,
        endpoint="http://server",
        protocol="openai",
        attempts=1,
        faults=[],
        started_at=1.0,
        finished_at=2.0,
        latency_s=1.0,
        request_id="s-r0-a1",
        model="m",
        seed=None,
    )
    sample = Sample(id="s", messages=QUESTION, settings="f" * 16)
    return make_record("d", sample, outcome, generation_from_content({}), worker="w")


@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=_name)
def test_an_answer_in_token_ids_becomes_its_record(shape: Shape) -> None:
    """The same of the endpoints that take and give ids, asked for real: the ids are the server's, the text is whole."""
    tokenizers = loaded_tokenizers()
    asked = asyncio.run(asyncio.wait_for(_ask(shape, tokenizers), 60))
    if shape.fields is None:
        assert asked == shape.fault
        return
    expected = {**_EMPTY, "template": tokenizers.fingerprints["toy-model"], **common_of(shape), **shape.fields}
    assert msgspec.to_builtins(asked) == expected


async def _ask(shape: Shape, tokenizers: Tokenizers) -> Completion | str:
    """Return the completion of one question that is answered with the shape, or the class of its fault."""
    with ModelServer([{"body": json.dumps(shape.body)}], dialect=shape.backend) as server:
        settings = ServerSettings(protocol=_PROTOCOLS[shape.backend])
        client = make_client(server.url, settings, tokenizers, max_connections=1)
        sampling: dict[str, Any] = {"max_tokens": 100, **shape.sampling}
        tools = _TOOLS if shape.tools else None
        request = Request(messages=QUESTION, model="toy-model", sampling=sampling, request_id=REQUEST_ID, tools=tools)
        try:
            return (await client.complete(request)).completion
        except CallFailed as failure:
            return str(failure.fault.kind)
        finally:
            await client.close()


def test_the_tables_hold_every_server_once() -> None:
    """Each of the servers has its answers in the table, under names of their own."""
    for shapes in (CHAT_SHAPES, NATIVE_SHAPES):
        names = [(shape.backend, shape.name) for shape in shapes]
        assert len(set(names)) == len(names)
    assert {shape.backend for shape in CHAT_SHAPES} == set(DIALECTS)
    assert {shape.backend for shape in NATIVE_SHAPES} == set(_PROTOCOLS)
    assert set(REASONS) <= {(shape.backend, shape.name) for shape in _ANSWERED}
