"""The Pipeline page in a real browser, beside a real run: same numbers, live without flicker, usable by everybody."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from producer.simulator.server import ModelServer
from tests.support import chromium
from tests.support.browser import Tab, running_browser
from tests.support.flower import FlowerProcess
from tests.support.mill import Mill
from tests.support.processes import ManagedProcess, wait_until
from tests.support.redis_server import RedisServer

LOGIN = "ada:secret"
DATASETS = ("chat", "code", "math")
SIZES = ((380, "light"), (380, "dark"), (1440, "light"), (1440, "dark"))
LIVE = "#mill[data-live=live]"
OpenTab = Callable[..., Tab]


@dataclasses.dataclass
class World:
    """A run that goes on, and a Flower beside it."""

    mill: Mill
    redis: RedisServer
    model: ModelServer
    flower: FlowerProcess
    workers: list[ManagedProcess] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium; without one tests are skipped on a desk and fail in CI."""
    executable = chromium.find()
    if executable is None:
        message = "No Chromium: apt-get install chromium fonts-dejavu-core."
        if "CI" in os.environ:  # noqa: TID251 - decides between skipping and failing
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    with running_browser(executable) as started:
        yield started


@pytest.fixture
def tab(browser: Browser) -> Iterator[OpenTab]:
    """Open pages; each must have been quiet at the end, unless the test clears its complaints."""
    opened: list[Tab] = []

    def start(**options: Any) -> Tab:
        opened.append(Tab(browser, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
    assert not [complaint for one in opened for complaint in one.complaints]


@pytest.fixture(scope="module")
def world(redis_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start a run of three datasets with failures of several kinds, two workers and a Flower with a login."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "redis").mkdir()
    rules: list[dict[str, Any]] = [
        {"match": "too long", "status": 400, "message": "This model's maximum context length is 10 tokens."},
        {"match": "odd", "status": 422, "message": "unknown field frobnicate"},
        {"match": "cut", "finish_reason": "length"},
        {"match": "flaky", "status": 500, "times": 3},
    ]
    with RedisServer(folder / "redis", aof=True) as server, ModelServer(rules, latency_s=0.4) as model:
        env = {
            "MILL_REDIS_URL": server.url,
            "MILL_KEY_PREFIX": "tab:",
            "MILL_PREPARED_DIR": str(folder / "prepared"),
            "MILL_STATE_DIR": str(folder / "state"),
            "MILL_PROGRESS_S": "1",
            "MILL_BACKOFF_S": "0.1",
            "MILL_MODEL_URLS": model.url,
            "MILL_MAX_IN_FLIGHT": "4",
        }
        mill = Mill(env, folder)
        made = World(mill, server, model, FlowerProcess(env, log_dir=folder, login=LOGIN))
        try:
            mill.enqueue([f"a good question {n}" for n in range(60)] + ["too long 1", "too long 2"], dataset="chat")
            mill.enqueue(["fine", "odd 1", "cut 1", "cut 2", "flaky"], dataset="code")
            mill.enqueue([f"{n} + {n}" for n in range(20)], dataset="math")
            made.workers = [mill.worker(concurrency=3, wait=False), mill.worker(concurrency=3, wait=False)]
            made.flower.wait_ready()
            yield made
        finally:
            made.flower.close()  # a test may have started another
            mill.close()


def shown(page: Tab, dataset: str | None = None) -> dict[str, int | None]:
    """Return the counts that the page shows, of one dataset or of all."""
    root = f'.mill-dataset[data-key="{dataset}"] .mill-counts' if dataset else "#total-counts"
    counts = {}
    for name in ("accepted", "rejected", "failed", "queued", "in_flight"):
        counts[name] = page.number(f"{root} [data-field={name}]")
    return counts


def told(document: dict[str, Any]) -> dict[str, Any]:
    """Return the same counts out of a part of status."""
    return {name: document["counts"][name] for name in ("accepted", "rejected", "failed", "queued", "in_flight")}


def open_pipeline(world: World, tab: OpenTab, **options: Any) -> Tab:
    """Open the page by Flower's own address and wait for its first numbers."""
    page = tab(login=LOGIN, **options)
    page.page.goto(world.flower.url)
    page.page.wait_for_selector(LIVE)
    return page


def test_the_page_shows_the_run(world: World, tab: OpenTab) -> None:
    """Opened at `/`, it shows each dataset's numbers as status tells them, asks nobody else, complains of nothing."""
    page = open_pipeline(world, tab)
    world.mill.wait_recorded(62, "chat")
    world.mill.wait_recorded(5, "code")
    world.mill.wait_recorded(20, "math")
    status = world.mill.status()
    for name in DATASETS:
        wait_until(lambda name=name: shown(page, name) == told(status["datasets"][name]), 20, f"the numbers of {name}")
    wait_until(lambda: shown(page) == told(status["totals"]), 20, "the totals")
    assert page.page.title() == "Pipeline · Flower"
    assert page.page.get_by_role("link", name="Pipeline", exact=True).get_attribute("aria-current") == "page"
    assert page.text(".mill-total [data-field=percent]") == f"{status['totals']['percent']:.1f} %"
    assert all(url.startswith((world.flower.url, "data:")) for url in page.requests)


@pytest.mark.slow
def test_failures_lead_to_their_samples(world: World, tab: OpenTab) -> None:
    """Every class of status is in the table with its count, and one click shows the sample's prompt and error."""
    page = open_pipeline(world, tab)
    for name in DATASETS:
        for kind in ("failed", "rejected"):
            for reason, count in world.mill.status()["datasets"][name]["reasons"][kind].items():
                row = f'#failures tr[data-key="{name}\\a {kind}\\a {reason}"]'
                wait_until(lambda row=row, count=count: page.number(f"{row} [data-field=count]") == count, 20, row)
    page.page.locator("#failures tr", has_text="context_overflow").locator("a").first.click()
    page.page.wait_for_selector("text=This model's maximum context length is 10 tokens.")
    assert "too long" in page.text(".mill-message pre")
    page.page.get_by_text("Show it here").click()
    assert '"verdict": "failed"' in page.text("details pre")
    page.page.go_back()
    page.page.wait_for_selector(LIVE)
    page.page.locator("#find-dataset").select_option("math")
    page.page.locator("#find-id").fill("no-such-id")
    page.page.get_by_role("button", name="Show sample").click()
    page.page.wait_for_selector("text=knows no sample 'no-such-id'")
    page.complaints.clear()  # the browser notes the 404


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), SIZES)
def test_it_is_readable_and_usable_at_every_size(world: World, tab: OpenTab, width: int, theme: str) -> None:
    """Nothing is wider than the screen, and axe-core finds nothing serious, on the page and on a sample's."""
    page = open_pipeline(world, tab, width=width, theme=theme)
    page.page.wait_for_selector("#failures tr")
    page.page.wait_for_selector(".mill-chart canvas")
    assert page.page.evaluate("document.documentElement.dataset.bsTheme") == theme
    assert not page.is_wider_than_the_screen()
    assert page.findings() == []
    page.page.locator("#failures a").first.click()
    page.page.wait_for_selector(".mill-sample")
    page.page.get_by_text("Show it here").click()
    assert not page.is_wider_than_the_screen()
    assert page.findings() == []


@pytest.mark.slow
def test_updates_disturb_nobody(world: World, tab: OpenTab) -> None:
    """While numbers come in, focus, selected text, scroll position and every node that has not changed stay."""
    page = open_pipeline(world, tab)
    page.page.wait_for_selector("#failures tr")
    page.page.evaluate(
        """() => {
            document.querySelector('#failures button').focus();
            const cell = document.querySelector('#failures [data-field=error]');
            getSelection().selectAllChildren(cell);
            scrollTo(0, 600);
            window.before = [...document.querySelectorAll('#body *')].filter((node) => !node.closest('.mill-plot'));
        }"""
    )
    chosen = page.page.evaluate("getSelection().toString()")
    seen = page.count("/pipeline/data")
    wait_until(lambda: page.page.evaluate("1") and page.count("/pipeline/data") >= seen + 3, 30, "three more looks")
    state = page.page.evaluate(
        """() => [scrollY, getSelection().toString(), document.activeElement.dataset.act,
                  window.before.filter((node) => !node.isConnected).length]"""
    )
    assert state == [600, chosen, "retry", 0]
    assert chosen


@pytest.mark.slow
def test_a_hidden_page_asks_nothing(world: World, tab: OpenTab) -> None:
    """In a hidden tab no request is sent; when it is shown again it asks at once."""
    page = open_pipeline(world, tab)
    show = """(shown) => {
        Object.defineProperty(document, 'hidden', {value: !shown, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.page.evaluate(show, 0)
    page.page.wait_for_timeout(500)  # what was under way comes to its end
    before = len(page.requests)
    page.page.wait_for_timeout(5000)  # longer than two looks are apart
    assert len(page.requests) == before
    page.page.evaluate(show, 1)
    wait_until(lambda: page.page.evaluate("1") and len(page.requests) > before, 5, "a request")


@pytest.mark.slow
def test_flower_is_killed_and_started_again(world: World, tab: OpenTab) -> None:
    """An open page says that Flower does not answer and how old its numbers are, and goes on by itself later."""
    page = open_pipeline(world, tab)
    accepted = shown(page)["accepted"]
    world.flower.kill()
    page.page.wait_for_selector("#mill[data-live=lost]")
    assert "Flower does not answer (since " in page.text("#lost")
    wait_until(lambda: "s old." in page.text("#lost"), 20, "the age of the numbers")
    assert shown(page)["accepted"] == accepted
    assert page.findings() == []
    world.flower = FlowerProcess(
        world.mill.env, log_dir=world.mill.path, login=LOGIN, port=world.flower.port
    ).wait_ready()
    page.page.wait_for_selector(LIVE, timeout=40_000)
    assert page.page.locator("#lost").is_hidden()
    page.complaints.clear()  # the browser notes each refused connection


@pytest.mark.slow
def test_redis_stops_while_the_page_is_open(world: World, tab: OpenTab) -> None:
    """The page says that its numbers come from the files, shows what is recorded, and nothing that it cannot know."""
    page = open_pipeline(world, tab)
    accepted = shown(page)["accepted"]
    world.redis.kill()
    page.page.wait_for_selector("#offline:not([hidden])", timeout=40_000)
    assert shown(page)["accepted"] == accepted
    assert shown(page)["queued"] is None
    assert "cannot be reached" in page.text("#notes-list")
    assert page.findings() == []
    world.redis.start()
    page.page.wait_for_selector("#offline", state="hidden", timeout=40_000)
    wait_until(lambda: shown(page)["queued"] is not None, 30, "what is queued")


@pytest.mark.slow
def test_buttons_change_the_run(world: World, tab: OpenTab) -> None:
    """Pause, resume, ask again and the bound work by keyboard, say what they did, and the page shows it."""
    more = [f"one more question {n}" for n in range(200)]
    world.mill.enqueue(more, dataset="chat")
    page = open_pipeline(world, tab)
    page.page.get_by_role("button", name="Pause chat").focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("text=chat is paused; running requests finish.")
    page.page.get_by_role("button", name="Resume chat").wait_for()
    assert world.mill.status("chat")["datasets"]["chat"]["state"] == "paused"
    page.page.get_by_role("button", name="samples of code, bad_request").press("Enter")
    page.page.wait_for_selector("text=code: queued 1 failed samples (bad_request) again.")
    page.page.locator("#bound").fill("3")
    page.page.locator("#bound").press("Enter")
    page.page.wait_for_selector("text=At most 3 requests are in flight per model server from now on.")
    wait_until(lambda: page.text("#bound-now") == "Set by hand: 3.", 20, "the bound on the page")
    page.page.get_by_role("button", name="Back to MILL_MAX_IN_FLIGHT").press("Enter")
    page.page.get_by_role("button", name="Resume chat").press("Enter")
    page.page.get_by_role("button", name="Pause chat").wait_for()
    wait_until(lambda: world.mill.status("chat")["datasets"]["chat"]["state"] in {"running", "done"}, 30, poll_s=0.5)


@pytest.mark.slow
def test_the_theme_can_be_chosen(world: World, tab: OpenTab) -> None:
    """Flower's own switch changes the page and repaints the charts; the choice lasts over a reload."""
    page = open_pipeline(world, tab, theme="light")
    page.page.wait_for_selector(".mill-chart canvas")
    light = page.page.evaluate("getComputedStyle(document.querySelector('.mill-card')).backgroundColor")
    canvas = page.page.evaluate("document.querySelector('.mill-chart canvas').toDataURL()")
    page.page.get_by_role("button", name="Select theme").click()
    page.page.get_by_role("button", name="Dark").click()
    wait_until(
        lambda: page.page.evaluate("getComputedStyle(document.querySelector('.mill-card')).backgroundColor") != light,
        10,
        "dark cards",
    )
    assert page.page.evaluate("document.querySelector('.mill-chart canvas').toDataURL()") != canvas
    page.page.reload()
    page.page.wait_for_selector(LIVE)
    assert page.page.evaluate("document.documentElement.dataset.bsTheme") == "dark"


@pytest.mark.slow
def test_before_the_first_dataset_and_without_workers(world: World, tab: OpenTab, tmp_path: Path) -> None:
    """An empty mill says how to begin; one with samples and no worker says how to start some."""
    env = {**world.mill.env, "MILL_PREPARED_DIR": str(tmp_path / "prepared"), "MILL_KEY_PREFIX": "empty:"}
    mill = Mill(env, tmp_path)
    with FlowerProcess(env, log_dir=tmp_path) as flower:
        page = tab(width=380)
        page.page.goto(flower.wait_ready().url)
        page.page.wait_for_selector("text=No dataset yet")
        assert not page.is_wider_than_the_screen()
        assert page.findings() == []
        mill.enqueue(["waits for a worker"], dataset="first")
        page.page.wait_for_selector("#workers-title + p >> text=No worker is running.")
        wait_until(lambda: page.text("#state") == "waiting", 20, "a queued sample")
        assert shown(page, "first")["queued"] == 1
        assert page.page.get_by_role("button", name="Pause first").count() == 0
        assert page.findings() == []
        page.close()
