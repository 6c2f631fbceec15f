"""The model servers: whether they are there, take what will be asked, and answer as records need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.preflight import CANARY, Canary, Report, Server
from producer.doctor.checks import Check, Level
from producer.doctor.gate import sentence_of
from producer.doctor.redis_checks import clock
from producer.doctor.thinking import check_reasoning

_GIVES_IDS = frozenset({"vllm", "sglang", "llama.cpp"})
_ALWAYS_SO = frozenset({"think_leak", "answer_in_reasoning", "unparsed_calls", "empty"})
"""Reasons for which nearly every answer is rejected once one is."""
_PASSES = frozenset({"overloaded", "loading"})
"""Failures of a server that asks to be left alone for a while, which a run does."""
_REMEDIES = {
    "unauthorized": "check MILL_API_KEY",
    "not_found": "check --model and MILL_MODEL_URLS",
    "timeout": "the server is slow or hangs: ask fewer at once (MILL_MAX_IN_FLIGHT), or give --timeout more seconds",
    "context_overflow": "leave such prompts out, lower --max-tokens, or start the server with a larger context",
    "truncated": "raise --max-tokens, or say --keep-truncated",
    "truncated_in_think": "raise --max-tokens: the thought alone takes more",
    "think_leak": "start the server with the --reasoning-parser of the model, or say --allow-think-leak",
    "answer_in_reasoning": "the server's --reasoning-parser takes the answer for thought: start it with another one",
    "unparsed_calls": "start the server with the --tool-call-parser of the model",
    "overloaded": "ask fewer at once (MILL_MAX_IN_FLIGHT), or wait until others are done with it",
    "loading": "wait until its model is loaded",
}
_ADVICE = {
    "down": "start it, or take it out of MILL_MODEL_URLS",
    "silent": "start it anew, or take it out of MILL_MODEL_URLS",
    "refuses": "check MILL_API_KEY",
    "unwell": "wait until it is ready, or check its URL in MILL_MODEL_URLS",
}
_LOOK_THERE = "docs/files.md says what the reason means"


def check_servers(report: Report, dataset: str) -> Iterator[Check]:
    """Look at every server by itself, and at whether they are alike."""
    for server in report.servers:
        yield from _check_server(server, report, dataset)
    yield from _alike(report.servers)


def _check_server(server: Server, report: Report, dataset: str) -> Iterator[Check]:
    url = server.url
    if server.state != "up":
        said = sentence_of(server)
        yield Check(Level.FAIL, "server.reachable", f"{said}; {_ADVICE[server.state]}.", url)
        return
    yield _identity(server)
    yield _model(server)
    for refusal in server.refusals.get(dataset, ()):
        yield Check(Level.FAIL, f"server.{refusal.code}", f"{refusal.finding}; {refusal.remedy}.", url)
    yield from _context(server, dataset)
    if server.clock_ahead_s is not None:
        yield clock("server.clock", "the server", server.clock_ahead_s, server=url)
    if report.trouble is not None:
        yield Check(Level.FAIL, "server.canary", report.trouble, url)
    if not server.canaries:
        return
    yield from _canaries(server)
    yield from _ids(server, report)
    yield from check_reasoning(server)
    yield from _tools(server)
    yield _template(server, report)


def _identity(server: Server) -> Check:
    if server.backend is None:
        sentence = "it answers; which server it is, is not known, so every parameter is sent to it."
        return Check(Level.NOTE, "server.backend", sentence, server.url)
    return Check(Level.OK, "server.backend", f"it is {server.shown}.", server.url)


def _model(server: Server) -> Check:
    if not server.models:
        return Check(Level.NOTE, "server.models", "it lists no models.", server.url)
    listed = ", ".join(server.models[:5]) + (", ..." if len(server.models) > 5 else "")
    if server.model not in server.models:
        sentence = f"it lists {listed} and not {server.model}; the canary shows whether it takes that name."
        return Check(Level.WARN, "server.models", sentence, server.url)
    return Check(Level.OK, "server.models", f"it has {server.model}.", server.url)


def _context(server: Server, dataset: str) -> Iterator[Check]:
    if any(one.code == "context" for one in server.refusals.get(dataset, ())):
        return
    if server.context is None:
        sentence = "it does not tell how many tokens prompt and answer may have together; not looked at."
        yield Check(Level.NOTE, "server.context", sentence, server.url)
        return
    longest = max((one.prompt_tokens or 0 for one in server.canaries), default=0)
    overflows = [one for one in server.canaries if one.reason == "context_overflow"]
    if overflows:
        sentence = (
            f"{len(overflows)} of {len(server.canaries)} canaries did not fit into its context of {server.context:,} "
            f"tokens ({overflows[0].error}); {_REMEDIES['context_overflow']}."
        )
        yield Check(Level.WARN, "server.context", sentence, server.url)
        return
    fits = f"; the longest prompt of the canaries has {longest:,}" if longest else ""
    yield Check(Level.OK, "server.context", f"its context is {server.context:,} tokens{fits}.", server.url)


def _canaries(server: Server) -> Iterator[Check]:
    """Judge the one that is always asked, then those of the dataset."""
    built_in = [one for one in server.canaries if one.id == CANARY]
    rest = [one for one in server.canaries if one.id != CANARY]
    for one in built_in:
        yield _canary(one, server.url)
    if rest:
        yield _samples(rest, server.url)


def _canary(one: Canary, url: str) -> Check:
    if one.verdict == "accepted":
        return Check(Level.OK, "server.canary", f"a canary was answered {pace(one)}.", url)
    bad = one.reason in _ALWAYS_SO if one.verdict == "rejected" else one.reason not in _PASSES
    said = f": {one.error}" if one.error else ""
    became = "was rejected" if one.verdict == "rejected" else "failed"
    sentence = f"a canary {became} as {one.reason}{said.rstrip('.')}; {remedy(one.reason)}."
    return Check(Level.FAIL if bad else Level.WARN, "server.canary", sentence, url)


def _samples(canaries: Sequence[Canary], url: str) -> Check:
    """Judge the samples of the dataset together; the commonest reason is told."""
    bad = [one for one in canaries if one.verdict != "accepted"]
    if not bad:
        return Check(Level.OK, "server.samples", f"all {len(canaries)} of the dataset's canaries were accepted.", url)
    reasons = [one.reason or "" for one in bad]
    common = max(sorted(set(reasons)), key=reasons.count)
    told = next((f", such as: {one.error}" for one in bad if one.reason == common and one.error), "").rstrip(".")
    sentence = (
        f"{len(bad)} of the dataset's {len(canaries)} canaries were not accepted, {reasons.count(common)} of them as "
        f"{common}{told}; {remedy(common)}."
    )
    hopeless = len(bad) == len(canaries) and common not in _PASSES
    return Check(Level.FAIL if hopeless else Level.WARN, "server.samples", sentence, url)


def pace(one: Canary) -> str:
    """Return how an answer came, for a sentence."""
    if one.latency_s is None or one.completion_tokens is None:
        return f"({one.finish_reason}; its tokens are not known)"
    speed = one.completion_tokens / one.latency_s if one.latency_s > 0 else 0.0
    return f"in {one.latency_s:.1f} s ({one.finish_reason}, {one.completion_tokens:,} tokens, {speed:,.0f} a second)"


def remedy(reason: str | None) -> str:
    """Return what to do about a reason."""
    return _REMEDIES.get(reason or "", _LOOK_THERE)


def _ids(server: Server, report: Report) -> Iterator[Check]:
    answered = [one for one in server.canaries if one.verdict != "failed"]
    if not answered:
        return
    name, url = "server.ids", server.url
    with_output = [one for one in answered if one.output_ids]
    odd = next((note for one in answered for note in one.notes), None)
    if odd is not None:
        yield Check(Level.WARN, name, f"{odd}; such records have no ids.", url)
    elif not with_output:
        could = (server.backend or "").partition(" ")[0] in _GIVES_IDS
        advice = "a newer version gives them" if could else "records hold texts alone"
        level = Level.WARN if could else Level.NOTE
        yield Check(level, name, f"it gives no token ids: output_ids and prompt_token_ids are null; {advice}.", url)
        return
    else:
        prompt = "and prompt_token_ids are" if any(one.prompt_ids for one in answered) else "are"
        sentence = f"output_ids {prompt} exact, as many as it counts ({len(with_output)} of {len(answered)} answers)."
        yield Check(Level.OK, name, sentence, url)
    checks = {one.ids_check for one in answered}
    if "mismatch" in checks:
        sentence = "decoded, output_ids do not give the answer's text; set MILL_TOKENIZER to the model's own tokenizer."
        yield Check(Level.FAIL, "server.decode", sentence, url)
    elif "ok" in checks:
        yield Check(Level.OK, "server.decode", "decoded, output_ids give the answer's text.", url)
    elif report.tokenizer is None and with_output:
        sentence = "whether output_ids decode to the text was not looked at; MILL_TOKENIZER has it checked."
        yield Check(Level.NOTE, "server.decode", sentence, url)


def _tools(server: Server) -> Iterator[Check]:
    offered = [one for one in server.canaries if one.tools]
    if not offered:
        return
    name, url = "server.tools", server.url
    start = "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME (SGLang: --tool-call-parser NAME)"
    refused = next(
        (one for one in offered if one.reason == "bad_request" and "tool" in (one.error or "").lower()), None
    )
    if refused is not None:
        yield Check(Level.FAIL, name, f"it refuses requests with tools ({refused.error}); {start}.", url)
    elif any(one.reason == "unparsed_calls" for one in offered):
        yield Check(Level.WARN, name, f"calls stand as text in the content, and are rejected; {start}.", url)
    elif any(one.tool_calls for one in offered):
        called = sum(bool(one.tool_calls) for one in offered)
        sentence = f"{called} of {len(offered)} canaries with tools were answered with calls that it parsed."
        yield Check(Level.OK, name, sentence, url)
    else:
        sentence = f"none of {len(offered)} canaries with tools was answered with a call; if that is odd, {start}."
        yield Check(Level.WARN, name, sentence, url)


def _template(server: Server, report: Report) -> Check:
    fingerprint, whose = (server.template, "the server's") if server.template else (report.template, "MILL_TOKENIZER's")
    if fingerprint is None:
        sentence = "its chat template is not known; MILL_TOKENIZER tells the one that the model came with."
        return Check(Level.NOTE, "server.template", sentence, server.url)
    return Check(Level.OK, "server.template", f"{whose} chat template has the fingerprint {fingerprint}.", server.url)


def _alike(servers: Sequence[Server]) -> Iterator[Check]:
    """Compare the servers that are up: what they do not tell is not compared."""
    up = [server for server in servers if server.state == "up"]
    if len(up) < 2:
        return
    told: list[tuple[str, list[str | int | list[str] | None]]] = [
        ("backend", [server.backend for server in up]),
        ("models", [sorted(server.models) for server in up]),
        ("context", [server.context for server in up]),
        ("chat template", [server.template for server in up]),
    ]
    differing = []
    for what, values in told:
        known = [(server.url, value) for server, value in zip(up, values, strict=True) if value]
        other = next((one for one in known if one[1] != known[0][1]), None)
        if other is not None:
            differing.append(f"{what} ({known[0][0]}: {_word(known[0][1])}; {other[0]}: {_word(other[1])})")
    if differing:
        sentence = f"the servers differ in {', '.join(differing)}; one dataset would hold answers of both."
        yield Check(Level.WARN, "servers.alike", sentence)
    else:
        yield Check(Level.OK, "servers.alike", f"the {len(up)} servers are alike, as far as they tell.")


def _word(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
