"""Every known answer of every server becomes the record that it must become, field by field."""

from __future__ import annotations

import msgspec
import pytest

from app.records import Completion
from tests.support.answer_shapes import Shape
from tests.support.answer_shapes_of_all import CHAT_SHAPES, body_of
from workers.clients.answers import decode_answer, parse_chat_answer
from workers.clients.backends import DIALECTS
from workers.clients.base import CallFailed
from workers.clients.exact import stop_ids_of, with_sure_ids

_EMPTY = msgspec.to_builtins(Completion())


def _read(shape: Shape) -> Completion:
    completion = parse_chat_answer(decode_answer(body_of(shape)), tools=shape.tools)
    keeps_end = DIALECTS[shape.backend].keeps_end
    return with_sure_ids(completion, keeps_end=keeps_end, stop_ids=stop_ids_of(shape.sampling))


@pytest.mark.parametrize("shape", CHAT_SHAPES, ids=lambda shape: f"{shape.backend or 'other'}: {shape.name}")
def test_an_answer_becomes_its_record(shape: Shape) -> None:
    """Each field of the completion is what the server said, and whatever it did not say is null."""
    if shape.fields is None:
        with pytest.raises(CallFailed) as failure:
            _read(shape)
        assert failure.value.fault.kind == shape.fault
        return
    completion = _read(shape)
    assert msgspec.to_builtins(completion) == {**_EMPTY, **shape.fields}
    assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion


def test_the_table_is_no_smaller_than_it_was() -> None:
    """Each of the servers has its answers in the table, under names of their own."""
    names = [(shape.backend, shape.name) for shape in CHAT_SHAPES]
    assert len(set(names)) == len(names) >= 60
    assert {shape.backend for shape in CHAT_SHAPES} == set(DIALECTS)
