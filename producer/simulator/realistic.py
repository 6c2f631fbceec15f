"""Answers of realistic lengths at realistic speeds, to see how a run would go before a GPU is there.

The lengths are lognormal and cut at the request's max_tokens, where an answer ends with `length`. An answer begins
`first_token_s` after its request, and then gets its part of the server's speed (see producer.simulator.sharing). It is
sent when it is whole, also where a stream was asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from producer.simulator import words
from producer.simulator.engine import Engine
from producer.simulator.messages import HttpReply, HttpRequest
from producer.simulator.rules import Rule, RuleBook, ServerOptions
from producer.simulator.shapes import error_body, render_prompt, to_json
from producer.simulator.sharing import Answer, SharedSpeed
from producer.simulator.tokens import PATHS as TOKEN_PATHS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """What the simulated model and server are like."""

    mean_tokens: float
    """Tokens of an answer on average, before max_tokens cuts it."""
    sigma: float = 0.9
    """Sigma of the lognormal lengths; 0 makes all alike."""
    tokens_per_second: float = 40.0
    """The speed of one answer, however few there are."""
    server_tokens_per_second: float = 4000.0
    """The speed of all answers together, however many there are."""
    first_token_s: float = 0.5
    """Seconds from a request to its answer's first token."""
    failure_share: float = 0.0
    """Share of the requests that are answered 500 in place of the first token."""
    speedup: float = 1.0
    """The simulated time runs so many times faster."""
    seed: int = 0
    """Seed of lengths, texts and failures."""

    def length(self, rng: random.Random) -> int:
        """Draw the tokens of an answer, its end included; at least 2."""
        mu = math.log(self.mean_tokens) - self.sigma * self.sigma / 2
        return max(2, round(rng.lognormvariate(mu, self.sigma)))


@dataclasses.dataclass
class _Generation:
    """One answer on its way: first nothing, then token by token."""

    timer: asyncio.TimerHandle | None = None
    answer: Answer | None = None

    def cancel(self) -> None:
        """Give it up."""
        if self.timer is not None:
            self.timer.cancel()
        if self.answer is not None:
            self.answer.cancel()


class RealisticEngine(Engine):
    """An engine whose chat completions have the traits; a rule that differs from the usual one goes first."""

    def __init__(self, traits: Traits, rules: RuleBook, options: ServerOptions) -> None:
        super().__init__(rules, options, keep_requests=False)
        self._traits = traits
        self._rng = random.Random(traits.seed)  # noqa: S311  no secret
        each, total = (traits.speedup * speed for speed in (traits.tokens_per_second, traits.server_tokens_per_second))
        self._speed = SharedSpeed(each, total, clock=time.monotonic)

    def stats(self) -> dict[str, Any]:
        """Return the tallies, and the tokens that were generated up to `now_s`, those of unfinished answers too."""
        return {**super().stats(), "generated_tokens": self._speed.generated}

    def _apply(self, rule: Rule, body: dict[str, Any], request: HttpRequest) -> HttpReply:
        if rule != Rule() or request.path in TOKEN_PATHS:
            return super()._apply(rule, body, request)
        if self._rng.random() < self._traits.failure_share:
            error = error_body(500, None, dialect=self.options.dialect, model=self.options.model)
            return HttpReply(status=500, body=error, delay_s=self._first_token_s)
        wanted = self._traits.length(self._rng)
        limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or self.options.max_model_len)
        text, ids = words.write(min(wanted - 1, limit), self._rng)
        if wanted <= limit:
            ids.append(words.EOS_ID)
        document = self._document(body, request, text, ids, "stop" if wanted <= limit else "length")
        return HttpReply(body=to_json(document), begin=self._generate(len(ids)))

    @property
    def _first_token_s(self) -> float:
        return self._traits.first_token_s / self._traits.speedup

    def _generate(self, tokens: int) -> Callable[[Callable[[], None]], _Generation]:
        """Return what begins the answer's generation as soon as its request is read."""

        def begin(done: Callable[[], None]) -> _Generation:
            generation = _Generation()

            def first_token() -> None:
                generation.answer = self._speed.begin(tokens, done)

            generation.timer = asyncio.get_running_loop().call_later(self._first_token_s, first_token)
            return generation

        return begin

    def _document(
        self, body: Mapping[str, Any], request: HttpRequest, text: str, ids: list[int], finish: str
    ) -> dict[str, Any]:
        prompt = words.read(render_prompt(body["messages"]))
        self._tokens["prompt"] += len(prompt)
        self._tokens["generation"] += len(ids)
        with_ids = bool(body.get("return_token_ids")) and self.options.token_ids
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "reasoning": None},
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": ids if with_ids else None,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(ids),
            "completion_tokens": len(ids),
            "prompt_tokens_details": None,
        }
        return {
            "id": f"chatcmpl-{request.headers.get('x-request-id') or uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.options.model,
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": prompt if with_ids else None,
        }
