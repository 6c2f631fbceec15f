"""The report: what is counted of the records, how charts are drawn, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from app import history, manifest
from app.errors import UsageError
from app.history import Point
from app.ledger import Ledger, Pen
from app.places import dataset_folder
from app.records import Kind, Usage, encode_line
from app.settings import GenerationSettings
from producer.report import charts
from producer.report.charts import Curve
from producer.report.gather import Report, gather
from producer.report.page import render
from producer.report.scan import scan
from tests.support.exports import record

ODD = "a <b> & 'c'"


def quiet(_name: str, _read: int, _total: int) -> None:
    """Hear of progress and say nothing."""


def write(prepared: Path, dataset: str = "chat", *, points: int = 30, error: str = "no answer <script>") -> None:
    """Write a dataset of ten samples: six accepted, two failed, one rejected, one left."""
    with Ledger.open(dataset_folder(prepared, dataset)) as ledger:
        manifest.fix_settings(ledger, dataset, GenerationSettings(system="Be <b>brief</b>."), {}, new=False)
        pens = [Pen(Kind.PENDING, f"s{n}", json.dumps({"id": f"s{n}"}).encode() + b"\n") for n in range(10)]
        for n in range(6):
            one = record(
                f"s{n}", dataset=dataset, usage=Usage(20, 100 * (n + 1)), latency_s=n + 1.0, attempts=1 + n % 2
            )
            pens.append(Pen(Kind.ACCEPTED, one.id, encode_line(one), tokens=100 * (n + 1)))
        for n in (6, 7):
            one = record(f"s{n}", dataset=dataset, verdict=Kind.FAILED, reason="timeout", error=error, finished_at=n)
            pens.append(Pen(Kind.FAILED, one.id, encode_line(one), reason="timeout"))
        one = record("s8", dataset=dataset, verdict=Kind.REJECTED, reason="truncated", latency_s=50.0)
        pens.append(Pen(Kind.REJECTED, one.id, encode_line(one), reason="truncated"))
        ledger.commit(pens)
        lines = [
            history.encode(Point(at=1000.0 + 10 * n, accepted=n, left=points - n, tokens=50 * n, in_flight=3, bound=4))
            for n in range(points)
        ]
        ledger.folder.progress_log.write_bytes(b"".join(lines))


def made(prepared: Path, *datasets: str) -> Report:
    """Return the report of a folder."""
    return gather(prepared, datasets, tell=quiet)


class Page(HTMLParser):
    """What a page refers to, and whether its elements are closed in order."""

    VOID = frozenset({"meta", "br", "rect", "line", "circle", "polyline", "polygon"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a reference, and what is open."""
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "data", "action"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Check that it was the last one that is open."""
        assert tag in self.VOID or self.open.pop() == tag


def test_every_record_is_counted_once(tmp_path: Path) -> None:
    """Lengths are those of accepted samples, latencies of all answers, and calls beyond the first are told."""
    write(tmp_path)
    read: list[int] = []
    found = scan(dataset_folder(tmp_path, "chat"), tell=read.append)
    lengths, latencies = found.lengths.histogram(), found.latencies.histogram()
    assert (lengths.count, lengths.mean) == (6, 350.0)
    assert (latencies.count, latencies.total) == (7, 71.0)
    assert found.prompts.total == 120
    assert dict(found.attempts) == {1: 3, 2: 3}
    files = [dataset_folder(tmp_path, "chat").lines(kind) for kind in (Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED)]
    assert sum(read) == sum(path.stat().st_size for path in files)


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    """A line that is no record costs nothing but itself."""
    write(tmp_path)
    with dataset_folder(tmp_path, "chat").lines(Kind.ACCEPTED).open("ab") as file:
        file.write(b'{"id": "s9", "usa')
    assert scan(dataset_folder(tmp_path, "chat")).lengths.histogram().count == 6


def test_a_page_is_whole_and_alone(tmp_path: Path) -> None:
    """The page refers to nothing but itself, its elements are closed, and names and words cannot become markup."""
    write(tmp_path, ODD)
    write(tmp_path, "math")
    page = render(made(tmp_path))
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.links
    assert all(link.startswith("#") for link in parsed.links)
    assert "url(" not in page
    assert "@import" not in page
    assert "a &lt;b&gt; &amp; &#x27;c&#x27;" in page
    for foreign in ("<b> &", "<b>brief", "answer <script>"):
        assert foreign not in page
    assert "system = &quot;Be &lt;b&gt;brief&lt;/b&gt;.&quot;" in page


def test_the_numbers_lie_in_the_page(tmp_path: Path) -> None:
    """The snapshot is in it as JSON, and the figures shown are the same."""
    write(tmp_path)
    page = render(made(tmp_path))
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL)
    assert found
    counts = json.loads(found.group(1))["datasets"]["chat"]["counts"]
    assert [counts[name] for name in ("samples", "accepted", "rejected", "failed", "left")] == [10, 6, 1, 2, 1]
    assert "accepted <b>6</b>" in page
    assert '<td>failed</td><td>timeout</td><td class="n">2</td>' in page
    assert "<dd>2,100<small>of accepted samples</small>" in page, "output tokens"


def test_several_datasets_have_a_sum(tmp_path: Path) -> None:
    """With more than one dataset the first section adds them up; one dataset alone has none."""
    write(tmp_path)
    write(tmp_path, "math")
    report = made(tmp_path)
    assert report.whole is not None
    assert report.whole.part.counts.accepted == 12
    assert report.whole.scan.lengths.histogram().count == 12
    assert report.whole.points[-1].accepted == 58
    assert made(tmp_path, "math").whole is None
    with pytest.raises(UsageError, match="no dataset 'milk'"):
        made(tmp_path, "milk")


def test_without_points_and_without_records(tmp_path: Path) -> None:
    """A dataset on which no worker has worked has a page that says so."""
    with Ledger.open(dataset_folder(tmp_path, "new")) as ledger:
        manifest.fix_settings(ledger, "new", GenerationSettings(), {}, new=False)
    page = render(made(tmp_path))
    assert "No points over time are stored" in page
    assert "<figure" not in page
    with pytest.raises(UsageError, match="There is no dataset in"):
        made(tmp_path / "nothing")


def points_of(chart: str, style: str) -> list[list[tuple[float, float]]]:
    """Return the corners of each drawn line of a curve."""
    found = re.findall(rf'<polyline class="line {style}" points="([^"]+)"', chart)
    return [[tuple(map(float, corner.split(","))) for corner in line.split()] for line in found]  # type: ignore[misc]


def test_a_curve_is_broken_where_nothing_is_known() -> None:
    """A gap is no line; values stand where the axes say, and one alone is a dot."""
    chart = charts.over_time(
        "Rate", [0.0, 10.0, 20.0, 30.0, 40.0], [Curve("rate", "a", [0.0, 8.0, None, 4.0, None])], unit="a second"
    )
    (line,) = points_of(chart, "a")
    assert line[0][1] > line[1][1], "8 is drawn above 0"
    assert chart.count("<circle") == 1
    assert ">8<" in chart
    assert charts.over_time("Rate", [0.0, 1.0], [Curve("rate", "a", [None, 3.0])], unit="s") == ""


def test_bars_are_as_high_as_their_counts() -> None:
    """The bars of a distribution are in proportion, each with its range and share in words."""
    chart = charts.distribution("Lengths", [(10.0, 5), (12.5893, 10)], unit="tokens", mean=10.5, p95=12.0)
    heights = [float(height) for height in re.findall(r'<rect class="bar"[^>]* height="([\d.]+)"', chart)]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert "10 to 12.6 tokens: 10 (66.7 %)" in chart
    assert "mean 10.5" in chart


def test_shares_add_up() -> None:
    """The parts of a bar are as long as their counts, and each is in the legend."""
    bar = charts.shares([("accepted", "good", 75), ("failed", "bad", 25), ("left", "rest", 0)])
    assert [float(wide) for wide in re.findall(r'width="([\d.]+)"', bar)] == [750.0, 250.0]
    assert "left <b>0</b> <small>0.0 %</small>" in bar


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (0.123456, "0.123"), (99.94, "99.9"), (1234.0, "1,234"), (45_600.0, "45.6k"), (2.5e6, "2.5M")],
)
def test_numbers_are_short(value: float, words: str) -> None:
    """Axes and figures have three digits that matter."""
    assert charts.number(value) == words
