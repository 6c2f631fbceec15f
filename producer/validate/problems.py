"""What can be wrong with a training file, and whether a share of it is tolerated."""

from __future__ import annotations

import enum


class Problem(enum.StrEnum):
    """One kind of damage."""

    NOT_JSON = "not_json"
    TORN_END = "torn_end"
    NOT_A_ROW = "not_a_row"
    COLUMNS = "columns"
    TYPES = "types"
    NO_ID = "no_id"
    REPEATED_ID = "repeated_id"
    UNKNOWN_ID = "unknown_id"
    MISSING_ID = "missing_id"
    LENGTHS = "lengths"
    BAD_TOKEN = "bad_token"  # noqa: S105 no secret
    BAD_MASK = "bad_mask"
    UNSUPERVISED = "unsupervised"
    TOO_LONG = "too_long"
    DIFFERS = "differs"
    NO_ANSWER = "no_answer"
    MESSAGES = "messages"
    TOOLS = "tools"
    NO_END_TOKEN = "no_end_token"  # noqa: S105 no secret
    NOT_RENDERED = "not_rendered"
    LOST_REASONING = "lost_reasoning"
    EMPTY_THOUGHT = "empty_thought"
    DOUBLED_THOUGHT = "doubled_thought"
    LOST_CONTENT = "lost_content"
    LOST_TOOL_CALL = "lost_tool_call"
    ESCAPED_ARGUMENTS = "escaped_arguments"

    @property
    def words(self) -> str:
        """Return what it means, in words."""
        return _WORDS[self]

    @property
    def is_tolerable(self) -> bool:
        """Tell whether a share of rows up to the threshold may have it."""
        return self in _TOLERABLE


_WORDS = {
    Problem.NOT_JSON: "the line is not strict JSON in UTF-8",
    Problem.TORN_END: "the file does not end in a whole line",
    Problem.NOT_A_ROW: "the line is no object, or an empty line",
    Problem.COLUMNS: "the row has other columns than the first one",
    Problem.TYPES: "a value has another type than in the rows before",
    Problem.NO_ID: "the id is missing, empty or no text",
    Problem.REPEATED_ID: "an earlier row has the same id",
    Problem.UNKNOWN_ID: "the dataset has no answer with this id",
    Problem.MISSING_ID: "an accepted record of the dataset is not in the file, and nothing about it says why",
    Problem.LENGTHS: "input_ids and loss_mask are not equally long, or empty",
    Problem.BAD_TOKEN: "a token id is no integer, negative or outside the vocabulary",
    Problem.BAD_MASK: "a loss mask holds something else than 0 and 1",
    Problem.UNSUPERVISED: "too few tokens have loss mask 1",
    Problem.TOO_LONG: "the row has more tokens than --max-length",
    Problem.DIFFERS: "the tokens are not those of the record",
    Problem.NO_ANSWER: "the last message is no answer, or an empty one",
    Problem.MESSAGES: "a message has no role or no text",
    Problem.TOOLS: "the tools are no JSON list",
    Problem.NO_END_TOKEN: "the answer does not end with an end token, so that it teaches no stopping",
    Problem.NOT_RENDERED: "the chat template refuses the conversation",
    Problem.LOST_REASONING: "the answer's reasoning is not in the text that is trained on",
    Problem.EMPTY_THOUGHT: "an empty thought is trained on in place of the reasoning",
    Problem.DOUBLED_THOUGHT: "an empty thought is trained on before the real one",
    Problem.LOST_CONTENT: "the answer's content is not in the text that is trained on",
    Problem.LOST_TOOL_CALL: "a tool call is not in the text that is trained on",
    Problem.ESCAPED_ARGUMENTS: "a tool call's arguments are trained on as a quoted text instead of an object",
}
_TOLERABLE = frozenset(list(Problem)[list(Problem).index(Problem.NO_END_TOKEN) :])
