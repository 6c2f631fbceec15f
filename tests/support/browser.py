"""A headless Chromium for tests, and what a page may not do in it: complain, ask elsewhere, scroll sideways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.support import chromium

AXE = Path(__file__).with_name("vendor") / "axe.min.js"
SERIOUS = {"serious", "critical"}
_TIMEOUT_MS = 30_000


@contextlib.contextmanager
def running_browser(executable: Path) -> Iterator[Browser]:
    """Start the browser and end it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(executable), args=list(chromium.OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page at one size and theme, which notes what it complains about and where it asks."""

    def __init__(
        self, browser: Browser, *, width: int = 1440, theme: str = "light", login: str | None = None, height: int = 900
    ) -> None:
        user, _, password = (login or "").partition(":")
        self._context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if theme == "dark" else "light",
            http_credentials={"username": user, "password": password} if login else None,
        )
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(_TIMEOUT_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._on_request)

    def close(self) -> None:
        """Close it, before the server that it asks ends; a second time does nothing."""
        if not self.page.is_closed():
            self._context.close()

    def count(self, part: str) -> int:
        """Return how many requests had `part` in their address."""
        return sum(part in url for url in self.requests)

    def text(self, selector: str) -> str:
        """Return an element's text."""
        return (self.page.locator(selector).first.text_content() or "").strip()

    def number(self, selector: str) -> int | None:
        """Return an element's number; None for one that is unknown."""
        text = self.text(selector)
        return None if text == "—" else int(text.replace(",", ""))

    def is_wider_than_the_screen(self) -> bool:
        """Tell whether one must scroll sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))

    def findings(self) -> list[str]:
        """Return axe-core's serious and critical findings, one line each."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        result: dict[str, Any] = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']} ({one['impact']}): {node['target']} {node['failureSummary']}"
            for one in result["violations"]
            if one["impact"] in SERIOUS
            for node in one["nodes"]
        ]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
