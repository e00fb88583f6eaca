"""What the plug-in changes at vLLM's HTTP server, beside its own routes.

- The looks of drivers and load balancers, one a second, are left out of uvicorn's access log.
- With PULSE_RL_GATE=1 the server refuses requests with 503 until it was brought to a version since it was started. A
  server that was started again has the weights that it was started on, and not every client asks /pulse/ready. Not
  refused is what reads alone, and what brings the weights. Once it is open, the gate stays so.

It knows ASGI, and neither vLLM nor FastAPI.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pulse_rl.engines.service import READY, UNREADY
from pulse_rl.engines.states import ROUTES

VARIABLE = "PULSE_RL_GATE"
_LOOKS = (READY, f"{ROUTES}/state")
_BRINGS = (  # vLLM's routes for trainers
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/update_weight_version", "/shutdown_weight_transfer_engine", "/weight_checker", "/pause", "/resume"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/collective_rpc"),
)
_REFUSAL = {"error": {"message": "the server has not been brought to a version yet: ask again", "code": UNREADY}}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def is_gated() -> bool:
    """Whether the environment asks for the gate."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


class Gate:
    """Lets requests pass to an app when it is open. is_open: whether the engine was brought to a version."""

    def __init__(self, app: App, is_open: Callable[[], Awaitable[bool]]) -> None:
        self._app, self._is_open, self._stays_open = app, is_open, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._stays_open and _generates(scope):
            self._stays_open = await self._is_open()
            if not self._stays_open:
                await _refuse(scope, send)
                return
        await self._app(scope, receive, send)


def _generates(scope: Message) -> bool:
    """Whether a request may be answered from the weights: what is not known may."""
    if scope["type"] != "http":
        return bool(scope["type"] == "websocket")
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") and not (path in _BRINGS or path.startswith(f"{ROUTES}/"))


async def _refuse(scope: Message, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013})  # try again later
        return
    body = json.dumps(_REFUSAL).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": UNREADY, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _NotLooks(logging.Filter):
    """Keeps looks out of uvicorn's access log, whose records hold the client, the method and the path."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = record.args
        if not isinstance(found, tuple) or len(found) < 3:
            return True
        return found[1] != "GET" or str(found[2]).partition("?")[0] not in _LOOKS


def quiet() -> None:
    """Leave looks out of the access log of this process."""
    logging.getLogger("uvicorn.access").addFilter(_NotLooks())
