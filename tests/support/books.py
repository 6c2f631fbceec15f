"""Checks that status, verify and the files of a dataset tell the same numbers, in files that any reader can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.records import Kind
from tests.support.jsonl_check import assert_strict, check_jsonl, parse_strict
from tests.support.mill import FINAL_KINDS, Mill
from tests.support.processes import wait_until

SHARED = (
    *("read", "refused", "samples", "accepted", "rejected", "failed", "left", "queued", "in_flight", "missing"),
    "orphaned",
)
"""The counts that every view tells, in the same words."""


def balanced(mill: Mill, dataset: str = "case", **expected: int) -> dict[str, int]:
    """Wait for the expected records, assert that status, verify and the files agree on all counts, and return them.

    Nothing but the expected may be under way.
    """
    return all_balanced(mill, {dataset: expected})[dataset]


def all_balanced(mill: Mill, expected: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Assert the same for several datasets, each with its expected counts; return the counts of all."""
    for dataset, wanted in expected.items():
        for kind in FINAL_KINDS:
            _wait_for_lines(mill, dataset, kind, wanted.get(kind, 0))
    datasets = mill.status()["datasets"]
    audits = mill.run("verify", "--json", expect=None).json()
    found = {}
    for dataset, wanted in expected.items():
        counts = found[dataset] = datasets[dataset]["counts"]
        assert counts["read"] == counts["refused"] + counts["samples"], counts
        settled = counts["accepted"] + counts["rejected"] + counts["failed"]
        assert counts["samples"] == settled + counts["left"], counts
        assert counts["left"] == counts["queued"] + counts["in_flight"] + counts["missing"], counts
        assert {name: counts[name] for name in wanted} == dict(wanted), counts
        assert {name: audits[dataset]["counts"][name] for name in SHARED} == {name: counts[name] for name in SHARED}
        for kind in Kind:
            path = mill.folder(dataset).lines(kind)
            if path.exists():
                assert_strict(path, allow_duplicates=kind in {Kind.FAILED, Kind.REJECTED})
        assert_strict(mill.out(dataset), count=counts["accepted"])
    return found


def _wait_for_lines(mill: Mill, dataset: str, kind: Kind, count: int) -> None:
    wait_until(
        lambda: mill.recorded(dataset, [kind]) >= count,
        60,
        f"{count} {kind} samples of {dataset}",
        detail=mill.tails,
    )


def records(mill: Mill, dataset: str = "case", kind: Kind = Kind.ACCEPTED) -> list[dict[str, Any]]:
    """Return the whole lines of one of the dataset's files, read strictly; none where there is no file."""
    path = mill.folder(dataset).lines(kind)
    if not path.exists():
        return []
    check = check_jsonl(path)
    assert not check.problems, check.problems
    return list(check.records)


def by_source_id(mill: Mill, dataset: str = "case", kind: Kind = Kind.ACCEPTED) -> dict[str, dict[str, Any]]:
    """Return the records by the id that their source gave them."""
    return {str(record["source"].get("id")): record for record in records(mill, dataset, kind)}


def assert_progress_files(mill: Mill, dataset: str = "case") -> None:
    """Wait for both progress files, and assert that they are strict JSON."""
    folder = mill.folder(dataset)
    wait_until(lambda: folder.progress.exists() and folder.progress_log.exists(), 20, "progress files")
    assert dataset in parse_strict(folder.progress.read_bytes())["datasets"]
    lines = folder.progress_log.read_bytes().split(b"\n")
    assert lines.pop() == b""
    for line in lines:
        parse_strict(line)
