"""Servers that answer slowly, hugely, brokenly or not at all: each call ends in time, with an EngineError."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pulse_rl.engines import http
from pulse_rl.engines.client import EngineClient
from pulse_rl.errors import EngineError
from pulse_rl.integrations.sglang import SGLangEngine
from tests.engines.world import SmallEngine

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
OK = b'{"instance":"a","model":"m"}'
Answer = Callable[[socket.socket], None]  # to a request


class Raw:
    """A server that writes what a test wants, whatever it is asked. requests: the heads of what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.requests, self.open = answer, list[bytes](), 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._one, args=(self._socket.accept()[0],), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        self.open += 1
        with contextlib.suppress(OSError), connection:
            self.requests.append(connection.recv(65536))
            self.answer(connection)
        self.open -= 1

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[Raw]:
    with contextlib.closing(Raw(answer)) as found:
        yield found


def whole(body: bytes, head: bytes = HEAD) -> Answer:
    """An answer in one piece."""
    return lambda connection: connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def dripping(at_once: bytes, then: bytes) -> Answer:
    """An answer whose end comes byte by byte, without end."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(at_once)
        while True:
            for byte in then:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)

    return answer


def silent(connection: socket.socket) -> None:
    connection.recv(1)  # until the client goes


def endless(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


@pytest.mark.parametrize(
    "answer",
    [
        dripping(HEAD + b"Content-Length: 1000\r\n\r\n", b" "),
        dripping(HEAD + b"\r\n" + OK, b" "),  # JSON already, and the connection is its end
        dripping(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        dripping(b"HTTP/1.1 200 OK\r\nX-Long: ", b"a"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        silent,
    ],
    ids=["body", "body without a length", "chunks", "head", "interim answers", "nothing"],
)
def test_no_answer_outlives_its_deadline(answer: Answer) -> None:
    with serving(answer) as server:
        start = time.monotonic()
        with pytest.raises(EngineError, match=r"has not answered within 0\.4 s") as caught:
            EngineClient(server.url, timeout=0.4).state()
        assert time.monotonic() - start < 2
        assert (caught.value.status, caught.value.temporary) == (None, True)
        deadline = time.monotonic() + 5
        while server.open:  # the connection is closed, so nothing goes on behind the error
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_handshake_that_does_not_end_is_cut_off() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x40\x00")  # a record of TLS, 16 KB long
        dripping(b"", b"\x00")(connection)

    with serving(answer) as server:
        start = time.monotonic()
        with pytest.raises(EngineError, match="has not answered within"):
            EngineClient(server.url.replace("http", "https"), timeout=0.4).state()
        assert time.monotonic() - start < 5  # certificates are loaded before


def test_an_answer_that_is_too_large_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_NBYTES", 1 << 20)
    with serving(endless) as server, pytest.raises(EngineError, match="answers with more than 1 MB"):
        EngineClient(server.url).state()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"\xff"',
        b'{"instance":1,"model":"m"}',
        b'{"instance":"a","model":"m","version":"3"}',
        b'{"instance":"a","model":"m","version":1e99}',
        b'{"instance":"a","model":"m","more":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"instance":"a","model":"m","phase":"asleep"}',
    ],
    ids=range(10),
)
def test_json_that_is_broken_or_of_another_type_is_refused(body: bytes) -> None:
    for status in (200, 409):
        with serving(whole(body, HEAD.replace(b"200", b"%d" % status))) as server:
            with pytest.raises(EngineError) as caught:
                EngineClient(server.url).state()
            assert (caught.value.status, caught.value.temporary) == (status, False)
            assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_as_the_key_would_go_along(status: int) -> None:
    with serving(whole(OK)) as other:
        head = HEAD.replace(b"200", b"%d" % status) + b"Location: %s/v1/pulse/state\r\n" % other.url.encode()
        with serving(whole(b"", head)) as server:
            with pytest.raises(EngineError, match="give the address of the engine itself") as caught:
                EngineClient(server.url, api_key="secret").state()
            assert caught.value.status == status
            assert b"secret" in server.requests[0]
            assert other.requests == []


def test_words_of_an_engine_are_printable_and_short() -> None:
    failure = {"during": "stage", "kind": "\x1b[2J" + "k" * 9000, "message": "\x1b[31m" + "m" * 9_000_000}
    body = json.dumps({"failure": failure, "state": json.loads(OK)}).encode()
    with serving(whole(body, HEAD.replace(b"200", b"500"))) as server:
        with pytest.raises(EngineError) as caught:
            EngineClient(server.url).state()
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("body", [b"{}", b"[]", b"{", b'{"tp_size":"2"}', b'{"tp_size":1000000000}', b'{"tp_size":0}'])
def test_what_is_no_server_of_sglang_is_refused(body: bytes) -> None:
    with serving(whole(body)) as server, pytest.raises(EngineError) as caught:
        SGLangEngine(server.url + "/v1", timeout=2).state()
    assert caught.value.url == server.url


def test_the_address_of_an_engines_api_is_the_engines() -> None:
    with contextlib.closing(SmallEngine()) as engine:
        for slip in ("/v1", "/v1/", "/", ""):
            client = EngineClient(engine.url + slip)
            assert client.url == engine.url
            assert client.state().model == "small"
