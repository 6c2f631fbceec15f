"""The words of the house as frozen values: sample, ticket, completion, verdict, record, and their JSON form."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

SCHEMA_VERSION = 1
"""Version of the record line; raised whenever a field changes its meaning."""

LARGEST_COUNT = 2**31 - 1
"""No answer has more tokens and no vocabulary more ids; what a server tells beyond it is not known."""
POISON = "poison"
"""Why a sample failed over which workers or model servers died."""
CONTEXT_OVERFLOW = "context_overflow"
BAD_REQUEST = "bad_request"
REFUSED_FOR_GOOD = frozenset({CONTEXT_OVERFLOW, BAD_REQUEST})
"""Why a sample failed that the server refuses each time, as long as it is asked in the same way."""

TURN_MARK = "#turn"
"""Parts a sample's id from the number of its turn; no sample's own id holds a `#`."""

_TURN_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_SAFE_ID_CHARS = 64
_DIGEST_CHARS = 12
_ANONYMOUS_DIGEST_CHARS = 24

Message = dict[str, Any]
"""One chat message in OpenAI's form: role, content, and where used tool_calls, tool_call_id, name."""


class Kind(enum.StrEnum):
    """What became of one line of input; the first is a row, the others are a sample's states on disk."""

    REFUSED = "refused"
    PENDING = "pending"
    FAILED = "failed"
    REJECTED = "rejected"
    ACCEPTED = "accepted"


RECORDED = (Kind.FAILED, Kind.REJECTED, Kind.ACCEPTED)
"""Kinds whose lines are records: of a sample that was asked, and not only taken."""
ANSWERED = (Kind.REJECTED, Kind.ACCEPTED)
"""Kinds whose records hold an answer."""
ASKED_AGAIN = (Kind.FAILED, Kind.REJECTED)
"""Kinds of which a sample may be asked again, and an id may have one line per round; of the others it has one."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a sample came from."""

    row: int | None = None
    """1-based number of the row (the line, for text files) in the source."""
    id: str | None = None
    """The source's own id, unchanged; None where it has none."""
    name: str | None = None
    """The file inside a folder, or the split, that the row was read from; None for a single file."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A prompt with a stable id: what waits in Redis until it is recorded."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    source: Source = Source()
    reference: Message | None = None
    """The source's own last assistant turn, cut off the prompt."""
    round: int = 0
    """0 for the first time it is asked, raised by one with every retry of a failed or rejected sample."""
    settings: str = ""
    """Fingerprint of the generation settings it was enqueued with."""


class Ticket(msgspec.Struct, frozen=True):
    """All that a Celery message carries."""

    dataset: str
    sample_id: str


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the server reported them; None is unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the server answered, normalised over all protocols; None is unknown, never guessed."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_field: str | None = None
    """The answer's field that held the reasoning."""
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    unparsed_calls: bool = False
    """Whether tools were offered and the content still holds the markup of calls that nobody could read."""
    prompt_token_ids: list[int] | None = None
    output_ids: list[int] | None = None
    ids: str | None = None
    """Where the ids came from: "server"; None where there are none."""
    ids_end: str | None = None
    """What the output ids end with: "eos", "stop" (a stop string's or stop token's ids), "none", or None: unknown."""
    ids_check: str | None = None
    """Whether the decoded output ids were compared with the answer's text: "ok", "mismatch", or None: they were not."""
    raw: str | None = None
    """The model's whole text, where reasoning and content do not say it."""
    template: str | None = None
    """Fingerprint of the chat template, where the prompt was rendered here."""
    notes: list[str] = []
    """What was odd about the answer, a sentence each."""
    usage: Usage = Usage()
    model: str | None = None
    """The model's name as the server gave it."""
    response_id: str | None = None


class Verdict(msgspec.Struct, frozen=True):
    """The answer to: is a completion worth keeping."""

    kind: Kind
    """ACCEPTED or REJECTED; FAILED when no completion came."""
    reason: str | None = None
    """One word for why it was not accepted."""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed call on the way to a record."""

    fault: str
    """The fault's class."""
    endpoint: str
    at: float
    """Unix time at which the call ended, in seconds."""
    message: str = ""
    """The server's or the transport's words, bounded."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that was made anew, as the record of its conversation tells of it."""

    id: str
    messages: int
    """How many messages stood before it."""
    finish_reason: str | None = None
    usage: Usage = Usage()
    latency_s: float | None = None
    attempts: int = 0
    request_id: str | None = None
    endpoint: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `raw_responses.jsonl`, `rejected.jsonl` or `failures.jsonl`."""

    id: str
    dataset: str
    verdict: Kind
    reason: str | None = None
    """Why it was rejected or failed (a verdict's reason or a fault's class)."""
    error: str | None = None
    """The last error's words, for failures."""
    source: Source
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    reference: Message | None = None
    reasoning: str | None = None
    reasoning_field: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    unparsed_calls: bool = False
    prompt_token_ids: list[int] | None = None
    output_ids: list[int] | None = None
    ids: str | None = None
    ids_end: str | None = None
    ids_check: str | None = None
    raw: str | None = None
    template: str | None = None
    notes: list[str] = []
    usage: Usage = Usage()
    model: str | None = None
    endpoint: str | None = None
    backend: str | None = None
    """Which server it is and in which version, as far as it told."""
    protocol: str | None = None
    sampling: dict[str, Any]
    """Every generation parameter that was sent."""
    seed: int | None = None
    settings: str
    """Fingerprint of the generation settings (see `manifest.json`)."""
    round: int = 0
    attempts: int = 0
    """Calls made, the last one included."""
    faults: list[Attempt] = []
    """The failed calls, at most the newest 16."""
    started_at: float | None = None
    finished_at: float | None = None
    latency_s: float | None = None
    """Seconds of the last call alone, waiting for a permit not included."""
    worker: str | None = None
    request_id: str | None = None
    turns: list[Turn] | msgspec.UnsetType = msgspec.UNSET
    """Of a conversation whose turns were all made anew: each of them; the last one is what the record holds."""
    ended: str | msgspec.UnsetType | None = msgspec.UNSET
    """Why such a conversation ended before the source's did; None: it did not."""
    source_messages: list[Message] | msgspec.UnsetType = msgspec.UNSET
    """The source's own messages of such a conversation: what its id is made of, and what a retry asks."""
    schema: int = SCHEMA_VERSION


class RefusedRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of `refused.jsonl`: a source row that never became a sample."""

    id: str
    """A stable name for the row: its content's digest, and its occurrence where equal rows repeat."""
    source: str
    row: int
    reason: str
    """One word (see producer.refusals.Reason)."""
    detail: str = ""
    """The reason in words, naming the field, role or line."""
    name: str | None = None
    start: str = ""
    """The row's first characters, bounded."""


class KnownSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of `samples.jsonl`: an id that enqueue took, written before it reaches Redis."""

    id: str
    row: int | None = None


def canonical_json(value: Any) -> bytes:
    """Return strict JSON with sorted keys and no spaces: the form that every digest is made of."""
    return msgspec.json.encode(value, order="sorted")


def filename_safe(text: str) -> str:
    """Return at most 64 characters of `text` with every run outside A-Z a-z 0-9 . _ - made one `_`."""
    return _UNSAFE.sub("_", text)[:_SAFE_ID_CHARS].strip(".") or "_"


def sample_id(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    source_id: str | None = None,
    copy: int = 1,
) -> str:
    """Return the stable id of a prompt: the same on every machine, whatever the order or position of rows.

    With a source id it is `<safe source id>-<12 hex digits>`, else `<24 hex digits>`; the digits are a SHA-256 of
    the canonical messages, tools and source id, so one source id with two different prompts gives two ids, and an
    edited prompt is a new sample. Texts are compared as they are: no Unicode normalisation, no trimming. `copy`
    counts from 1; the second and later copies of a prompt (`--samples-per-prompt`) end in `.2`, `.3`, ...
    """
    digest = hashlib.sha256(canonical_json([list(messages), list(tools) if tools else None, source_id])).hexdigest()
    name = digest[:_ANONYMOUS_DIGEST_CHARS]
    if source_id:
        name = f"{filename_safe(source_id)}-{digest[:_DIGEST_CHARS]}"
    return name if copy == 1 else f"{name}.{copy}"


def sample_seed(run_seed: int, id_: str) -> int:
    """Return the sample's own seed (0 <= seed < 2**31), so that a resume changes no draw."""
    digest = hashlib.sha256(f"{run_seed}:{id_}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def turn_id(id_: str, number: int) -> str:
    """Return the id of a sample's turn, counted from 1."""
    return f"{id_}{TURN_MARK}{number}"


def split_turn(id_: str) -> tuple[str, int | None]:
    """Return a sample's id and the number of its turn; of an id that names no turn None."""
    sample, mark, number = id_.rpartition(TURN_MARK)
    return (sample, int(number)) if mark and _TURN_NUMBER.fullmatch(number) else (id_, None)


def encode_line(value: msgspec.Struct) -> bytes:
    r"""Return one durable line: strict UTF-8 JSON and a final `\n`."""
    return msgspec.json.encode(value) + b"\n"
