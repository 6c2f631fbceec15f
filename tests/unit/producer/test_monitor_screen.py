"""The monitor's screen: what is shown at which size, what comes first, and how bars and sparklines are drawn."""

from __future__ import annotations

import time

import pytest

from app.history import Pace
from app.snapshot import BrokerState, Counts, Endpoint, Eta, Part, Rate, Rates, State
from producer.monitor.layout import Line, Span, bar, fit, flow, sentence, sparkline
from producer.monitor.picture import ALL, Example, Picture, by_steps
from producer.monitor.screen import Frame, draw
from producer.monitor.view import View
from producer.status import cells


def part(
    accepted: int, *, total: int = 1000, failed: int = 0, state: State = State.RUNNING, notes: tuple[str, ...] = ()
) -> Part:
    """Return a dataset's numbers; 30 samples are in flight while it runs."""
    left = total - accepted - failed
    flying = min(left, 30)
    counts = Counts(
        read=total, samples=total, accepted=accepted, failed=failed, left=left, queued=left - flying, in_flight=flying
    )
    return Part(
        state=state,
        counts=counts,
        percent=int(1000 * (total - left) / total) / 10,
        rates=Rates(now=Rate(samples_per_s=10.0, tokens_per_s=5310.4), five_minutes=Rate(samples_per_s=9.5)),
        eta=Eta(seconds=left / 10, low_s=left / 12, high_s=left / 8) if left else Eta(),
        reasons={"failed": {"timeout": failed}} if failed else {},
        notes=list(notes),
    )


def picture(parts: dict[str, Part], *, notes: tuple[str, ...] = (), **more: object) -> Picture:
    """Return a picture of these datasets, on one server and one worker."""
    now = time.time()
    fields = {
        "at": now,
        "broker": BrokerState(reachable=True, url="redis://h:1/0"),
        "totals": part(500, notes=notes),
        "datasets": parts,
        "endpoints": [
            Endpoint(
                name="a",
                url="http://gpu1:8000",
                state="up",
                in_flight=30,
                bound=64,
                latency_s=3.14,
                gauges={"running": 31.0, "waiting": 2.0, "kv": 0.43, "at": now},
            ),
        ],
        "workers": [{"node": "mill1-a1@gpu1/b2", "slots": 40, "busy": 30, "at": now - 4, "state": "running"}],
        **more,
    }
    return Picture(**fields)  # type: ignore[arg-type]


def screen(shown: Picture | None, width: int, height: int, **more: object) -> list[str]:
    """Return the lines of a screen as text."""
    options = {"taken": time.monotonic(), **more}
    return [line.text for line in draw(View(shown, **options), Frame(width, height, 3.0))]  # type: ignore[arg-type]


MANY = {f"set{number:02d}": part(100 * (number % 9), failed=number % 2) for number in range(20)}
LONG = {"数据集-" * 9: part(400, failed=3, notes=("3 failed; producer retry asks them again.",))}


@pytest.mark.parametrize("width", [20, 39, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 24, 200])
@pytest.mark.parametrize("parts", [{}, {"chat": part(400, failed=3)}, MANY, LONG], ids=["none", "one", "many", "wide"])
def test_no_screen_is_larger_than_its_window(parts: dict[str, Part], width: int, height: int) -> None:
    """At any size no line is wider than the window, none is too much, and the first is the title."""
    lines = screen(
        picture(parts, notes=("The disk is full, and nobody has looked at it for a long time.",)), width, height
    )
    assert len(lines) <= height
    assert max(cells(line) for line in lines) <= width
    assert lines[0].startswith("promptmill")


def test_everything_is_shown_where_there_is_room() -> None:
    """A dataset's counts, rates, ETA, failures with the newest one's words, the server and the worker."""
    example = Example(reason="timeout", error="no whole answer within 1800 s", last_at=time.time())
    lines = screen(picture({"chat": part(400, failed=3)}, examples={"chat": [example]}), 120, 60)
    text = "\n".join(lines)
    assert "chat   running   40.3 %   403 of 1,000   ETA 0:01:00 (0:00:50 to 0:01:15)" in lines
    assert "█ accepted 400   ▓ rejected 0   ▚ failed 3   ░ with workers 30   · queued 567" in lines
    assert "10 samples/s   5,310 tokens/s   5 min 9.5" in lines
    assert "failed timeout 3 (" in text
    assert "): no whole answer within 1800 s" in text
    server = "http://gpu1:8000   up   30 of 64 in flight   3.14 s   itself: running 31, waiting 2, cache 43 %"
    assert server in lines
    assert "mill1-a1@gpu1   running   30 of 40 slots busy   heartbeat 4 s ago" in lines


def test_a_small_window_shows_what_matters_most() -> None:
    """What needs a person and each dataset's head come before bars, and the last line says what is hidden."""
    shown = picture({"a": part(100), "b": part(200), "c": part(1000, state=State.DONE)}, notes=("The disk is full.",))
    lines = screen(shown, 80, 7)
    assert lines[1] == "! The disk is full."
    assert [line.split()[0] for line in lines[2:6]] == ["all", "a", "b", "c"]
    assert lines[6].endswith("more lines in a larger window")


def test_what_needs_a_person_is_on_top() -> None:
    """Notes of all and of single datasets stand above the numbers, each once; of many the first and how many more."""
    notes = tuple(f"Trouble {number}." for number in range(12))
    lines = screen(picture({"a": part(1, notes=("Paused: by me.", "Trouble 3."))}, notes=notes), 80, 60)
    assert lines[1:9] == [f"! Trouble {number}." for number in range(8)]
    assert lines[9] == "! and 5 more; producer status shows all."


def test_old_numbers_and_a_lost_link_are_told() -> None:
    """Numbers that grow older say how old they are, and what is wrong stands first."""
    shown = picture({"a": part(1)})
    lines = screen(shown, 80, 30, taken=time.monotonic() - 42, source="gpu1 over ssh", trouble="The link was lost.")
    assert ", 42 s old  gpu1 over ssh" in lines[0]
    assert lines[1] == "The link was lost."
    assert "heartbeat 46 s ago" in "\n".join(lines)
    assert "s old" not in screen(shown, 80, 30, taken=time.monotonic() - 5)[0]


def test_before_the_first_numbers() -> None:
    """While nothing has come it says for how long."""
    assert screen(None, 80, 5, taken=time.monotonic() - 8)[1] == "Reading the numbers (8 s) ..."


def test_the_numbers_of_files_say_when_they_were_written() -> None:
    """Without Redis the screen says that the files speak, and how old what only a worker knew is."""
    gone = BrokerState(reachable=False, url="")
    lines = screen(picture({"a": part(1)}, broker=gone, told_at=time.time() - 90), 80, 30)
    assert lines[1].startswith("These are the numbers of the files; a worker last wrote them at ")
    assert " ".join(line.strip() for line in lines[1:3]).endswith(", 0:01:30 ago.")


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """Where nothing else can be shown, bars and sparklines are made of ASCII."""
    shown = picture({"a": part(500, failed=100)}, paces={"a": [1.0] * 60, ALL: [1.0] * 60})
    lines = draw(View(shown, time.monotonic()), Frame(80, 40, 3.0, unicode=False))
    assert all(line.text.isascii() for line in lines)


def test_no_chart_of_work_that_no_point_saw() -> None:
    """A dataset that was done before the first point was stored has no chart of nothing; one with any work has one."""
    done = part(128, total=128, state=State.DONE)
    silent, seen = [None] * 36 + [0.0] * 24, [None] * 36 + [0.0] * 23 + [0.5]
    assert "top" not in "\n".join(screen(picture({"a": done}, paces={"a": silent}), 80, 40))
    assert "6 min, top 0.5/s" in "\n".join(screen(picture({"a": done}, paces={"a": seen}), 80, 40))


def test_a_bar_shows_the_smallest_part() -> None:
    """Each part is as long as its share; one sample of a million is still one column."""
    parts = [(500_000, Span("a")), (1, Span("x")), (0, Span("n")), (499_999, Span("."))]
    assert "".join(span.text for span in bar(parts, 1_000_000, 20)) == "a" * 10 + "x" + "." * 9
    assert "".join(span.text for span in bar([(0, Span("a")), (0, Span("."))], 0, 5)) == "....."


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 10, ""),
        ([None, None], 10, ""),
        ([None, 0.0, 5.0, 10.0], 10, "▁▅█"),
        ([1.0, 1.0, None, None, 1.0, 1.0], 3, "█ █"),
        ([0.0, 0.0], 5, "▁▁"),
        ([1.0, 2.0, 3.0, 4.0, 8.0], 3, "▂▄█"),
    ],
)
def test_a_sparkline(values: list[float | None], width: int, drawn: str) -> None:
    """It grows from the right, is averaged to fit, and is empty where nothing is known."""
    assert sparkline(values, width, plain=False) == drawn


def test_rates_by_steps() -> None:
    """Points of any distance become steps of one length; a gap is unknown, and so is a step that has hardly begun."""
    paces = [
        Pace(at=20.0, since=0.0, samples_per_s=2.0),
        Pace(at=25.0, since=20.0, samples_per_s=8.0),
        Pace(at=70.0, since=25.0),
        Pace(at=101.0, since=70.0, samples_per_s=1.0),
    ]
    found = by_steps(paces, until=101.0, steps=11, step_s=10.0)
    assert found == [2.0, 2.0, 8.0, None, None, None, None, 1.0, 1.0, 1.0, None]


def test_lines_are_wrapped_and_cut() -> None:
    """Items flow into lines; a long sentence is cut after so many lines."""
    assert [line.text for line in flow(["aaaa", "bbbb", "cccc"], 11, rank=5, indent=2)] == ["aaaa   bbbb", "  cccc"]
    assert [line.rank for line in flow(["aaaa", "bbbb", "cccc"], 11, rank=5)] == [5, 6]
    words = [line.text for line in sentence("one two three four five six seven", 12, rank=1, most=2)]
    assert words == ["one two", "  three ..."]


def test_the_least_important_lines_go_first() -> None:
    """Of what does not fit the highest ranks are left out, and the order stays."""
    lines = [Line(rank, (Span(str(rank)),)) for rank in (0, 30, 10, 20)]
    assert [line.text for line in fit(lines, 3, 80)] == ["0", "10", "... 2 more lines in a larger window"]
    assert fit(lines, 4, 80) == lines
