"""What a run of hidden states is: its plan, the token ids of a record, and the line that names a finished file."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from app.errors import SettingError, UsageError
from app.places import EXTRACTION_SUFFIX
from app.records import SCHEMA_VERSION, Kind, Source, Usage

STATES_FOLDER = "states"
"""Where the files go, inside the dataset's folder, unless --output says otherwise."""
DEFAULT_BATCH_TOKENS = 8192
_OVERHEAD_BYTES = 2560
"""What a file takes beside its tensors: names, shapes, alignment."""
_IDS_BYTES = 16
"""What a token takes beside its states: its id and its mask, 64 bits each."""


class Layout(enum.StrEnum):
    """Whose reader the files are for."""

    SPECFORGE = "specforge"
    SPECULATORS = "speculators"
    MODELOPT = "modelopt"


class Precision(enum.StrEnum):
    """The numbers that the model is run in and that are written."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def bytes(self) -> int:
        """Return how many bytes a number takes."""
        return 2 if self is Precision.BF16 else 4


class Reason(enum.StrEnum):
    """Why a record of the source has no hidden states: the first five refuse it, the others are failures."""

    NO_EXACT_IDS = "no_exact_ids"
    COUNT_DIFFERS = "count_differs"
    NO_ANSWER = "no_answer"
    TOO_LONG = "too_long"
    OUTSIDE_VOCABULARY = "outside_vocabulary"
    OUT_OF_MEMORY = "out_of_memory"
    NOT_FINITE = "not_finite"
    SOURCE_GONE = "source_gone"
    CANNOT_TOKENIZE = "cannot_tokenize"
    LOST_THOUGHT = "lost_thought"
    POISON = "poison"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a file's content depends on; carried with the dataset and written to its manifest."""

    source: str
    """The dataset whose accepted records are run through the model."""
    model: str
    """The folder of the target model."""
    layers: list[int]
    """Auxiliary states in order: `k` is what goes into layer `k` (0-based), `hidden_states[k]` in transformers."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: Precision
    layout: Layout
    output: str
    """The folder of the files: absolute, or inside the dataset's folder."""
    max_length: int | None = None
    """The most tokens that a sequence may have."""
    retokenize: bool = False
    """Whether records without exact ids are rendered and tokenised with the model's own template."""
    trust_remote_code: bool = False
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Padded tokens of one pass through the model; changes no content, and is not in the manifest."""

    def content(self) -> dict[str, Any]:
        """Return what the manifest keeps, as plain JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        del values["batch_tokens"]
        return {"extract": values}

    def carried(self) -> dict[str, Any]:
        """Return what travels with the samples."""
        return {"extract": msgspec.to_builtins(self)}

    def bytes_of(self, tokens: int) -> int:
        """Return about how many bytes the file of a sequence takes."""
        return tokens * self.bytes_per_token + _OVERHEAD_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one token: its states, its id and its mask."""
        return (len(self.layers) + 1) * self.hidden_size * self.dtype.bytes + _IDS_BYTES

    def folder(self, dataset_folder: Path) -> Path:
        """Return the folder of the files; an absolute one stands for itself."""
        return dataset_folder / self.output

    def file_of(self, id_: str, row: int) -> str:
        """Return the path of a sample's file inside the output folder; `row` counts from 1.

        speculators asks for its files by number. The others are found wherever they lie, so that no folder has to hold
        a million of them.
        """
        if self.layout is Layout.SPECULATORS:
            return f"hidden_states/hs_{row - 1}.safetensors"
        ending = "pt" if self.layout is Layout.MODELOPT else "ckpt"
        return f"{hashlib.sha256(id_.encode()).hexdigest()[:2]}/{id_}.{ending}"


def plan_from_content(content: Mapping[str, Any]) -> Plan:
    """Read a plan back from what travelled with the samples, or from the manifest.

    Raises SettingError when it does not fit this version.
    """
    try:
        return msgspec.convert(content.get("extract"), Plan)
    except msgspec.ValidationError as error:
        message = f"The plan of this run of hidden states does not fit this version of promptmill: {error}."
        raise SettingError(message) from error


def extraction_name(source: str, into: str | None) -> str:
    """Return the name of the dataset that holds a source's hidden states.

    Raises UsageError for a name that does not say so by its ending.
    """
    name = into or f"{source}{EXTRACTION_SUFFIX}"
    if not name.endswith(EXTRACTION_SUFFIX) or name == EXTRACTION_SUFFIX:
        raise UsageError(f"--into {name!r} cannot be used: its name has to end in {EXTRACTION_SUFFIX}, as NAME.hidden.")
    return name


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0)]]


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an extraction reads of an accepted record."""

    id: str
    verdict: str = Kind.ACCEPTED
    source: Source = Source()
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_token_ids: _TokenIds | None = None
    output_ids: _TokenIds | None = None
    usage: Usage | None = None


decode_source = msgspec.json.Decoder(SourceRecord).decode


class Sequence(msgspec.Struct, frozen=True):
    """The token ids of a record: the prompt's, then the answer's."""

    prompt: list[int]
    output: list[int]
    retokenized: bool = False
    """Whether they were made of the text anew, and may differ from those that the server saw and sampled."""

    @property
    def ids(self) -> list[int]:
        """All ids."""
        return self.prompt + self.output

    @property
    def mask(self) -> list[int]:
        """1 where the model wrote the token, 0 in the prompt."""
        return [0] * len(self.prompt) + [1] * len(self.output)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.prompt) + len(self.output)


class Refusal(msgspec.Struct, frozen=True):
    """Why a record gets no hidden states."""

    reason: Reason
    detail: str


def exact_sequence(record: SourceRecord) -> Sequence | Refusal:
    """Return the ids as the server gave them, by the rule of the `tokens` export, or why there are none."""
    prompt, output = record.prompt_token_ids, record.output_ids
    if not prompt or output is None:
        whose = "the answer" if output is None else "the prompt"
        words = f"the server gave no exact token ids of {whose}; --retokenize makes ids of the text, marked as such"
        return Refusal(Reason.NO_EXACT_IDS, words)
    expected = record.usage.completion_tokens if record.usage else None
    if expected is not None and expected != len(output):
        words = f"{len(output):,} output ids, but the server counted {expected:,} completion tokens"
        return Refusal(Reason.COUNT_DIFFERS, words)
    if not output:
        return Refusal(Reason.NO_ANSWER, "the answer has no tokens")
    return Sequence(prompt, output)


def check_sequence(sequence: Sequence, plan: Plan) -> Refusal | None:
    """Return why the model cannot be run on these ids, if so."""
    if plan.max_length is not None and len(sequence) > plan.max_length:
        words = f"{len(sequence):,} tokens (prompt {len(sequence.prompt):,}, answer {len(sequence.output):,}), and at "
        return Refusal(Reason.TOO_LONG, f"{words}most {plan.max_length:,} are taken")
    if (largest := max(sequence.ids)) >= plan.vocab_size:
        words = f"token id {largest:,} is outside the model's vocabulary of {plan.vocab_size:,}: it is another model's"
        return Refusal(Reason.OUTSIDE_VOCABULARY, words)
    return None


class Extracted(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an extraction's `raw_responses.jsonl` or `failures.jsonl`."""

    id: str
    """The id of the source's record."""
    dataset: str
    verdict: Kind
    reason: str | None = None
    """Why it failed (see Reason)."""
    error: str | None = None
    """The same in words."""
    source: Source
    """`row`: the sample's number in this run, from 1; `name`: the source dataset."""
    messages: list[dict[str, Any]] = []
    """Always empty: the prompt stands in the source's record."""
    file: str | None = None
    """The file's path inside the output folder."""
    bytes: int | None = None
    sha256: str | None = None
    tokens: int | None = None
    layers: list[int]
    hidden_size: int
    dtype: Precision
    layout: Layout
    retokenized: bool = False
    usage: Usage = Usage()
    """How many ids the prompt and the answer have."""
    model: str
    settings: str
    """Fingerprint of the plan (see `manifest.json`)."""
    round: int = 0
    attempts: int = 1
    started_at: float | None = None
    finished_at: float | None = None
    latency_s: float | None = None
    """Seconds of the pass through the model that it was part of."""
    worker: str | None = None
    schema: int = SCHEMA_VERSION


decode_extracted = msgspec.json.Decoder(Extracted).decode
