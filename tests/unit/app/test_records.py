"""Stable ids, seeds and the JSON form of a line."""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import records
from app.head import decode_head
from app.records import (
    Completion,
    Kind,
    Record,
    Sample,
    Source,
    Turn,
    encode_line,
    filename_safe,
    sample_id,
    sample_seed,
    split_turn,
    turn_id,
)
from tests.support.folders import pen
from tests.support.jsonl_check import parse_strict

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": _texts}), min_size=1
)


def _shuffled(value: Any, source: random.Random) -> Any:
    """Return an equal value whose objects list their keys in another order."""
    if isinstance(value, dict):
        items = [(key, _shuffled(item, source)) for key, item in value.items()]
        return dict(source.sample(items, len(items)))
    return [_shuffled(item, source) for item in value] if isinstance(value, list) else value


def test_id_is_the_same_everywhere() -> None:
    """An id is the SHA-256 of canonical JSON, so that every machine, run and version finds the same one."""
    text = '[[{"content":"Hi","role":"user"}],null,null]'
    assert sample_id(HI) == hashlib.sha256(text.encode()).hexdigest()[:24] == "a9fd22213777d180d5e3612b"


def test_source_id_is_kept_in_the_id() -> None:
    """A sample whose source has an id can be found by it."""
    text = '[[{"content":"Hi","role":"user"}],null,"q-17"]'
    assert sample_id(HI, source_id="q-17") == "q-17-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    assert sample_id(HI, source_id="org/data set:17").startswith("org_data_set_17-")


@given(messages=_messages, seed=st.integers())
def test_key_order_does_not_matter(messages: list[dict[str, Any]], seed: int) -> None:
    """The order of keys in a row does not change its id."""
    other = _shuffled(messages, random.Random(seed))
    assert sample_id(other, _shuffled([TOOL], random.Random(seed))) == sample_id(messages, [TOOL])


@given(prompts=st.lists(_messages, unique_by=records.canonical_json, max_size=8), seed=st.integers())
def test_row_order_does_not_matter(prompts: list[list[dict[str, Any]]], seed: int) -> None:
    """The same rows in another order give the same ids, one for each different prompt."""
    moved = random.Random(seed).sample(prompts, len(prompts))
    assert {sample_id(one) for one in moved} == {sample_id(one) for one in prompts}
    assert len({sample_id(one) for one in prompts}) == len(prompts)


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "user", "content": "Hi "}],
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Hi"}],
        [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    ],
)
def test_every_byte_of_a_prompt_counts(other: list[dict[str, Any]]) -> None:
    """A prompt that differs in a space, a letter's case, a role or its shape is another sample."""
    assert sample_id(other) != sample_id(HI)


def test_texts_are_not_normalised() -> None:
    """Two spellings of the same letter are two prompts, because a tokenizer sees two."""
    composed, decomposed = "\u00e9", "e\u0301"
    ids = {sample_id([{"role": "user", "content": text}]) for text in (composed, decomposed)}
    assert len(ids) == 2


@given(before=_texts, letter=st.sampled_from("é\u1ea1ÅñÜ가"), after=_texts)
def test_every_spelling_of_a_text_is_a_prompt_of_its_own(before: str, letter: str, after: str) -> None:
    """A text in composed and in decomposed letters gives two ids, whatever else it holds."""
    spellings = {unicodedata.normalize(form, before + letter + after) for form in ("NFC", "NFD")}
    assert len({sample_id([{"role": "user", "content": spelling}]) for spelling in spellings}) == 2


def test_tools_are_part_of_the_prompt() -> None:
    """Tools change the id; an empty list of them is none."""
    assert sample_id(HI, [TOOL]) != sample_id(HI)
    assert sample_id(HI, []) == sample_id(HI, None)


def test_one_source_id_with_two_prompts_gives_two_ids() -> None:
    """A source id that is used twice for different prompts loses neither of them."""
    first, second = sample_id(HI, source_id="p1"), sample_id([*HI, *HI], source_id="p1")
    assert first != second
    assert first[:3] == second[:3] == "p1-"


def test_source_ids_with_one_safe_form_stay_apart() -> None:
    """Source ids that look alike once made safe give different ids, even for one prompt."""
    spellings = ["a/b", "a_b", "a b", "a:b", "A/b", "x" * 70 + "1", "x" * 70 + "2"]
    assert len({sample_id(HI, source_id=spelling) for spelling in spellings}) == len(spellings)


def test_copies_get_ids_of_their_own() -> None:
    """The first copy of a prompt has the plain id and the others their number."""
    assert [sample_id(HI, copy=copy) for copy in (1, 2, 10)] == [
        sample_id(HI),
        f"{sample_id(HI)}.2",
        f"{sample_id(HI)}.10",
    ]


@given(source_id=_texts, copy=st.integers(1, 1000))
def test_ids_are_safe_in_file_names(source_id: str, copy: int) -> None:
    """Whatever a source's id holds, the sample's id is a short plain file name."""
    id_ = sample_id(HI, source_id=source_id, copy=copy)
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,89}", id_)


@pytest.mark.parametrize(
    ("text", "safe"),
    [("a.b-c_D1", "a.b-c_D1"), ("a / b", "a_b"), ("..", "_"), ("", "_"), ("日本", "_"), (".x.", "x"), ("é" * 99, "_")],
)
def test_filename_safe(text: str, safe: str) -> None:
    """Each run of unsafe characters becomes one underline, and dots never begin or end a name."""
    assert filename_safe(text) == safe


def test_filename_safe_is_short() -> None:
    """A safe name has at most 64 characters and does not end in a dot where it was cut."""
    assert filename_safe("a" * 63 + ".b") == "a" * 63


def test_seeds_never_change() -> None:
    """A sample's seed depends on the run's seed and its id alone, today and after a resume."""
    digest = hashlib.sha256(b"42:q-1").digest()
    assert sample_seed(42, "q-1") == int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
    assert len({sample_seed(run, id_) for run in (0, 1) for id_ in ("a", "a.2", "b")}) == 6


@given(run_seed=st.integers(), id_=_texts)
def test_seeds_fit_every_server(run_seed: int, id_: str) -> None:
    """A seed is a non-negative 31-bit integer, which every server takes."""
    assert 0 <= sample_seed(run_seed, id_) < 2**31


@given(content=_texts | st.sampled_from(["\u2028\u2029\x85\x0b\x0c\r\n\0", "\ufeff", "a\nb", "\x1c\x1d\x1e"]))
def test_a_line_is_strict_json_and_ends_once(content: str) -> None:
    r"""Whatever an answer holds, its line has one `\n`, at its end, and reads back as it was."""
    line = pen("a", content=content).line
    assert line.index(b"\n") == len(line) - 1
    assert parse_strict(line[:-1])["content"] == content


def test_unknown_is_null() -> None:
    """A record names every field, and what is not known is null."""
    fields = json.loads(pen("a").line)
    promised = {"id", "dataset", "source", "messages", "tools", "reasoning", "content", "tool_calls", "finish_reason"}
    promised |= {"prompt_token_ids", "output_ids", "usage", "model", "endpoint", "protocol", "sampling", "seed"}
    promised |= {"attempts", "started_at", "finished_at", "latency_s", "worker", "schema"}
    assert promised <= set(fields)
    assert {fields[name] for name in ("reasoning", "finish_reason", "model", "seed", "latency_s")} == {None}
    assert list(fields["usage"].values()) == [None] * 4


def test_no_number_is_written_that_json_lacks() -> None:
    """A latency that is not a number becomes null instead of breaking the file for strict readers."""
    record = msgspec.structs.replace(msgspec.json.decode(pen("a").line, type=Record), latency_s=float("nan"))
    assert parse_strict(encode_line(record)[:-1])["latency_s"] is None


def test_sample_survives_redis() -> None:
    """A sample reads back from its payload as it was, and fields that were not set take no room."""
    sample = Sample(id="a", messages=HI, tools=[TOOL], source=Source(row=3, id="q"), round=2, settings="f" * 16)
    payload = msgspec.json.encode(sample)
    assert msgspec.json.decode(payload, type=Sample) == sample
    assert b"reference" not in payload


def test_values_are_frozen() -> None:
    """Nobody can change a completion or a record after it was made."""
    with pytest.raises(AttributeError):
        Completion().content = "other"  # type: ignore[misc]


def test_kinds_are_plain_words() -> None:
    """The words in files and Redis keys are the kinds' own."""
    assert [str(kind) for kind in Kind] == ["refused", "pending", "failed", "rejected", "accepted"]


@pytest.mark.parametrize(
    ("id_", "parts"),
    [
        ("a#turn1", ("a", 1)),
        ("a.2#turn12", ("a.2", 12)),
        ("a", ("a", None)),
        ("a#turn", ("a#turn", None)),
        ("a#turnx", ("a#turnx", None)),
        ("a#turn1#turn2", ("a#turn1", 2)),
        ("a#turn²", ("a#turn²", None)),
        ("a#turn0", ("a#turn0", None)),
        ("a#turn02", ("a#turn02", None)),
        ("a#turn" + "9" * 5000, ("a#turn" + "9" * 5000, None)),
    ],
)
def test_a_turns_id_names_its_sample_and_its_number(id_: str, parts: tuple[str, int | None]) -> None:
    """A turn's id is taken apart as it was made; what only looks like one is left whole."""
    assert split_turn(id_) == parts
    if parts[1] is not None:
        assert turn_id(parts[0], parts[1]) == id_


def test_a_records_fields_of_conversations_are_there_only_where_they_are_set() -> None:
    """A record of a last turn alone has no field more than before, and a line without them is read."""
    record = Record(
        id="a", dataset="d", verdict=Kind.ACCEPTED, source=Source(), messages=[], sampling={}, settings="0" * 16
    )
    line = encode_line(record)
    assert not {"turns", "ended", "source_messages"} & set(json.loads(line))
    assert msgspec.json.decode(line, type=Record) == record
    whole = msgspec.structs.replace(record, turns=[Turn(id="a#turn1", messages=1)], ended=None, source_messages=[])
    fields = json.loads(encode_line(whole))
    assert (fields["ended"], fields["source_messages"], fields["turns"][0]["messages"]) == (None, [], 1)


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ({"usage": {"completion_tokens": 5}}, 5),
        ({"usage": {"completion_tokens": 5}, "turns": []}, 5),
        ({"usage": {"completion_tokens": 5}, "turns": [{"usage": {"completion_tokens": 4}}]}, 4),
        (
            {
                "usage": {"completion_tokens": 5},
                "turns": [{"usage": {"completion_tokens": 4}}, {"usage": None}, {"usage": {"completion_tokens": 5}}],
            },
            9,
        ),
        ({"turns": [{"usage": {"completion_tokens": 2**31 - 1}}, {"usage": {"completion_tokens": 1}}]}, 0),
    ],
)
def test_the_index_counts_the_tokens_of_all_turns(line: dict[str, Any], tokens: int) -> None:
    """A conversation's tokens are those of its turns, whose last one is the record's own."""
    assert decode_head(json.dumps({"id": "a", **line}).encode()).tokens == tokens
