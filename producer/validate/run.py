"""Validates training files: one pass over all rows, then the comparison with the datasets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.ledger import Ledger
from producer.export.base import LeftOut
from producer.export.claims import Claims
from producer.export.report import left_out_sentences
from producer.tokenizers import TemplateRefusedError
from producer.validate.compare import Comparison, Seen, forms_of
from producer.validate.findings import Findings
from producer.validate.problems import Problem
from producer.validate.readers import Item, read_items
from producer.validate.renderer import Renderer
from producer.validate.report import Report
from producer.validate.shapes import (
    ID_COLUMNS,
    BadRowError,
    Conversation,
    Shape,
    conversation_of,
    reasoning_of,
    shape_of,
)
from producer.validate.thoughts import check_thoughts, learned_text
from producer.validate.tokens import TokenRules, check_tokens
from producer.validate.types import Types

_BATCH = 500
_TABLES = (".parquet", ".arrow")


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the files must keep to."""

    tokens: TokenRules = dataclasses.field(default_factory=TokenRules)
    end_texts: frozenset[str] = frozenset()
    """The texts of the tokens that end an answer; empty where they are not known."""
    threshold: float = 0.01
    """The share of rows that may have a tolerable problem."""


def validate(
    paths: Sequence[Path],
    rules: Rules,
    *,
    renderer: Renderer | None = None,
    ledgers: Sequence[Ledger] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check every row of the files, which together are one export.

    `on_progress` is told how many rows were read, and how many bytes of the running file (0 where unknown).
    Raises SourceError for files that are no training files at all.
    """
    with Claims() as claims:
        check = _Check(rules, renderer, ledgers, claims)
        for path in paths:
            batch = list[Seen]()
            for item in read_items(path):
                check.row(path, item, batch)
                if len(batch) >= _BATCH:
                    check.ids(path, batch)
                    batch = []
                if on_progress is not None:
                    on_progress(check.rows, item.read_bytes)
            check.ids(path, batch)
        left_out = check.missing()
    return Report(
        paths=list(paths),
        shape=str(check.shape or "no shape"),
        rows=check.rows,
        supervised_tokens=check.supervised if check.shape is Shape.TOKENS else None,
        findings=check.findings,
        threshold=rules.threshold,
        checked=check.checked(),
        unchecked=check.unchecked(),
        left_out=left_out,
    )


class _Check:
    """A running validation."""

    def __init__(self, rules: Rules, renderer: Renderer | None, ledgers: Sequence[Ledger], claims: Claims) -> None:
        self._rules = rules
        self._renderer = renderer if renderer is not None and renderer.renders else None
        self._comparison = Comparison(ledgers) if ledgers else None
        self._claims = claims
        self._types = Types()
        self.findings = Findings()
        self.shape: Shape | None = None
        self._first: dict[str, Any] | None = None
        self.rows = 0
        self.supervised = 0

    def row(self, path: Path, item: Item, batch: list[Seen]) -> None:
        """Check one row by itself, and add it to those whose id is looked up."""
        self.rows += 1
        if item.row is None:
            self.findings.add(item.problem or Problem.NOT_A_ROW, path, item.number, detail=item.detail)
            return
        row = item.row
        if self.shape is None:
            self.shape, self._first = shape_of(row), row
        id_ = next((row[name] for name in ID_COLUMNS if name in row), None)
        known = id_ if isinstance(id_, str) else ""
        if not known:
            self.findings.add(Problem.NO_ID, path, item.number, detail=repr(id_) if id_ is not None else "")
        conversation = None
        for problem, detail in self._problems(path, row):
            self.findings.add(problem, path, item.number, known, detail)
        if self.shape is not Shape.TOKENS and self._has_shape(row):
            conversation = self._conversation(path, item.number, known, row)
        batch.append(Seen(item.number, known, row, conversation))

    def _has_shape(self, row: Mapping[str, Any]) -> bool:
        return self._types.other_columns(row) is None

    def _problems(self, path: Path, row: Mapping[str, Any]) -> Iterator[tuple[Problem, str]]:
        difference = self._types.other_columns(row)
        if difference is not None:
            yield Problem.COLUMNS, f"it {difference}"
            return
        # In tables the types are those of the schema, and absent keys are no changes.
        if not path.name.lower().endswith(_TABLES) and (change := self._types.change(row)) is not None:
            yield Problem.TYPES, change
        if self.shape is Shape.TOKENS:
            found = list(check_tokens(row, self._rules.tokens))
            yield from found
            if not {problem for problem, _ in found} & {Problem.LENGTHS, Problem.BAD_MASK}:
                self.supervised += sum(row["loss_mask"])

    def _conversation(self, path: Path, number: int, id_: str, row: Mapping[str, Any]) -> Conversation | None:
        try:
            conversation = conversation_of(row, self.shape or Shape.MESSAGES)
        except BadRowError as error:
            words = str(error)
            problem = Problem.TOOLS if words.startswith("tools") else Problem.MESSAGES
            self.findings.add(problem, path, number, id_, words)
            return None
        answer = conversation.messages[-1]
        if answer["role"] != "assistant" or not (answer["content"] or answer.get("tool_calls") or reasoning_of(answer)):
            self.findings.add(Problem.NO_ANSWER, path, number, id_, f"the last message is {answer['role']}'s")
        elif self._renderer is not None:
            self._render(path, number, id_, conversation, self._renderer)
        return conversation

    def _render(self, path: Path, number: int, id_: str, conversation: Conversation, renderer: Renderer) -> None:
        try:
            for problem, detail in dict(check_thoughts(conversation, renderer)).items():
                self.findings.add(problem, path, number, id_, detail)
            self._check_rendered(path, number, id_, conversation, renderer)
        except TemplateRefusedError as error:
            self.findings.add(Problem.NOT_RENDERED, path, number, id_, str(error))

    def _check_rendered(
        self, path: Path, number: int, id_: str, conversation: Conversation, renderer: Renderer
    ) -> None:
        ends = self._rules.end_texts
        if ends and not any(text in learned_text(conversation, renderer) for text in ends):
            self.findings.add(Problem.NO_END_TOKEN, path, number, id_)
        if self._rules.tokens.max_length is not None:
            length = renderer.count(renderer.text(conversation.messages, conversation.tools, asks=False))
            if length is not None and length > self._rules.tokens.max_length:
                self.findings.add(Problem.TOO_LONG, path, number, id_, f"{length} tokens")

    def ids(self, path: Path, batch: Sequence[Seen]) -> None:
        """Look ids up: repeated ones, and where there is a dataset, unknown ones and other contents."""
        named = [seen for seen in batch if seen.id]
        for seen, fresh in zip(named, self._claims.claim([seen.id for seen in named]), strict=True):
            if not fresh:
                self.findings.add(Problem.REPEATED_ID, path, seen.number, seen.id)
        if self._comparison is not None:
            for seen, problem, detail in self._comparison.differences(named):
                self.findings.add(problem, path, seen.number, seen.id, detail)

    def missing(self) -> list[str]:
        """Count the accepted records that are not in the files; return why others rightly are not."""
        if self._comparison is None:
            return []
        reasons = Counter[LeftOut]()
        forms = forms_of(self._first or {}, self._rules.tokens.max_length)
        for path, id_, reason in self._comparison.missing(self._claims, forms):
            if reason is not None:
                reasons[reason] += 1
            else:
                self.findings.add(Problem.MISSING_ID, path, 0, id_)
        return left_out_sentences(reasons)

    def checked(self) -> list[str]:
        """Return what was looked at, in words."""
        words = ["lines", "columns", "types", "ids"]
        if self.shape is Shape.TOKENS:
            words += ["lengths", "masks"]
            words += ["the vocabulary"] if self._rules.tokens.vocab_size is not None else []
            words += ["end tokens"] if self._rules.tokens.end_ids else []
        else:
            words += ["messages", "tools"]
            words += ["lost thoughts"] if self._renderer is not None else []
            words += ["end tokens"] if self._renderer is not None and self._rules.end_texts else []
        return words + (["every id against the dataset"] if self._comparison is not None else [])

    def unchecked(self) -> list[str]:
        """Return what could not be looked at, in words."""
        words = []
        if self.shape is Shape.TOKENS:
            if self._rules.tokens.vocab_size is None:
                words.append("whether ids are inside the vocabulary (give --tokenizer or --vocab-size)")
            if not self._rules.tokens.end_ids:
                words.append("whether answers end (give --tokenizer or --eos-id)")
        elif self._renderer is None:
            words.append("lost thoughts (give --tokenizer or --chat-template)")
        elif not self._renderer.marks_answers:
            words.append(
                "losses on assistant tokens only, since the template has no {% generation %} marks: trainers that need "
                "them would learn nothing"
            )
        return words if self._comparison is not None else [*words, "missing ids (give --dataset)"]
