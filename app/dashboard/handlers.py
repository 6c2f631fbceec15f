"""The page's requests: who may see and do what, and how it is answered."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tornado.web
from flower.views import BaseHandler

from app.dashboard.controls import parse_order
from app.dashboard.defaults import ADDRESS, is_loopback
from app.dashboard.looks import Seen
from app.dashboard.seam import STATIC
from app.dashboard.series import Span
from app.dashboard.watch import Watch
from app.errors import MillError, StoreError, UsageError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
)
"""No script or style but those of files that Flower serves; nothing from elsewhere."""
_STRANGE_HOST = (
    "Without a login Flower answers only under this machine's own name: open it as http://127.0.0.1 or "
    "http://localhost with its port, or set FLOWER_BASIC_AUTH=user:password."
)


def routes(watch: Watch) -> list[Any]:
    """Return what Flower's list of handlers gets."""
    seen = {"watch": watch}
    return [
        tornado.web.url(r"/", FirstPage),
        tornado.web.url(r"/pipeline", PipelinePage, name="pipeline"),
        tornado.web.url(r"/pipeline/data", DataHandler, seen),
        tornado.web.url(r"/pipeline/history", HistoryHandler, seen),
        tornado.web.url(r"/pipeline/sample", SamplePage, seen, name="pipeline-sample"),
        tornado.web.url(r"/pipeline/sample\.json", SampleJson, seen, name="pipeline-sample-json"),
        tornado.web.url(r"/pipeline/control", ControlHandler, seen),
        tornado.web.url(r"/pipeline/static/(.*)", AssetHandler, {"path": str(STATIC)}, name="pipeline-static"),
    ]


def refuse_strange_host(handler: tornado.web.RequestHandler) -> None:
    """Refuse a request for another host than this machine while nobody has to log in.

    Any web page can send its visitor's browser here under a name of its own (DNS rebinding), and would read along.
    """
    options = handler.application.options  # type: ignore[attr-defined] # Flower's application
    if options.basic_auth or options.auth or options.unix_socket:
        return
    if is_loopback(options.address or ADDRESS) and not is_loopback(handler.request.host_name.strip("[]")):
        raise tornado.web.HTTPError(403, _STRANGE_HOST)


def say_strange_host(handler: tornado.web.RequestHandler, trouble: Mapping[str, Any]) -> bool:
    """Tell whether that was the trouble; if so it is said."""
    error = trouble.get("exc_info", (None, None))[1]
    if not isinstance(error, tornado.web.HTTPError) or error.log_message != _STRANGE_HOST:
        return False
    handler.set_header("Content-Type", "text/plain; charset=utf-8")
    handler.finish(_STRANGE_HOST + "\n")
    return True


class OurHandler(BaseHandler):  # type: ignore[misc] # Flower is untyped
    """What all have in common: strict headers, and nothing for other sites to read."""

    def initialize(self, watch: Watch | None = None) -> None:
        """Take what tells the numbers."""
        self.watch = watch

    def set_default_headers(self) -> None:
        """Send the strict policy; Flower's opening to other sites (FLOWER_UNAUTHENTICATED_API) is not for samples."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "same-origin")
        self.set_header("Cache-Control", "no-store")

    def prepare(self) -> None:
        """Refuse a request under another site's name."""
        refuse_strange_host(self)

    def options(self, *_args: str, **_kwargs: str) -> None:
        """Refuse what asks whether another site may."""
        raise tornado.web.HTTPError(405)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say in one sentence why nothing is shown; the rest is Flower's."""
        if not say_strange_host(self, kwargs):
            super().write_error(status_code, **kwargs)

    @property
    def looking(self) -> Watch:
        """What tells the numbers."""
        assert self.watch is not None  # noqa: S101 - routes() gives it to every handler that asks
        return self.watch

    def why_no_control(self) -> str | None:
        """Return why nothing may be changed from the page; None where it may."""
        options = self.application.options
        if options.read_only:
            return "Flower was started read-only (FLOWER_READ_ONLY)."
        if not (options.basic_auth or options.auth):
            return "Changing a run from this page needs a login: start Flower with FLOWER_BASIC_AUTH=user:password."
        return None


class FirstPage(OurHandler):
    """`/` leads to the page; Flower's own pages stay where they are."""

    @tornado.web.authenticated
    def get(self) -> None:
        """Redirect."""
        self.redirect(self.reverse_url("pipeline"))


class PipelinePage(OurHandler):
    """The page without its numbers, which its script asks for."""

    @tornado.web.authenticated
    def get(self) -> None:
        """Render it."""
        why_not = self.why_no_control()
        self.render("pipeline.html", asset=functools.partial(asset_url, self), why_no_control=why_not)


class JsonHandler(OurHandler):
    """Answers with JSON, errors too."""

    def require_user(self) -> None:
        """Refuse who is not logged in, without sending a script to a login page."""
        if not self.current_user:
            raise tornado.web.HTTPError(401)

    def send(self, seen: Seen) -> None:
        """Send a look, and how old it is."""
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.set_header("X-Age-S", f"{seen.age_s:.3f}")
        self.finish(seen.body)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Say what went wrong in one sentence."""
        error = kwargs.get("exc_info", (None, None))[1]
        message = f"Flower could not answer ({status_code}); its log says why."
        if isinstance(error, MillError):
            self.set_status(404 if isinstance(error, UsageError) else 503)
            message = str(error)
        elif status_code == 401:
            message = "Log in to Flower again; reload the page."
            if self.application.options.basic_auth:
                self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        elif isinstance(error, tornado.web.HTTPError) and error.log_message:
            message = error.log_message
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(msgspec.json.encode({"error": message}))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Keep what people are told out of the log."""
        if not isinstance(value, MillError):
            super().log_exception(typ, value, tb)


class DataHandler(JsonHandler):
    """All numbers of the page."""

    async def get(self) -> None:
        """Answer from the shared look."""
        self.require_user()
        self.send(await self.looking.data())


class HistoryHandler(JsonHandler):
    """The charts' columns."""

    async def get(self) -> None:
        """Answer for `span` (15m, 6h or run) and `dataset` (all without one)."""
        self.require_user()
        try:
            span = Span(self.get_query_argument("span", Span.QUARTER))
        except ValueError:
            raise tornado.web.HTTPError(400, f"span is one of {', '.join(Span)}") from None
        self.send(await self.looking.history(span, self.get_query_argument("dataset", "") or None))


class SamplePage(OurHandler):
    """One sample: prompt, answer, every attempt and the whole record."""

    @tornado.web.authenticated
    async def get(self) -> None:
        """Render it, or say why not."""
        dataset, sample_id = self.get_query_argument("dataset", ""), self.get_query_argument("id", "")
        found, trouble = None, None
        try:
            found = await self.looking.sample(dataset, sample_id)
        except MillError as error:
            trouble = str(error)
            self.set_status(503 if isinstance(error, StoreError) else 404)
        self.render(
            "sample.html",
            asset=functools.partial(asset_url, self),
            dataset=dataset,
            sample_id=sample_id,
            found=found,
            trouble=trouble,
            pretty=pretty,
            text_of=text_of,
        )


class SampleJson(JsonHandler):
    """The same as JSON."""

    async def get(self) -> None:
        """Answer with everything that is known."""
        self.require_user()
        found = await self.looking.sample(self.get_query_argument("dataset", ""), self.get_query_argument("id", ""))
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(msgspec.json.format(msgspec.json.encode(found), indent=2))


class ControlHandler(JsonHandler):
    """Changes a run, for people who have logged in."""

    def check_xsrf_cookie(self) -> None:
        """Ask for the token whatever the login is: Flower itself asks OAuth sessions alone."""
        super().check_xsrf_cookie()
        tornado.web.RequestHandler.check_xsrf_cookie(self)

    async def post(self) -> None:
        """Carry an order out."""
        self.require_user()
        if why_not := self.why_no_control():
            raise tornado.web.HTTPError(403, why_not.replace("%", "%%"))
        order = parse_order(self.request.body)
        said = await self.looking.carry_out(order, by=self._who(), celery_app=self.capp)
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(msgspec.json.encode({"said": said}))

    def _who(self) -> str:
        if isinstance(self.current_user, str):
            return self.current_user
        basic = self.request.headers.get("Authorization", "").partition(" ")[2]
        try:
            return base64.b64decode(basic).decode().partition(":")[0] or "hand"
        except ValueError:
            return "hand"


class AssetHandler(tornado.web.StaticFileHandler):
    """The page's own scripts and styles."""

    def set_extra_headers(self, path: str) -> None:
        """Take the files for what they are."""
        del path
        self.set_header("X-Content-Type-Options", "nosniff")


def asset_url(handler: OurHandler, name: str) -> str:
    """Return the address of one of our files, which changes with its content, so that browsers may keep it for ever."""
    return f"{handler.reverse_url('pipeline-static', name)}?v={_digest(STATIC / name)}"


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def pretty(value: Any) -> str:
    """Return a record as indented JSON, lists of numbers on one line."""
    fields = [f"  {json.dumps(name)}: {_pretty_field(field)}" for name, field in value.items()]
    return "{\n" + ",\n".join(fields) + "\n}"


def _pretty_field(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        return json.dumps(value)
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")


def text_of(content: Any) -> str:
    """Return a message's content as text; parts that are no text as JSON."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else json.dumps(part)
        for part in parts
    )
