"""What the doctor makes of the canaries: which they are, what the run will take, and eighty columns of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from app.preflight import Canary, Report
from producer.commands import reading
from producer.doctor import recorded
from producer.doctor.checks import Check, Level
from producer.doctor.choice import Chosen, choose
from producer.doctor.estimate import estimate, spread
from producer.doctor.examine import Findings
from producer.doctor.render import lines
from producer.interval import Range
from producer.reading import Opened, Reading
from tests.support.canaries import THOUGHT, URL, canary, server

# Estimates


def test_a_spread_needs_enough_known_values() -> None:
    """Of fewer than eight known values nothing is said; the 95th percentile is one of the values."""
    assert spread([5] * 7 + [None] * 99) is None
    seen = spread([None, *range(1, 21)])
    assert seen is not None
    assert seen.p95 == 19


def report(*canaries: Canary, in_flight: float = 32.0) -> Report:
    """Return what one server was seen to do."""
    return Report(servers=[server(*canaries, in_flight=in_flight)], max_in_flight=128)


def test_time_and_disk_are_ranges_of_what_was_seen() -> None:
    """Equal canaries give the two ends alone: as fast with the bound full, or no more at once than was seen."""
    canaries = [canary(f"c{n}") for n in range(32)]
    made = estimate(report(*canaries, in_flight=20.0), canaries, 1280)
    assert made is not None
    assert (made.samples, made.whole, made.in_flight, made.seen_in_flight) == (1280, True, 128, 20.0)
    assert made.total_tokens == Range(140_800.0, 140_800.0)
    assert made.seconds == Range(2.0 * 1280 / 128, 2.0 * 1280 / 20)
    assert made.record_bytes == Range(1_280_000.0, 1_280_000.0)


def test_nothing_is_invented() -> None:
    """Without a row count it is for a thousand; unknown tokens stay unknown; too few canaries give no estimate."""
    canaries = [canary(f"c{n}", prompt_tokens=None, completion_tokens=None) for n in range(8)]
    made = estimate(report(*canaries), canaries, None)
    assert made is not None
    assert (made.samples, made.whole, made.total_tokens, made.prompt_tokens) == (1000, False, None, None)
    assert estimate(report(*canaries[:7]), canaries[:7], 100) is None
    failed = [canary(f"f{n}", verdict="failed") for n in range(32)]
    assert estimate(report(*failed), failed, 100) is None


# Canaries


def opener(one: Reading, first: int) -> Opened:
    """Open as the command does."""
    return reading.open_rows(one, first_rows=first)


def drawn(one: Reading, number: int, *, rows: int | None) -> Chosen:
    """Draw as the command does."""
    return choose(one, number, rows=rows, max_row_bytes=2**20, open_rows=opener)


def write(path: Path, prompts: Sequence[str]) -> Path:
    """Write rows."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def test_canaries_are_drawn_from_all_first_rows_and_always_the_same(tmp_path: Path) -> None:
    """They are spread over the rows that are read, do not repeat, and are the same in the next look."""
    source = write(tmp_path / "rows.jsonl", [f"prompt {n}" for n in range(6000)])
    chosen = drawn(Reading(source=str(source)), 32, rows=None)
    assert (chosen.read, chosen.found, chosen.rows, chosen.total) == (5000, 5000, 6000, 6000)
    rows = [sample.source.row or 0 for sample in chosen.samples]
    assert len(set(rows)) == 32
    assert max(rows) > 3000
    assert min(rows) < 2000
    again = drawn(Reading(source=str(source)), 32, rows=None)
    assert [one.id for one in again.samples] == [one.id for one in chosen.samples]


def test_samples_of_the_whole_are_reckoned_from_the_rows_that_were_read(tmp_path: Path) -> None:
    """Rows that are no samples count off; --limit bounds them; what is not known stays unknown."""
    source = write(tmp_path / "rows.jsonl", ["", *(f"p {n}" for n in range(9))])
    chosen = drawn(Reading(source=str(source)), 4, rows=None)
    assert (len(chosen.samples), chosen.rows, chosen.total) == (4, 10, 9)
    assert drawn(Reading(source=str(source)), 4, rows=1000).total == 900
    assert drawn(Reading(source=str(source), limit=5), 4, rows=None).rows == 5
    many = write(tmp_path / "many.jsonl", [f"p {n}" for n in range(5001)])
    filtered = drawn(Reading(source=str(many), filters=("prompt~p",)), 4, rows=None)
    assert (filtered.rows, filtered.total) == (None, None)


# Words


def test_the_text_fits_into_eighty_columns_and_steers_no_terminal() -> None:
    """Every line is at most 80 columns wide, foreign words are harmless, and the end says how it stands."""
    canaries = [canary(f"c{n}") for n in range(32)]
    seen = report(*canaries)
    bad = Check(Level.FAIL, "server.canary", "a canary failed: \x1b[31mred " + "word " * 60, URL)
    plain = Check(Level.OK, "redis.clock", "fine.")
    text = list(
        lines(
            Findings(
                ok=False,
                checks=[plain, bad],
                recorded=recorded.fields(seen),
                canaries=recorded.verdicts(seen),
                source="rows.jsonl: 32 canaries.",
                estimate=estimate(seen, canaries, 88_088),
            )
        )
    )
    assert max(map(len, text)) <= 80
    assert "\x1b" not in "".join(text)
    assert text[0] == "Redis"
    assert text[1] == "  ok    fine."
    assert text[-1] == "doctor: 1 finding would waste the run or keep it from beginning (fail)."
    assert "canaries: accepted 32." in text
    assert "  tokens: 9.69 million to 9.69 million." in text
    assert "  output_ids               32 of 32  the server's, exact; they end with: eos" in text


def test_what_will_be_recorded_counts_the_answers() -> None:
    """Failed canaries are no answers; each field says how many have it and where it comes from."""
    seen = Report(servers=[server(canary(**THOUGHT), canary("x", reasoning_chars=0), canary("f", verdict="failed"))])
    told_fields = {one.name: (one.present, one.answers, one.source) for one in recorded.fields(seen)}
    assert told_fields["reasoning"] == (1, 2, "the field reasoning")
    assert told_fields["content"] == (2, 2, "the answer's text")
    assert told_fields["usage.reasoning_tokens"] == (0, 2, "not counted")
    assert "tool_calls" not in told_fields
    assert recorded.verdicts(seen) == {"accepted": 2, "failed": 1}
    assert recorded.fields(Report(servers=[])) == []
