"""Reads a page of metrics as Prometheus does."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Scrape = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""(Series' name, its labels) -> number."""


def parse(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every series of a page; no series may come twice, which Prometheus would refuse the whole page for."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def series(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return the key of promptmill's series of that name and those labels."""
    return f"promptmill_{name}", frozenset(labels.items())


def types(page: str) -> dict[str, str]:
    """Return the type of each metric, by the name on its TYPE line."""
    lines = [line.split() for line in page.splitlines() if line.startswith("# TYPE ")]
    return {name: kind for _hash, _type, name, kind in lines}
