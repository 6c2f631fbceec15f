"""The seam to Flower: fails loudly when a new Flower has moved what the Pipeline page hooks into."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import flower.app
import flower.command
import flower.urls
import flower.views
import pytest
import tornado.template
import tornado.web

from app.dashboard import seam

FLOWERS = Path(flower.urls.settings["template_path"])


def test_flower_takes_its_handlers_and_settings_from_its_lists() -> None:
    """What is put into flower.urls reaches the application: the same list, the same dict, in order."""
    assert flower.app.default_handlers is flower.urls.handlers
    assert flower.command.settings is flower.urls.settings
    assert "**settings" in inspect.getsource(flower.command.flower.callback)
    catch_all = flower.urls.handlers[-1]
    assert catch_all[0] == ".*"


def test_the_navigation_bar_has_the_list_that_we_extend() -> None:
    """Our link is the first of Flower's list of pages."""
    original = (FLOWERS / seam.NAVBAR).read_text(encoding="utf-8")
    assert original.count(seam.LIST_BEGIN) == 1
    ours = seam.with_link(original)
    pages = ours.partition(seam.LIST_BEGIN)[2].partition("</ul>")[0]
    names = [part.partition("</a>")[0].rpartition(">")[2] for part in pages.split("<li")[1:]]
    assert names == ["Pipeline", "Workers", "Tasks", "Broker"]


def test_a_navigation_bar_that_has_changed_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Flower's pages go on without our link, and the log says why it is missing."""
    with caplog.at_level(logging.WARNING):
        assert seam.with_link("<nav>new</nav>") == "<nav>new</nav>"
    assert "/pipeline has no link in it" in caplog.text


def test_templates_of_both_are_found() -> None:
    """Ours extend Flower's base, whose blocks are those that ours fill; Flower's own come out as they are."""
    loader = seam.PipelineLoader(str(FLOWERS))
    base = (FLOWERS / "base.html").read_text(encoding="utf-8")
    for name in ("pipeline.html", "sample.html"):
        assert isinstance(loader.load(name), tornado.template.Template)
        text = (seam.TEMPLATES / name).read_text(encoding="utf-8")
        for block in ("title", "navbar", "container", "extra_scripts"):
            assert f"{{% block {block} %}}" in text
            assert f"{{% block {block} %}}" in base
    assert b"Pipeline" in loader.load("navbar.html").generate(
        active_tab="pipeline", reverse_url=lambda name: name, static_url=str, handler=_Handler(), current_user=None
    )


class _Handler:
    """What the navigation bar asks of a handler."""

    class application:  # noqa: N801 - Flower's name
        class options:  # noqa: N801 - Flower's name
            auth = ""


def test_handlers_go_before_flowers_own() -> None:
    """Tornado takes the first that fits, and Flower's last one fits everything."""
    handlers: list[Any] = ["theirs"]
    settings: dict[str, Any] = {"template_path": str(FLOWERS)}
    seam.install(["ours"], handlers=handlers, settings=settings)
    assert handlers == ["ours", "theirs"]
    assert isinstance(settings["template_loader"], seam.PipelineLoader)


def test_flower_still_asks_for_logins_as_our_handlers_expect() -> None:
    """The page leans on Flower's own login check, its options and its rule against other sites."""
    source = inspect.getsource(flower.views.BaseHandler)
    for word in ("def get_current_user", "def check_xsrf_cookie", "options.basic_auth", "options.auth", "def capp"):
        assert word in source, word
    for name in ("basic_auth", "auth", "read_only", "url_prefix"):
        assert name in flower.app.default_options, name
    assert flower.urls.settings["xsrf_cookies"] is True


def test_names_of_our_routes_are_not_flowers() -> None:
    """No name of ours hides a page of Flower's."""
    from app.dashboard import handlers  # noqa: PLC0415 - it imports Flower

    ours = {one.name for one in handlers.routes(None) if one.name}  # type: ignore[arg-type]
    theirs = {one.name for one in flower.urls.handlers if isinstance(one, tornado.web.url)}
    assert ours
    assert not ours & theirs


def test_static_files_have_their_licences() -> None:
    """What comes from others lies in a folder of its own, with its licence beside it."""
    vendor = seam.STATIC / "vendor"
    assert sorted(path.name for path in vendor.iterdir()) == ["uPlot.LICENSE", "uPlot.iife.min.js", "uPlot.min.css"]
    assert "MIT" in (vendor / "uPlot.LICENSE").read_text(encoding="utf-8")
