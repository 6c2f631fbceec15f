"""What is certain about an answer's token ids: their number, how they end, and whether they decode to its text."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from app.records import Completion
from workers.clients.texts import CLOSING, OPENING

logger = logging.getLogger(__name__)

SERVER = "server"
"""Where ids come from that the server gave (or, for a prompt rendered here, was given)."""
END_TOKEN, STOP, NOTHING = "eos", "stop", "none"
"""What output ids end with: the model's end token, a stop string's or stop token's ids, or nothing of that kind."""
OK, MISMATCH = "ok", "mismatch"

CHECK_EVERY = 100
"""The first and every this many answers are decoded and compared with their text."""

_CUT = "\ufffd"
_TAGS = re.compile(rf"{OPENING}|{CLOSING}|\s|{_CUT}")

Decode = Callable[[Sequence[int]], str]


class Checks:
    """Chooses the answers of one endpoint that are decoded, and tells once of each kind of trouble with ids."""

    def __init__(self, shown: str) -> None:
        """Take the endpoint's address without credentials."""
        self._shown = shown
        self._numbers = itertools.count()
        self._told = set[str]()

    def chosen(self) -> bool:
        """Tell whether this answer is to be decoded: the first, and then every hundredth."""
        return next(self._numbers) % CHECK_EVERY == 0

    def tell(self, completion: Completion) -> None:
        """Warn of an answer whose ids do not fit, the first time."""
        if completion.notes:
            self._warn("number", completion.notes[0])
        if completion.ids_check == MISMATCH:
            words = "decoded, output_ids do not give the answer's text; is MILL_TOKENIZER the model's own?"
            self._warn("text", words)

    def _warn(self, kind: str, words: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s: %s (told once; the records say it of each answer)", self._shown, words)


def with_sure_ids(
    completion: Completion, *, keeps_end: bool | None, stop_ids: Collection[int] = (), end_ids: Collection[int] = ()
) -> Completion:
    """Return the completion with ids only where their number is the one that the server counted, and how they end.

    `keeps_end`: whether the server leaves the end token in the ids; `stop_ids`: token ids that the request stops at;
    `end_ids`: the model's end tokens, where the tokenizer is known.
    """
    if completion.prompt_token_ids is None and completion.output_ids is None:
        return completion
    notes = list(completion.notes)
    usage = completion.usage
    prompt = _counted(completion.prompt_token_ids, usage.prompt_tokens, "prompt_token_ids", notes)
    output = _counted(completion.output_ids, usage.completion_tokens, "output_ids", notes)
    end = None if output is None else _end_of(output, completion, keeps_end, stop_ids, end_ids)
    return msgspec.structs.replace(
        completion,
        prompt_token_ids=prompt,
        output_ids=output,
        ids=None if prompt is None and output is None else SERVER,
        ids_end=end,
        notes=notes,
    )


def _counted(ids: list[int] | None, count: int | None, name: str, notes: list[str]) -> list[int] | None:
    if ids is None or count is None or len(ids) == count:
        return ids
    notes.append(f"{name} left out: the server gave {len(ids)} ids and counted {count} tokens")
    return None


def _end_of(
    ids: list[int], completion: Completion, keeps_end: bool | None, stop_ids: Collection[int], end_ids: Collection[int]
) -> str | None:
    last = ids[-1]
    if last in end_ids:
        return END_TOKEN
    if completion.finish_reason == "length":
        return NOTHING
    stop = completion.stop_reason
    if isinstance(stop, str) or last in stop_ids:
        return STOP
    if isinstance(stop, int):
        return END_TOKEN if last == stop else NOTHING
    if end_ids:
        # The end tokens are known, and this is none: the server has left it out.
        return NOTHING
    return END_TOKEN if keeps_end else None


def with_check(completion: Completion, decode: Decode, *, exact_text: str | None = None) -> Completion:
    """Return the completion with the outcome of decoding its output ids.

    `exact_text`: the model's text as the server decoded it. Without one, the texts are compared without the think tags
    and white space that a server's parser takes out; answers with tool calls then cannot be compared.
    """
    if completion.output_ids is None or (exact_text is None and completion.tool_calls):
        return completion
    decoded = decode(completion.output_ids)
    if exact_text is None:
        whole = _squeezed(decoded)
        same = all(_squeezed(text) in whole for text in (completion.reasoning, completion.content) if text)
    else:
        same = _says(decoded, exact_text, completion, decode(completion.output_ids[-1:]))
    return msgspec.structs.replace(completion, ids_check=OK if same else MISMATCH)


def _says(decoded: str, text: str, completion: Completion, last: str) -> bool:
    """Tell whether the decoded ids say the text, and after it only what ended the answer, which servers trim off it.

    `last` is what the last id says. A character that a limit cut is U+FFFD, or left out of the text.
    """
    if completion.finish_reason == "length":
        return decoded.startswith(whole := text.rstrip(_CUT)) and not decoded.removeprefix(whole).strip(_CUT)
    rest = decoded.removeprefix(text)
    stop = completion.stop_reason
    if isinstance(stop, str):
        # The last token may say more than the stop string; some requests ask for it in the text.
        ends = rest.startswith(stop) or (text.endswith(stop) and last.endswith(rest))
    else:
        ends = rest == "" or (rest == last and completion.ids_end in {END_TOKEN, STOP})
    return decoded.startswith(text) and ends


def _squeezed(text: str) -> str:
    return _TAGS.sub("", text)


def stop_ids_of(sampling: dict[str, Any]) -> Collection[int]:
    """Return the token ids at which a request stops."""
    ids = sampling.get("stop_token_ids")
    return ids if isinstance(ids, list) else ()
