"""The gate before a server's app, and the access log that is spared the looks. The app is a function."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, cast

import pytest

from pulse_rl.engines.service import READY, Service
from pulse_rl.integrations.vllm import server
from pulse_rl.integrations.vllm.server import Gate, Message

GENERATE = ["/v1/completions", "/v1/chat/completions", "/generate", "/inference/v1/generate", "/v1/pulse", "/", "/new"]
PASS = ["/v1/pulse/follow", "/v1/pulse/stage", "/v1/pulse/apply", "/init_weight_transfer_engine", "/update_weights"]


class World:
    """A gate, and what it has let pass and sent."""

    def __init__(self) -> None:
        self.open, self.asked, self.passed, self.sent = False, 0, list[str](), list[Message]()
        self.gate = Gate(self._app, self._is_open)

    async def _app(self, scope: Message, receive: Any, send: Any) -> None:
        self.passed.append(scope.get("path", ""))

    async def _is_open(self) -> bool:
        self.asked += 1
        return self.open

    def ask(self, path: str, method: str = "POST", kind: str = "http", root: str = "") -> bool:
        """Whether a request passes."""

        async def send(message: Message) -> None:
            self.sent.append(message)

        async def receive() -> Message:
            raise AssertionError("the gate reads no body")

        before = len(self.passed)
        scope: Message = {"type": kind, "path": root + path, "root_path": root, "method": method}
        asyncio.run(self.gate(scope, receive, send))
        return len(self.passed) > before


def test_what_generates_is_refused_until_the_gate_opens_and_it_stays_open() -> None:
    world = World()
    for path in GENERATE:
        assert not world.ask(path)
    start, body = world.sent[:2]
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert json.loads(body["body"])["error"]["code"] == 503
    assert not world.ask("/v1/realtime", kind="websocket")
    assert world.sent[-1]["type"] == "websocket.close"
    assert world.asked == len(GENERATE) + 1
    world.open = True
    assert all(world.ask(path) for path in GENERATE)
    world.open = False  # as while a second run is opened, or generation is paused for a write
    assert all(world.ask(path) for path in GENERATE)
    assert world.asked == len(GENERATE) + 2


def test_what_reads_and_what_brings_the_weights_passes() -> None:
    world = World()
    assert all(world.ask(path) for path in PASS)
    assert all(world.ask(path, root="/api") for path in PASS)
    assert all(world.ask(path, method="GET") for path in (READY, "/health", "/v1/models", "/v1/pulse/state"))
    assert world.ask("", kind="lifespan")
    assert world.asked == 0


ROUTED = [path for _, path in Service(cast(Any, None)).routes()]


def test_all_routes_but_that_of_readiness_lie_where_engines_ask_for_their_api_key() -> None:
    assert [path for path in ROUTED if not path.startswith("/v1/")] == [READY]


@pytest.mark.parametrize(("key", "open"), [("", [READY]), ("wrong", [READY]), ("right", ROUTED)])
def test_vllm_guards_them(key: str, open: list[str]) -> None:
    """Its own middleware, before an app that answers everything."""
    authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
    passed, sent = list[str](), list[int]()

    async def app(scope: Message, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Message) -> None:
        sent.extend([message["status"]] if "status" in message else [])

    guarded = authenticate.AuthenticationMiddleware(app, ["right"])
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    for path in ROUTED:
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": headers}
        asyncio.run(guarded(scope, None, send))
    assert passed == open
    assert sent == [401] * (len(ROUTED) - len(open))


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
def test_the_gate_is_there_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(server.VARIABLE, value)
    assert server.is_gated() == (value in ("1", "yes"))


def test_looks_are_left_out_of_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    server.quiet()
    server.quiet()
    log = logging.getLogger("uvicorn.access")
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        for method, path in (
            ("GET", "/v1/pulse/state"),
            ("GET", "/v1/pulse/state?x=1"),
            ("GET", READY),
            ("POST", "/v1/pulse/follow"),
            ("GET", "/v1/models"),
        ):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", method, path, "1.1", 200)
        log.info("something else")
    found = [record.getMessage() for record in caplog.records]
    assert [text.partition('"')[2].partition(" HTTP")[0] for text in found] == [
        "POST /v1/pulse/follow",
        "GET /v1/models",
        "",
    ]
    for each in list(log.filters):
        log.removeFilter(each)
