"""Everything that the doctor looks at, in one report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from app import broker, settings
from app.errors import SettingError
from app.preflight import CANARY, Job, Report
from app.records import Sample
from app.settings import GenerationSettings, ServerSettings, StoreSettings
from producer.doctor import machine, recorded
from producer.doctor.checks import Check, Level
from producer.doctor.choice import Chosen
from producer.doctor.estimate import Estimate, estimate
from producer.doctor.looking import Look, LookFailedError
from producer.doctor.recorded import Field
from producer.doctor.redis_checks import check_redis
from producer.doctor.servers import check_servers
from producer.texts import counted

_LOOK_S = 15.0
"""Seconds for the looks that generate nothing; a server that is slower than that to say its name is not well."""
_BESIDE_S = 60.0
"""Seconds beside looks and canaries: the start of a process, a tokenizer that is loaded."""
_AT_ONCE = 32
"""Requests in flight at each server at most."""
_ROUNDS = 3
"""Canaries one after the other, at least: the built-in one, and the same with thinking on and off."""
_NAME = "doctor"
_LAST_TURN = "of conversations whose turns are all made anew only the last turn is asked; there is no estimate."


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the doctor found."""

    ok: bool
    """Whether nothing failed."""
    checks: list[Check]
    recorded: list[Field]
    """What records will hold; empty where no canary was answered."""
    canaries: dict[str, int]
    """How many canaries were accepted, rejected or failed, with the reason."""
    source: str | None
    """How the canaries were drawn; None without a source."""
    estimate: Estimate | None


def examine(
    generation: GenerationSettings,
    samples: Sequence[Sample] | None,
    *,
    chosen: Chosen | None,
    dataset: str | None,
    timeout_s: float,
) -> Findings:
    """Look at everything; `samples` are the canaries besides the built-in one, None asks nothing.

    `chosen` says where they come from, `timeout_s` how long an answer may take.
    """
    store = settings.load(StoreSettings)
    seen = _look(generation, samples, timeout_s=timeout_s)
    report = seen if isinstance(seen, Report) else None
    whole = generation.turns == "last"
    reckoned = _estimate(report, chosen) if whole else None
    checks = [*machine.check_settings_names(), *machine.check_folder(store, dataset)]
    needed = (reckoned.record_bytes.low, reckoned.record_bytes.high) if reckoned and reckoned.whole else None
    checks += machine.check_space(store, needed)
    if report is not None and report.files is not None:
        checks += machine.check_files(report.files)
    checks += _redis(store)
    if isinstance(seen, str):
        checks.append(Check(Level.FAIL, "server.reachable", seen))
    else:
        checks += check_servers(seen, _NAME)
    if not whole:
        checks.append(Check(Level.NOTE, "servers.turns", _LAST_TURN))
    return Findings(
        ok=all(check.level is not Level.FAIL for check in checks),
        checks=checks,
        recorded=recorded.fields(report) if report else [],
        canaries=recorded.verdicts(report) if report else {},
        source=_described(chosen, samples),
        estimate=reckoned,
    )


def _redis(store: StoreSettings) -> Iterator[Check]:
    try:
        url = broker.resolve(settings.load(settings.BrokerSettings), store)
    except SettingError as error:
        yield Check(Level.FAIL, "redis.reachable", str(error))
        return
    yield from check_redis(url)


def _look(generation: GenerationSettings, samples: Sequence[Sample] | None, *, timeout_s: float) -> Report | str:
    """Return what was seen of the model servers, or why nothing was."""
    servers = settings.load(ServerSettings)
    if not servers.model_urls:
        return "MILL_MODEL_URLS is not set; give the model server's URL, such as http://127.0.0.1:8000/v1."
    at_once = min(_AT_ONCE, servers.max_in_flight)
    own_s = servers.request_timeout_s
    longest_s = timeout_s if isinstance(own_s, str) else min(timeout_s, own_s)
    job = Job(
        generations={_NAME: generation.content()},
        timeout_s=_LOOK_S,
        canaries=None if samples is None else list(samples),
        canary_timeout_s=longest_s,
        at_once=at_once,
    )
    rounds = 0 if samples is None else _ROUNDS + len(samples) // at_once
    try:
        with Look(job) as look:
            return look.report(timeout_s=_LOOK_S + _BESIDE_S + rounds * longest_s)
    except LookFailedError as error:
        return f"{error}."


def _estimate(report: Report | None, chosen: Chosen | None) -> Estimate | None:
    if report is None or chosen is None:
        return None
    canaries = [one for server in report.servers for one in server.canaries if one.id != CANARY]
    return estimate(report, canaries, chosen.total)


def _described(chosen: Chosen | None, samples: Sequence[Sample] | None) -> str | None:
    """Say how the canaries were drawn, and how many rows there are."""
    if chosen is None:
        return None
    if chosen.rows is None:
        rows = "how many rows there are is not known (--rows says it)"
    else:
        share = chosen.found / chosen.read if chosen.read else 0.0
        rows = f"{counted(chosen.rows, 'row')}, {share:.0%} of them samples as far as they were read"
    drawn = f"{counted(len(chosen.samples), 'sample')}, drawn evenly from the first {counted(chosen.read, 'row')}"
    return f"{chosen.description}: {drawn if samples is not None else 'nothing was asked'}; {rows}."
