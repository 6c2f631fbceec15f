"""A server that says when to come back is left alone for that long, and nothing is given up for it."""

from __future__ import annotations

from itertools import pairwise

from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id
from tests.support.mill import Mill

_WAITS = {"Retry-After": "2"}
RULES = [
    {"match": "seconds", "times": 2, "status": 429, "headers": _WAITS},
    {"match": "date", "times": 1, "status": 429, "headers": {"Retry-After": "@date+3"}},
    {"match": "zero", "times": 2, "status": 429, "headers": {"Retry-After": "0"}},
    {"match": "negative", "times": 1, "status": 429, "headers": {"Retry-After": "-5"}},
    {"match": "junk", "times": 1, "status": 429, "headers": {"Retry-After": "soon"}},
    {"match": "long", "times": 1, "status": 429, "headers": {"Retry-After": "900"}},
    {"match": "none", "times": 6, "status": 429},
    {"match": "busy", "times": 2, "status": 503, "headers": _WAITS},
]


def test_every_form_of_retry_after(mill: Mill, model_server: ModelServerFactory) -> None:
    """Seconds and dates are honoured up to the cap, nonsense falls back to the own backoff, attempts stay whole."""
    server = model_server(RULES)
    mill.env.update(MILL_RETRY_AFTER_MAX_S="5", MILL_BACKOFF_S="0.3", MILL_BACKOFF_MAX_S="0.6", MILL_MAX_ATTEMPTS="2")
    names = [str(rule["match"]) for rule in RULES]
    mill.enqueue([{"id": name, "prompt": name} for name in [*names, "bystander"]])
    mill.worker(concurrency=10)
    balanced(mill, accepted=9, failed=0)
    times: dict[str, list[float]] = {}
    for request in server.requests:
        times.setdefault(request.key, []).append(request.at)
    gaps = {name: min(later - sooner for sooner, later in pairwise(times[name])) for name in names}
    assert gaps["seconds"] >= 2
    assert gaps["busy"] >= 2
    assert gaps["date"] >= 2, "a date has whole seconds"
    assert gaps["long"] >= 5
    for name in ("zero", "negative", "junk", "none"):
        assert gaps[name] >= 0.15, f"{name} was asked again at once"
    assert times["bystander"][0] < times["long"][-1], "one that waits holds nobody up"
    assert by_source_id(mill)["none"]["attempts"] == 7
