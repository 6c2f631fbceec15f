"""Where the Pipeline page enters Flower: its list of handlers, its settings, its navigation bar; nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tornado.template

logger = logging.getLogger(__name__)

TEMPLATES = Path(__file__).with_name("templates")
STATIC = Path(__file__).with_name("static")
NAVBAR = "navbar.html"
LIST_BEGIN = '<ul class="app-nav navbar-nav">'
"""What begins the list of pages in Flower's navigation bar."""

_LINK = """
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'pipeline' %} active{% end %}"
            href="{{ reverse_url('pipeline') }}"
            {% if active_tab == 'pipeline' %}aria-current="page"{% end %}>Pipeline</a>
        </li>"""


class PipelineLoader(tornado.template.Loader):
    """Flower's templates with ours beside them, and a link to our page in its navigation bar."""

    def _create_template(self, name: str) -> Any:
        ours = TEMPLATES / name
        if ours.is_file():
            return tornado.template.Template(ours.read_bytes(), name=name, loader=self)
        if name != NAVBAR:
            return super()._create_template(name)
        text = Path(self.root, name).read_text(encoding="utf-8")
        return tornado.template.Template(with_link(text), name=name, loader=self)


def with_link(navbar: str) -> str:
    """Return Flower's navigation bar with our page first; unchanged where its list of pages is not found."""
    if LIST_BEGIN not in navbar:
        logger.warning("Flower's navigation bar has changed; the page /pipeline has no link in it")
        return navbar
    return navbar.replace(LIST_BEGIN, LIST_BEGIN + _LINK, 1)


def install(ours: Sequence[Any], *, handlers: list[Any], settings: dict[str, Any]) -> None:
    """Put our handlers before Flower's, which end with one that takes everything, and our templates beside its own."""
    handlers[:0] = ours
    settings["template_loader"] = PipelineLoader(settings["template_path"])
