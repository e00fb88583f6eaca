"""The HTTP routes of a vLLM server that follows a history: `engines.service`, on vLLM's own app.

vLLM attaches them as an endpoint plug-in. Those below /v1 want the server's API key where it has one. The workers of
all replicas are asked: of several, vLLM's own `EngineClient.collective_rpc` returns the answers of the first alone.
"""

import asyncio
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from pulse_rl.engines.ranks import Outside
from pulse_rl.engines.service import READY, Handler, Service
from pulse_rl.engines.states import ROUTES, VERBS, PauseMode, method
from pulse_rl.integrations.vllm.local import METHOD, add_start_hint
from pulse_rl.integrations.vllm.server import Gate, is_gated, quiet
from pulse_rl.watch import to_prometheus

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class _Engine:
    """vLLM as `engines.service.Engine`."""

    def __init__(self, client: "EngineClient", model: str) -> None:
        self._client, self._model = client, model

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        with add_start_hint():
            replicas = await self._of_each("collective_rpc", METHOD, None, (verb, arguments), None)
        return [answer for workers in replicas for answer in workers]

    async def _of_each(self, what: str, *arguments: Any) -> list[Any]:
        """What the core of each replica answers."""
        found: list[Any] = await self._client.engine_core.call_utility_all_async(what, *arguments)
        return found

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        """As vLLM's `pause_generation`, without its end.

        When the engine stands, that waits 20 ms more, so that clients have their last outputs before it returns. Here
        nobody waits for them, and for so long nothing would be generated.
        """
        if reset_caches:
            await self._client.renderer.clear_mm_cache_async()
        await self._client.engine_core.pause_scheduler_async(mode=mode, clear_cache=reset_caches)

    async def resume(self, version: str | None = None) -> None:
        """The core does what it is sent in order: it has the version before it goes on, and nobody waits in between."""
        told = [] if version is None else [self.report(version)]
        await asyncio.gather(*told, self._client.resume_generation())

    async def report(self, version: str) -> None:
        await self._client.update_weight_version(version)

    async def outside(self) -> Outside:
        paused, versions = [await self._of_each(what) for what in ("is_scheduler_paused", "get_weight_version")]
        return Outside(self._model, any(paused), versions[0] if len(set(versions)) == 1 else "")


class PulseRoutes:
    """The plug-in of the server: vLLM's `EndpointPlugin`."""

    name = "pulse"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._service: Service | None = None
        self._answers: dict[tuple[str, str], Handler] = {}

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. vLLM calls it once."""
        quiet()
        if is_gated():
            app.add_middleware(Gate, is_open=self._caught_up)
        for verb, path in _PATHS:
            app.add_api_route(path, self._handler(verb, path), methods=[verb], name=path.strip("/"))

    async def init_state(self, engine_client: "EngineClient | None", state: object, args: Namespace) -> None:
        """Take the engine. vLLM calls it once, before the server answers."""
        if engine_client is not None:
            self._service = Service(
                _Engine(engine_client, str(args.model)), f"http://{socket.gethostname()}:{args.port}"
            )
            to_prometheus()  # in the registry that vLLM's /metrics shows
            self._answers = self._service.routes()

    async def _caught_up(self) -> bool:
        return self._service is not None and await self._service.is_ready()

    def _handler(self, method: str, path: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            status, body = await self._answers[method, path](await request.body())
            return Response(body, status, media_type="application/json")

        return handle


_PATHS = (("GET", READY), *((method(verb), f"{ROUTES}/{verb}") for verb in VERBS))
