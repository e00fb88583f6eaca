"""Requests to the server of an engine. Each has a deadline for its whole answer and a bound on its size.

A timeout of HTTPX is that of one read, so an answer that comes byte by byte would go on for ever: a timer ends its
connection. Only what the system needs to look up the host's name comes on top. No redirect is followed: the API key
would go along. No connection is kept, since an engine may be started again between two requests.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pulse_rl.engines.states import ROUTES, method
from pulse_rl.errors import EngineError, one_line, printable, require, without_secrets

if TYPE_CHECKING:
    import socket

MAX_NBYTES = 16 << 20  # of an answer
_API = "/v1"  # which clients of an engine's API have in their address


class Server:
    """An engine's server; the transport to a plug-in of pulse-rl in it.

    url: as "http://host:8000"; the /v1 of an API's address is left out. Raises ValueError for an address that is none,
    MissingExtraError without HTTPX.
    """

    looks = (0.02, 0.5)

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"engine: expected a URL as http://host:8000, found {printable(without_secrets(url))!r}")
        if "@" in parts.netloc:
            raise ValueError(f"engine: expected the key by api_key=, found one in the URL {without_secrets(url)}")
        self.url = url.rstrip("/").removesuffix(_API).rstrip("/")
        self._httpx: Any = require("httpx2", "follow")
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = self._httpx.Client(
            headers=headers,
            verify=parts.scheme == "https",  # loading certificates takes a while, and http needs none
            limits=self._httpx.Limits(max_keepalive_connections=0),
        )

    def send(self, verb: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        """Ask a route of the plug-in, as `ask`."""
        return self.ask(
            "reach" if verb == "state" else verb,
            method(verb),
            f"{ROUTES}/{verb}",
            None if verb == "state" else body,
            timeout,
        )

    def ask(self, during: str, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """Send one request. Returns the status and the body.

        during: what the engine is asked for. timeout: seconds until all of the answer must be there. Raises EngineError
        if it is not, or is too large, or redirects.
        """
        deadline = _Deadline(timeout)
        request: dict[str, Any] = {"content": body, "timeout": timeout, "extensions": {"trace": deadline.watch}}
        try:
            with deadline, self._client.stream(method, f"{self.url}{path}", **request) as answer:
                status, found = answer.status_code, bytearray()
                for chunk in answer.iter_raw():
                    found += chunk
                    if len(found) > MAX_NBYTES:
                        raise no_answer(self.url, during, f"answers with more than {MAX_NBYTES >> 20} MB", status)
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError) as error:
            late = deadline.passed or isinstance(error, self._httpx.TimeoutException)
            text = f"it has not answered within {timeout:g} s" if late else one_line(error)
            raise no_answer(self.url, during, f"is out of reach: {text}") from error
        if deadline.passed:  # an answer without a length ends where its connection does
            raise no_answer(self.url, during, f"is out of reach: it has not answered within {timeout:g} s")
        if answer.has_redirect_location:
            to = printable(answer.headers["location"][:300])
            advice = "a redirect is not followed, as the API key would go along: give the address of the engine itself"
            raise no_answer(self.url, during, f"answers {status} and redirects to {to}: {advice}", status)
        return status, bytes(found)


def no_answer(url: str, during: str, text: str, status: int | None = None) -> EngineError:
    """The error for an engine that did not answer as it should; temporary where it, or a proxy, says that it is away.

    status: of the answer; None where none came.
    """
    away = status in (None, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
    return EngineError(f"{url} {text}", url=url, during=during, status=status, temporary=away)


class _Deadline:
    """Ends the connection of a request when its time is over. HTTPX calls `watch` at each step."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None  # a second handle: HTTPX and TLS may close theirs
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def watch(self, event: str, found: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            with self._lock:
                self._connection = found["return_value"].get_extra_info("socket").dup()
            if self.passed:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self.passed = True
            if self._connection is not None:
                with suppress(OSError):  # the server may have ended it
                    self._connection.shutdown(2)  # of both directions

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
