"""What may become hidden states: names, ids, limits, and where files go."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from app.errors import SettingError, UsageError
from app.extraction import (
    Extracted,
    Layout,
    Plan,
    Precision,
    Reason,
    Refusal,
    Sequence,
    SourceRecord,
    check_sequence,
    exact_sequence,
    extraction_name,
    plan_from_content,
)
from app.places import is_extraction, queue_name
from app.records import Usage
from tests.support.processes import PROJECT_ROOT


def plan(**fields: object) -> Plan:
    """Return a plan; `fields` replace what it has."""
    plain: dict[str, object] = {
        "source": "chat",
        "model": "/models/m",
        "layers": [2, 4, 5],
        "num_layers": 8,
        "hidden_size": 100,
        "vocab_size": 50,
        "dtype": Precision.BF16,
        "layout": Layout.SPECFORGE,
        "output": "states",
    }
    return Plan(**{**plain, **fields})  # type: ignore[arg-type]


def test_hidden_states_have_a_queue_of_their_own() -> None:
    """A worker can tell by the name alone whether a queue holds prompts or records to extract."""
    assert queue_name("chat") == "mill.chat"
    assert queue_name("chat.hidden") == "extract.chat.hidden"
    assert queue_name("My Chat.hidden").startswith("extract.my_chat.hidden~")
    assert not is_extraction("chat.hidden.2")


def test_the_new_dataset_is_named_after_its_source() -> None:
    """It is called DATASET.hidden, or as the user says, if that says what it is."""
    assert extraction_name("chat", None) == "chat.hidden"
    assert extraction_name("chat", "chat-8b.hidden") == "chat-8b.hidden"
    for wrong in ("chat-8b", ".hidden"):
        with pytest.raises(UsageError, match=r"has to end in \.hidden"):
            extraction_name("chat", wrong)


def test_exact_ids_are_taken_as_they_are() -> None:
    """The ids are the prompt's and then the answer's, with a mask of 1 for what the model wrote."""
    found = exact_sequence(SourceRecord(id="a", prompt_token_ids=[1, 2], output_ids=[3], usage=Usage(2, 1)))
    assert isinstance(found, Sequence)
    assert (found.ids, found.mask, len(found), found.retokenized) == ([1, 2, 3], [0, 0, 1], 3, False)


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        (SourceRecord(id="a"), Reason.NO_EXACT_IDS, "--retokenize"),
        (SourceRecord(id="a", prompt_token_ids=[1]), Reason.NO_EXACT_IDS, "no exact token ids of the answer;"),
        (SourceRecord(id="a", output_ids=[1]), Reason.NO_EXACT_IDS, "no exact token ids of the prompt;"),
        (
            SourceRecord(id="a", prompt_token_ids=[1], output_ids=[2, 3], usage=Usage(1, 3)),
            Reason.COUNT_DIFFERS,
            "2 output ids, but the server counted 3",
        ),
        (SourceRecord(id="a", prompt_token_ids=[1], output_ids=[]), Reason.NO_ANSWER, "no tokens"),
    ],
)
def test_what_has_no_exact_ids_is_refused(record: SourceRecord, reason: Reason, words: str) -> None:
    """A record whose ids are missing, empty or contradicted is refused with the reason and the numbers."""
    found = exact_sequence(record)
    assert isinstance(found, Refusal)
    assert found.reason is reason
    assert words in found.detail


def test_lengths_and_vocabulary_are_limits() -> None:
    """A sequence that is too long is refused with the numbers, and so are ids of another model's vocabulary."""
    assert check_sequence(Sequence([1] * 6, [2] * 4), plan(max_length=10)) is None
    long = check_sequence(Sequence([1] * 6, [2] * 5), plan(max_length=10))
    assert long == Refusal(Reason.TOO_LONG, "11 tokens (prompt 6, answer 5), and at most 10 are taken")
    foreign = check_sequence(Sequence([1], [50]), plan())
    assert foreign is not None
    assert foreign.reason is Reason.OUTSIDE_VOCABULARY
    assert "token id 50" in foreign.detail


def test_a_plan_survives_its_way() -> None:
    """What travels with the samples is the whole plan; the manifest holds what changes content, and that reads too."""
    one = plan(batch_tokens=77, max_length=9)
    assert plan_from_content(msgspec.json.decode(msgspec.json.encode(one.carried()))) == one
    assert plan_from_content(one.content()) == msgspec.structs.replace(one, batch_tokens=plan().batch_tokens)
    assert one.content() == plan(batch_tokens=78, max_length=9).content()
    with pytest.raises(SettingError, match="does not fit this version"):
        plan_from_content({"max_tokens": 3})


def test_files_lie_where_their_readers_look() -> None:
    """Speculators asks for files by number from 0; the others are named after the sample, in at most 256 folders."""
    assert plan(layout=Layout.SPECULATORS).file_of("a", 1) == "hidden_states/hs_0.safetensors"
    assert plan(layout=Layout.MODELOPT).file_of("a", 1) == "ca/a.pt"
    assert plan().file_of("a", 7) == "ca/a.ckpt"
    assert plan().folder(Path("/p/chat.hidden")) == Path("/p/chat.hidden/states")
    assert plan(output="/data/x").folder(Path("/p/chat.hidden")) == Path("/data/x")


def test_the_size_of_a_token_is_known() -> None:
    """Four states of 100 bf16 numbers and two 64-bit integers are 816 bytes; twice the states in fp32."""
    assert plan().bytes_per_token == 816
    assert plan(dtype=Precision.FP32).bytes_per_token == 1616


def _names(heading: str) -> list[str]:
    """Return the first cells of the page's table under a heading."""
    text = (PROJECT_ROOT / "docs" / "hidden-states.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_page_says_what_the_code_does() -> None:
    """Every reason, layout and field of a record is explained, and no other is."""
    assert _names("What is left out, and why") == list(Reason)
    assert _names("Layouts") == list(Layout)
    assert _names("A record of hidden states") == [field.name for field in msgspec.structs.fields(Extracted)]
