"""One SGLang engine over HTTP: its service runs in this process, on SGLang's own routes.

Each order is a weight update of SGLang's, in a session, with generation paused: SGLang would otherwise wait until the
running requests have ended. An order that writes nothing takes milliseconds, and running requests go on afterwards
with what they have cached.
"""

from __future__ import annotations

import json
import secrets
import socket
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch.distributed as dist

from pulse_rl.documents import convert, decode_json
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.http import Server, no_answer
from pulse_rl.engines.ranks import Applied, Outside, RankState, is_stopped
from pulse_rl.engines.service import Local
from pulse_rl.engines.states import PauseMode
from pulse_rl.errors import EngineError, FormatError, one_line, printable
from pulse_rl.integrations.sglang.orders import Order, await_answers, payload

LOADER = "pulse_rl.integrations.sglang.load"
TIMEOUT_S = 60.0
_LOOKS_S = (0.05, 1.0)  # each pauses the engine for milliseconds
_MOST_RANKS = 4096  # that an engine may say it has


class SGLangEngine(EngineClient):
    """One SGLang engine that was started with `--custom-weight-loader pulse_rl.integrations.sglang.load`.

    One client at a time: SGLang takes one weight update at a time. If a client dies while it has paused the engine, the
    next one's first call lets it go on. `follow` waits until the engine has found its weights. SGLang cannot pause with
    "wait". With "keep", requests are prefilled again where caches are reset. The engine's `weight_version` becomes the
    version when that is proved, before it goes on.

    Args:
        url: The engine's address, as "http://host:30000".
        api_key: The key that the engine was started with; None: none.
        reply_host: The address of this machine as the engine's ranks reach it: they answer to a port that torch's
            TCPStore opens here. None: the address from which this machine reaches the engine.
        timeout: Seconds that an answer may take, all of it.

    Raises:
        ValueError: The address is none.
        MissingExtraError: The extra `follow` is not installed.

    Attributes:
        url: The engine's address.
    """

    _follow_waits = True

    def __init__(
        self, url: str, *, api_key: str | None = None, reply_host: str | None = None, timeout: float = TIMEOUT_S
    ) -> None:
        engine = _Engine(Server(url, api_key), reply_host, timeout)
        super().__init__(Local(engine, engine.url, _LOOKS_S), timeout=timeout)


class _Engine:
    """SGLang as `engines.service.Engine`."""

    def __init__(self, server: Server, reply_host: str | None, timeout: float) -> None:
        self._server, self._host, self._timeout = server, reply_host, timeout
        self.url = server.url
        self._store: Any = None  # of torch, which takes the answers
        self._ranks: int | None = None
        self._paused = False  # by `pause`, or as the weights are of no version
        self._resets = False  # caches, with the write
        # A write has failed: what the engine holds is not known, or its caches are those of the old weights.
        self._stale = False

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Order it, in a pause of its own where there is none. A torn engine stays paused."""
        during, writes = "reach" if verb == "state" else verb, verb == "apply"
        paused = writes and self._paused
        if not paused:
            self._ask(during, "pause_generation", {"mode": "in_place"})
        self._stale |= writes  # until all ranks have answered
        stopped = self._stale
        try:
            found = self._order(during, verb, arguments)
            if writes:
                applied = [convert(rank, Applied) for rank in found]
                self._stale, stopped = False, is_stopped([rank.state for rank in applied])
                return applied
            ranks = [convert(rank, RankState) for rank in found]
            stopped = self._stale or is_stopped(ranks)
            return [msgspec.structs.replace(rank, stopped=rank.stopped or self._stale) for rank in ranks]
        except EngineError as error:
            error.paused = stopped or None
            raise
        finally:
            self._paused = paused or stopped
            if not self._paused:
                self._ask("resume", "continue_generation", {})

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        modes = {"keep": "retract" if reset_caches else "in_place", "abort": "abort"}
        if mode not in modes:
            raise ValueError(f"pause: expected 'keep' or 'abort', as SGLang has no other, found {mode!r}")
        self._ask("apply", "pause_generation", {"mode": modes[mode]})
        self._paused, self._resets = True, reset_caches

    async def resume(self, version: str | None = None) -> None:
        if version is not None:
            await self.report(version)
        self._ask("resume", "continue_generation", {})
        self._paused = False

    async def report(self, version: str) -> None:
        self._ask("apply", "update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def outside(self) -> Outside:
        info = self._ask("reach", "model_info", None)
        return Outside(str(info.get("model_path", "")), self._paused, str(info.get("weight_version", "")))

    def _order(self, during: str, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Send an order to all ranks. Returns their answers. The engine is paused."""
        if self._ranks is None:
            ranks = self._ask("reach", "server_info", None).get("tp_size")
            if type(ranks) is not int or not 0 < ranks <= _MOST_RANKS:
                raise EngineError(
                    f"{self.url}: expected a number of ranks as tp_size in /server_info, found {printable(str(ranks))}",
                    url=self.url,
                    during=during,
                )
            self._ranks = ranks
        host, store = self._replies()
        order = Order(verb, secrets.token_hex(8), host, store.port, arguments)
        begin = {"selector": "target"}
        try:
            self._ask(during, "begin_weight_update", begin)
        except EngineError as error:
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            # A client that died has left its session open.
            self._ask(during, "end_weight_update", {})
            self._ask(during, "begin_weight_update", begin)
        try:
            self._ask(
                during,
                "update_weights_from_tensor",
                {
                    "serialized_named_tensors": [payload(order)] * self._ranks,
                    "load_format": LOADER,
                    "flush_cache": verb == "apply" and self._paused and self._resets,
                    "selector": "target",
                },
            )
        finally:
            self._ask(during, "end_weight_update", {})
        try:
            found = await_answers(store, order, self._ranks, self._timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}: was it started with --custom-weight-loader {LOADER}, and do its ranks reach "
                f"{host}:{store.port}?"
            ) from None
        for rank, answer in enumerate(found):
            if answer.failure is not None:
                raise RuntimeError(f"rank {rank}: {printable(answer.failure)}")
        return [answer.found for answer in found]

    def _replies(self) -> tuple[str, Any]:
        """Where ranks answer to: this machine's address, and a TCPStore there."""
        if self._host is None:
            parts = urlsplit(self.url)
            address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            with socket.create_connection(address, timeout=self._timeout) as connection:
                self._host = str(connection.getsockname()[0])
        if self._store is None:
            self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return self._host, self._store

    def _ask(self, during: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One request. Raises EngineError."""
        data = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        status, found = self._server.ask(during, method, f"/{route}", data, self._timeout)
        if status != HTTPStatus.OK:
            text = f"answers {status} to {route}: {printable(found[:2000].decode(errors='replace'))}"
            raise no_answer(self.url, during, text, status)
        try:
            decoded = decode_json(found, object, "its answer")
        except FormatError as error:
            text = f"answers, but not as SGLang does: {one_line(error, 500)}"
            raise no_answer(self.url, during, text, status) from error
        return decoded if isinstance(decoded, dict) else {}
