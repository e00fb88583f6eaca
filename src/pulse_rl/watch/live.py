"""The live page: one server shows any number of runs and stores, and changes what it shows as they do.

A source looks at something and draws a `Page`, as a report is drawn; of several there is a line each above their pages.
The server sends the page, and then by server-sent events those of its blocks that have changed. It looks only while
somebody reads, and so often that looking takes at most a `SHARE` of a core.

It listens on this machine alone, to requests that name this machine (a page elsewhere could otherwise let a name of
its own lead here), or where it is told to listen: then a request needs the token.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from pulse_rl.errors import PulseError, one_line, require
from pulse_rl.html.page import Page, PageBlock
from pulse_rl.logs import logger
from pulse_rl.units import seconds
from pulse_rl.watch.alarms import Alarm
from pulse_rl.watch.exporters import HOST

if TYPE_CHECKING:
    from aiohttp import web

SHARE = 0.015  # of a core, for all sources together; sending takes a little more
LOOK_S = 1.0  # between two looks at a source, at least
SAVED_S = 20.0  # seconds: what looks have left of their share is kept for later ones for so long
PACE = 100  # times as long as what costs much took, until it is made anew
ALIVE_S = 15.0  # after which a reader is told that there is nothing new, so that one who is gone is noticed
UNREADABLE = "cannot be read"  # the verdict of a source that is so
log = logger(__name__)
T = TypeVar("T")
LOOPBACK = (HOST, "localhost", "::1")


class HistoryLine(msgspec.Struct, frozen=True):
    """A history in a line.

    of: the store, or the run, with its policy where it has several. version: the newest. behind: versions, of who is
    furthest behind. age_s: seconds since the newest version. verdict: in a word or two.
    """

    of: str
    version: int | None
    behind: int | None
    age_s: float | None
    verdict: str
    alarms: tuple[Alarm, ...]


class Glance(msgspec.Struct, frozen=True):
    """What a page shows, for scripts. details: the summary of a run, the status of a store, or why it has none."""

    target: str
    lines: list[HistoryLine]
    details: Any


class Watched(Protocol):
    """Something to watch."""

    name: str

    def look(self) -> Page:
        """Read what is new, in a thread, and draw the page. Raises PulseError, OSError or ValueError."""

    def glance(self) -> Glance:
        """What the last look has read."""


class Paced(Generic[T]):
    """What costs much, made anew from time to time only. make: makes it.

    Attributes:
        made: When it was made last, in seconds since 1970; 0 for never.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.made = self._due = 0.0
        self._make = make

    def get(self) -> T:
        """What was made last. Raises what making it raises."""
        if time.monotonic() >= self._due:
            began = time.process_time()
            self._value = self._make()
            self.made = time.time()
            self._due = time.monotonic() + PACE * (time.process_time() - began)
        return self._value


class LivePage:
    """The application of a live page. token: what a request has to know; None for requests of this machine alone.

    Raises MissingExtraError without the extra `watch`.
    """

    def __init__(self, sources: Sequence[Watched], token: str | None = None) -> None:
        self._web = require("aiohttp.web", "watch")
        self._sources = sources
        self._token = token
        self._pages = [Page(source.name, "is being read …") for source in sources]
        self._encoded: list[list[bytes]] = [[] for _ in sources]  # the blocks of each page, as JSON
        self._lines: list[list[HistoryLine]] = [[] for _ in sources]
        self._readers = 0
        self._changed = asyncio.Condition()  # another block, or another reader

    def application(self) -> web.Application:
        """What aiohttp serves."""
        application = self._web.Application()
        application.add_routes([self._web.get("/", self._show), self._web.get("/events", self._tell)])
        application.cleanup_ctx.append(self._looking)
        return application

    async def _looking(self, _: object) -> Any:
        """Look at all sources as long as the server runs."""
        tasks = [asyncio.create_task(self._look(number)) for number in range(len(self._sources))]
        yield
        for task in tasks:
            task.cancel()

    async def _look(self, number: int) -> None:
        due = time.monotonic()
        for looks in count():
            page, encoded, lines, took = await asyncio.to_thread(_look, self._sources[number])
            async with self._changed:
                self._pages[number], self._encoded[number], self._lines[number] = page, encoded, lines
                self._changed.notify_all()
            now = time.monotonic()
            if looks:  # the first one takes in all that was there
                due = max(due, now - SAVED_S) + took * len(self._sources) / SHARE
            await asyncio.sleep(max(LOOK_S, due - now))
            async with self._changed:
                await self._changed.wait_for(lambda: self._readers)

    async def _show(self, request: web.Request) -> web.Response:
        """The page as it is now."""
        self._admit(request)
        whole = Page(", ".join(source.name for source in self._sources), "")
        whole.blocks = [*self._overview(), *(block for page in self._pages for block in page.blocks)]
        html = await asyncio.to_thread(whole.html, live=True)
        headers = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        return self._web.Response(text=html, content_type="text/html", headers=headers)

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """All blocks, then those that change."""
        self._admit(request)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = self._web.StreamResponse(headers=headers)
        await response.prepare(request)
        sent: list[bytes] = []
        self._readers += 1
        async with self._changed:
            self._changed.notify_all()
        try:
            while True:
                now = [*_encoded(self._overview()), *(block for page in self._encoded for block in page)]
                await response.write(_event(sent, now))
                sent = now
                with suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_S), self._changed:
                        await self._changed.wait()
        except ConnectionError:
            return response
        finally:
            self._readers -= 1

    def _overview(self) -> list[PageBlock]:
        """A line of each history, where there are several sources."""
        if len(self._sources) == 1:
            return []
        page = Page("All", "")
        columns = ("", "verdict", "newest version", "came", "furthest behind")
        page.table("All runs and stores", columns, [_row(line) for lines in self._lines for line in lines])
        return page.blocks[-1:]

    def _admit(self, request: web.Request) -> None:
        """Refuse a request that does not know the token, or without one, does not name this machine."""
        if self._token is None:
            if (request.url.host or "") not in LOOPBACK:
                raise self._web.HTTPForbidden(text="this page is for requests to 127.0.0.1 or localhost; see --listen")
        elif not hmac.compare_digest(request.query.get("token", "").encode(), self._token.encode()):
            raise self._web.HTTPForbidden(text="the address that `pulse-rl watch` printed ends with ?token=…")


def look_at(source: Watched) -> tuple[Page, Glance]:
    """The page of a source and what it shows, also of one that cannot be read: then the details say why."""
    try:
        return source.look(), source.glance()
    except Exception as error:  # what is wrong with one source must not end the others
        if not isinstance(error, (PulseError, OSError, ValueError)):
            log.exception("%s cannot be shown", source.name)
        page, reason = Page(source.name, ""), f"{UNREADABLE}: {type(error).__name__}: {one_line(error)}"
        page.points([reason], alarm=True)
        return page, Glance(source.name, [HistoryLine(source.name, None, None, None, UNREADABLE, ())], reason)


def _look(source: Watched) -> tuple[Page, list[bytes], list[HistoryLine], float]:
    """The page of a source, its blocks encoded, its lines, and the processor seconds that it took."""
    began = time.thread_time()
    page, glance = look_at(source)
    return page, _encoded(page.blocks), glance.lines, time.thread_time() - began


def _encoded(blocks: Sequence[PageBlock]) -> list[bytes]:
    """Each as the end of a JSON array."""
    return [msgspec.json.encode(block)[1:] for block in blocks]


def _row(line: HistoryLine) -> list[str]:
    came = "–" if line.age_s is None else f"{seconds(line.age_s)} ago"
    return [line.of, line.verdict, or_dash(line.version), came, or_dash(line.behind)]


def or_dash(number: int | None) -> str:
    """A number in a table."""
    return "–" if number is None else f"{number:,}"


def _event(sent: Sequence[bytes], now: Sequence[bytes]) -> bytes:
    """What makes a reader that was sent these blocks show those; a comment where they are the same."""
    changed = [b"[%d,%b" % (at, block) for at, block in enumerate(now) if at >= len(sent) or block != sent[at]]
    if not changed and len(now) == len(sent):
        return b":\n\n"
    return b'data: {"count":%d,"blocks":[%b]}\n\n' % (len(now), b",".join(changed))


@asynccontextmanager
async def serving(sources: Sequence[Watched], host: str, port: int) -> AsyncIterator[str]:
    """Serve the page in the block. Yields its address, with the token where it has one. port: 0 for any free one.

    Raises MissingExtraError without the extra `watch`, OSError for a port that is taken.
    """
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    page = LivePage(sources, token)
    web = require("aiohttp.web", "watch")
    runner = web.AppRunner(page.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address, bound = runner.addresses[0][:2]
        name = f"[{address}]" if ":" in address else address
        yield f"http://{name}:{bound}/" + (f"?token={token}" if token else "")
    finally:
        await runner.cleanup()
