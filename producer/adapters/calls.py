"""Turns whose calls and answers are written into text -> turns in OpenAI's form, each answer beside its call."""

from __future__ import annotations

from typing import Any


class CallBook:
    """Numbers one conversation's calls and finds the call that an answer belongs to."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []

    def assistant(self, content: str, functions: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an assistant turn that says `content`, if it is not empty, and calls the functions."""
        calls = []
        for function in functions:
            self._count += 1
            call = {"id": f"call_{self._count}", "name": function["name"], "arguments": function.get("arguments")}
            calls.append(call)
        self._open = [(call["id"], call["name"]) for call in calls]
        turn: dict[str, Any] = {"role": "assistant"}
        if content or not calls:
            turn["content"] = content
        return {**turn, "tool_calls": calls} if calls else turn

    def answers(self, texts: list[tuple[str | None, str]]) -> list[dict[str, Any]] | None:
        """Return one tool turn for each (name, text): for the first open call of that name, else for the next one.

        None when there are more answers than open calls, unless it is a single one.
        """
        if len(texts) > 1 and len(texts) > len(self._open):
            return None
        turns = []
        for name, text in texts:
            turn = {"role": "tool", "content": text}
            call_id = self._take(name)
            turns.append({**turn, "tool_call_id": call_id} if call_id else turn)
        return turns

    def _take(self, name: str | None) -> str | None:
        place = next((at for at, (_, called) in enumerate(self._open) if called == name), 0)
        return self._open.pop(place)[0] if self._open else None
