"""A conversation of which every turn is made anew by a real model, through llama.cpp's own server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.books import balanced, records
from tests.support.mill import Mill
from tests.support.real_servers import RealServer, llama_server
from tests.support.turns import talk, turn_records

_TURNS = ("My name is Ada.", "Name a fruit.", "What is my name?")


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Run a llama.cpp server."""
    with llama_server(tmp_path_factory.mktemp("llama"), slots=1) as server:
        yield server


@pytest.mark.slow
def test_a_real_model_goes_on_with_its_own_turns(mill: Mill, llama: RealServer) -> None:
    """Each prompt of a real server holds the one before, its answer and the next question."""
    mill.env.update(MILL_MODEL_URLS=f"{llama.url}/v1", MILL_MAX_IN_FLIGHT="1")
    mill.enqueue([talk(*_TURNS, id="ada")], "--turns", "all", "--max-tokens", "24", "--keep-truncated")
    mill.worker(concurrency=1)
    balanced(mill, accepted=1)
    (record,) = records(mill)
    first, second = turn_records(mill)
    assert [message["content"] for message in record["messages"]] == [
        *(_TURNS[0], first["content"], _TURNS[1], second["content"], _TURNS[2])
    ]
    prompts = [turn["usage"]["prompt_tokens"] for turn in record["turns"]]
    answers = [turn["usage"]["completion_tokens"] for turn in record["turns"]]
    for before, answer, after in zip(prompts[:-1], answers[:-1], prompts[1:], strict=True):
        assert after > before + answer > before
