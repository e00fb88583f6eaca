"""A small engine behind HTTP, as real as the tests need: the plug-in's service, on a torch module in this process.

One thread is the engine: between two steps it does what the service calls, as vLLM's does. A step reads all weights.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

import pulse_rl as pulse
from pulse_rl.engines.adoption import prove
from pulse_rl.engines.ranks import Outside
from pulse_rl.engines.receiver import EngineReceiver
from pulse_rl.engines.service import Service, serve
from pulse_rl.engines.states import PauseMode
from pulse_rl.errors import UnmappedError
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.history import History
from pulse_rl.weights.layout import TensorSpec

SHAPES = {"up": (64, 33), "down": (33, 64), "norm": (33,)}


def fresh(seed: int = 0) -> dict[str, torch.Tensor]:
    """The weights that the trainer and every engine start with."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def moved(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """A trainer's step: a few elements change."""
    generator = torch.Generator().manual_seed(1000 + step)
    for weight in weights.values():
        flat = weight.view(-1)
        where = torch.randint(0, len(flat), (max(1, len(flat) // 50),), generator=generator)
        flat[where] += 1
    return weights


class HeldViews:
    """The published tensors, which this engine holds as they are."""

    ignored: tuple[str, ...] = ()

    def __init__(self, engine: SmallEngine) -> None:
        self._engine = engine

    def weights(self) -> dict[str, Any]:
        return self._engine.weights

    def prove(self, history: History, checkpoint: Path | None, ranks: Ranks | None) -> int | None:
        if self._engine.unmapped:
            raise UnmappedError("tensor 'up' is packed", name="up", reason="packed")
        if pulse.digest(self._engine.weights) == pulse.digest(fresh()):
            return None  # by its files
        return prove(self.weights(), {}, history, checkpoint, ranks or Ranks())

    def prove_derived(self) -> None:
        assert threading.current_thread().name != "pulse-rl"  # in the engine's thread

    def refresh(self) -> None:
        self._engine.refreshed += 1
        if self._engine.refresh_fails:
            raise UnmappedError("the cache of 'norm' cannot be rebuilt", name="norm", reason="planted")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class SmallEngine:
    """What a service needs of an engine, and the HTTP server before it."""

    def __init__(self, port: int = 0, replica: int = 0) -> None:
        self.weights = fresh()
        self.unmapped = self.refresh_fails = False
        self.refreshed, self.steps, self.pauses, self.resets = 0, 0, list[PauseMode](), 0
        self.broken: Callable[[str, str], bool] = lambda method, path: False  # whether to hang up instead of answering
        self.receiver = EngineReceiver(self._views, compiles=False, replica=replica)
        self._paused, self._version = False, "default"
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._routes = Service(self).routes()
        self._server = _Server(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        for work in (self._step, self._loop.run_forever, self._server.serve_forever):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """End it, as a kill would: nothing is tidied up."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def port(self) -> int:
        return self._server.server_port

    def _views(self, tensors: dict[str, TensorSpec], tied: dict[str, str]) -> HeldViews:
        if tensors.keys() != self.weights.keys():
            raise UnmappedError("the tensors of another model", reason="another model")
        assert threading.current_thread().name != "pulse-rl"  # in the engine's thread
        return HeldViews(self)

    def _step(self) -> None:
        while not self._ended.is_set():
            try:
                work, result = self._calls.get(timeout=0.001)
            except Empty:
                if not self._paused:
                    sum(weight.float().sum() for weight in self.weights.values())
                    self.steps += 1
                continue
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised by the caller
                result.set_exception(error)

    def between_steps(self, work: Callable[[], Any]) -> Future[Any]:
        """Do something in the engine's thread."""
        result: Future[Any] = Future()
        self._calls.put((work, result))
        return result

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        return [await asyncio.wrap_future(self.between_steps(lambda: serve(self.receiver, verb, arguments)))]

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        self.pauses.append(mode)
        self.resets += reset_caches
        self._paused = True

    async def resume(self, version: str | None = None) -> None:
        if version is not None:
            self._version = version
        self._paused = False

    async def report(self, version: str) -> None:
        self._version = version

    async def outside(self) -> Outside:
        return Outside("small", self._paused, self._version)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if engine._ended.is_set() or engine.broken(self.command, self.path):
                    self.close_connection = True
                    return
                route = engine._routes.get((self.command, self.path))
                status, found = 404, b'{"detail":"Not Found"}'
                if route is not None:
                    status, found = asyncio.run_coroutine_threadsafe(route(body), engine._loop).result()
                self.send_response(status)
                self.send_header("Content-Length", str(len(found)))
                self.end_headers()
                self.wfile.write(found)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def run(port: int) -> None:
    """Serve such an engine until the process is killed."""
    SmallEngine(port)
    threading.Event().wait()
