"""A proxy between a client and a real S3 server that fails chosen requests as networks and services do.

It forwards every request unchanged (with the Host that its signature covers), except those of a `Fault`. Faults are
drawn by seed; `Line` in `servers` is simpler: a connection that can be cut.
"""

import http.client
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple

import numpy as np

What = (
    Literal[
        "drop",  # the connection ends before the server receives the request
        "lose",  # the server acts on the request, the connection ends before its response
        "truncate",  # the connection ends in the middle of the body, of the request if it has one, else of the response
        "shorten",  # half of that body is forwarded as if it were all
        "corrupt",  # one bit of that body is flipped
        "delay",  # the request is forwarded after `seconds`
        "hold",  # the request is forwarded when the test releases it
        "twice",  # the server gets the request twice; the client gets the second response
    ]
    | int  # this HTTP status is the response, and the server never gets the request
)

# With the codes and messages of S3.
STATUSES = {
    200: ("InternalError", "We encountered an internal error. Please try again."),  # once S3 has begun to respond
    403: ("RequestTimeTooSkewed", "The difference between the request time and the current time is too large."),
    404: ("NoSuchKey", "The specified key does not exist."),
    409: ("ConditionalRequestConflict", "A conflicting conditional operation is in progress."),
    412: ("PreconditionFailed", "At least one of the pre-conditions you specified did not hold."),
    429: ("TooManyRequests", "Please reduce your request rate."),
    500: ("InternalError", "We encountered an internal error. Please try again."),
    503: ("SlowDown", "Please reduce your request rate."),
}
# Headers that concern one connection, or that are written again.
OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass
class Fault:
    """What goes wrong, and with which requests.

    method: "" for any. path: a part of the request's path or query; listings have "list-type=2", where "/" in the
    prefix is written "%2F". rate: the share of those requests. times: at most this many of them.
    """

    what: What
    method: str = ""
    path: str = ""
    rate: float = 1.0
    times: float = float("inf")
    seconds: float = 0.2  # of "delay"
    hits: int = 0  # how often it has happened
    reached: threading.Event = field(default_factory=threading.Event)  # of "hold": set when a request is held
    release: threading.Event = field(default_factory=threading.Event)  # of "hold": set by the test


class Response(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Proxy(ThreadingHTTPServer):
    """Listens on `port` and forwards requests to a server on another port; `faults` may be set at any time."""

    def __init__(self, upstream: int, seed: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port: int = self.server_address[1]
        self.faults: list[Fault] = []
        self._upstream = upstream
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        for fault in self.faults:
            fault.release.set()
        self.shutdown()
        self.server_close()

    def draw(self, method: str, path: str) -> tuple[Fault | None, int]:
        """The fault of a request, None for most; and a number to choose a bit by."""
        with self._lock:
            for fault in self.faults:
                chosen = fault.method in ("", method) and fault.path in path and fault.hits < fault.times
                if chosen and self._random.random() < fault.rate:
                    fault.hits += 1
                    return fault, int(self._random.integers(1 << 62))
        return None, 0

    def forward(self, request: BaseHTTPRequestHandler, body: bytes) -> Response:
        """The response of the server to a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream)
        try:
            connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in OF_THE_CONNECTION:
                    connection.putheader(name, value)
            if body or request.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in OF_THE_CONNECTION]
            return Response(response.status, headers, response.read())
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    """One client's connection."""

    server: Proxy
    protocol_version = "HTTP/1.1"  # connections are kept open
    disable_nagle_algorithm = True  # else a response's second write waits 40 ms for the first's acknowledgement

    def do_GET(self) -> None:
        with suppress(OSError):  # a client that has given up
            self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self, body: bytes) -> None:
        fault, number = self.server.draw(self.command, self.path)
        what = fault.what if fault else None
        if isinstance(what, int):
            code, message = STATUSES[what]
            xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
            return self._respond(Response(what, [("Content-Type", "application/xml")], xml.encode()))
        if what == "drop" or (what == "truncate" and body):  # no service stores a part of an upload
            return self._hang_up()
        if fault and what == "delay":
            time.sleep(fault.seconds)
        if fault and what == "hold":
            fault.reached.set()
            fault.release.wait()
        if what == "twice":
            self.server.forward(self, body)
        response = self.server.forward(self, _changed(body, what, number))
        if what == "lose":
            return self._hang_up()
        if body:
            return self._respond(response)
        if what == "truncate":
            return self._respond(response, response.body[: len(response.body) // 2])
        return self._respond(response._replace(body=_changed(response.body, what, number)))

    def _respond(self, response: Response, part: bytes | None = None) -> None:
        """Send a response; with a part of its body, end the connection after that."""
        self.send_response_only(response.status)
        for name, value in response.headers:
            self.send_header(name, value)
        if response.status != 204:
            self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body if part is None else part)
        if part is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _changed(body: bytes, what: What | None, number: int) -> bytes:
    if what == "shorten":
        return body[: len(body) // 2]
    if what == "corrupt" and body:
        other = bytearray(body)
        other[number % len(body)] ^= 1 << (number >> 40) % 8
        return bytes(other)
    return body
