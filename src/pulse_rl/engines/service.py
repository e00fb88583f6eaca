"""What an engine answers over HTTP, whatever engine it is: what it holds, stage, apply, and whether it may get traffic.

    GET  /v1/pulse/state     what it holds and does
    POST /v1/pulse/follow    which history to follow
    POST /v1/pulse/stage     stage a version, while requests are generated; returns at once
    POST /v1/pulse/apply     pause, write what is staged, go on
    POST /v1/pulse/verify    recount the live weights; returns at once
    POST /v1/pulse/resume    go on after a pause
    GET  /pulse/ready        for load balancers: 200 or 503

A pause begins and ends in one request. The engine's processes do the work: a route calls the `EngineReceiver` of each,
all at once. An `Engine` says how an engine pauses and how its processes are called; the HTTP server is the engine's.

An engine whose server takes no routes of ours, or that has no server, has its service in the client's process: `Local`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from pulse_rl.documents import convert, decoder
from pulse_rl.engines.ranks import Applied, Outside, RankState, is_stopped, merge
from pulse_rl.engines.states import (
    BUSY,
    ROUTES,
    VERBS,
    During,
    EngineReport,
    EngineState,
    ErrorBody,
    Failure,
    Follow,
    PauseMode,
    Prepared,
    failure_of,
    method,
    not_staged,
)
from pulse_rl.errors import EngineError, one_line
from pulse_rl.logs import logger
from pulse_rl.observers import tell

if TYPE_CHECKING:
    from pulse_rl.engines.receiver import EngineReceiver  # it compiles kernels, and clients import this

log = logger(__name__)

READY = "/pulse/ready"  # without the engine's API key
OK, BAD, CONFLICT, FAILED, UNREADY = 200, 400, 409, 500, 503

T = TypeVar("T")
Answer = tuple[int, bytes]  # an HTTP status, and JSON
Handler = Callable[[bytes], Coroutine[Any, Any, Answer]]  # of a request's body


class Engine(Protocol):
    """What a service needs of an engine. Each raises what went wrong in it, or EngineError: it is out of reach."""

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        """Call the receivers of all processes, in their engine's thread (`serve`). Returns their answers, by rank."""

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        """Pause generation."""

    async def resume(self, version: str | None = None) -> None:
        """Go on. version: what it says from then on, as by `report`; None: what it says already."""

    async def report(self, version: str) -> None:
        """Make the engine say this version from now on, in its own way."""

    async def outside(self) -> Outside:
        """What it says besides: its model, whether it is paused, and the version that it was made to say."""


def serve(receiver: EngineReceiver, verb: str, arguments: dict[str, Any]) -> Any:
    """One call of a receiver, in the engine's thread. Returns a RankState, or for "apply" an Applied, as plain data."""
    verbs: dict[str, Callable[[], RankState | Applied]] = {
        "state": receiver.state,
        "follow": lambda: receiver.follow(convert(arguments, Follow)),
        "stage": lambda: receiver.stage(arguments["version"]),
        "verify": receiver.verify,
        "apply": lambda: receiver.apply(arguments["version"]),
    }
    return msgspec.to_builtins(verbs[verb]())


class StageRequest(msgspec.Struct, frozen=True):
    """The body of /stage."""

    version: int | None = None


class ApplyRequest(msgspec.Struct, frozen=True):
    """The body of /apply."""

    version: int | None = None
    pause: PauseMode = "keep"
    reset_caches: bool = True


class _RefusedError(Exception):
    """A request is not carried out."""

    def __init__(self, status: int, failure: Failure, state: EngineState | None = None) -> None:
        super().__init__(failure.message)
        self.status, self.failure = status, failure
        self.state = state or EngineState(instance="", model="")  # nothing is known


class Service:
    """The answers of one engine.

    url: its address in what observers of this process get; None where its client reports to them, in the same process.
    """

    def __init__(self, engine: Engine, url: str | None = None) -> None:
        self._engine, self.url = engine, url
        self._updating = asyncio.Lock()  # one of follow, stage, apply, verify, resume at a time

    async def answer(self, verb: str, body: bytes) -> Answer:
        """What it answers to a verb: JSON, and for what it refuses the state after it."""
        verbs: dict[str, Callable[[bytes], Awaitable[msgspec.Struct]]] = {
            "state": self._look,
            "follow": self._follow,
            "stage": self._stage,
            "apply": self._apply,
            "verify": self._verify,
            "resume": self._resume,
        }
        try:
            found = await verbs[verb](body)
        except _RefusedError as error:
            self._tell(error.failure)
            return _json(ErrorBody(error.failure, error.state), error.status)
        self._tell(found)
        return _json(found)

    def _tell(self, found: object) -> None:
        if self.url is not None:
            tell(self, found)

    def routes(self) -> dict[tuple[str, str], Handler]:
        """What answers a method and a path."""
        found = {(method(verb), f"{ROUTES}/{verb}"): self._answering(verb) for verb in VERBS}
        return {**found, ("GET", READY): self._ready}

    async def is_ready(self) -> bool:
        """Whether the engine may get requests. It may not where it fails to say so."""
        status, _ = await self._ready(b"")
        return status == OK

    def _answering(self, verb: str) -> Handler:
        async def handle(body: bytes) -> Answer:
            # A client that goes away cancels nothing: the engine must not stay in a pause.
            return await asyncio.shield(asyncio.ensure_future(self.answer(verb, body)))

        return handle

    async def _look(self, _: bytes) -> EngineState:
        return await self._state(await self._call("follow", "state", RankState))

    async def _follow(self, request: bytes) -> EngineState:
        wanted = _body(request, Follow, "follow")
        async with self._updating:
            return await self._state(
                await self._call("follow", "follow", RankState, msgspec.to_builtins(wanted)),
            )

    async def _stage(self, request: bytes) -> EngineState:
        wanted = _body(request, StageRequest, "stage")
        async with self._updating:
            ranks = await self._idle("stage")
            state = await self._state(ranks)
            if state.prepared is not None and wanted.version == state.prepared.version:
                return state
            return await self._state(await self._call("stage", "stage", RankState, {"version": wanted.version}))

    async def _verify(self, _: bytes) -> EngineState:
        async with self._updating:
            await self._idle("verify")
            return await self._state(await self._call("verify", "verify", RankState))

    async def _resume(self, _: bytes) -> EngineState:
        async with self._updating:
            ranks = await self._call("apply", "state", RankState)
            if is_stopped(ranks):
                failure = Failure("apply", "RuntimeError", "the weights are of no version: only an update repairs them")
                raise _RefusedError(CONFLICT, failure, await self._state(ranks))
            await self._attempt("apply", self._engine.resume())
            return await self._state(ranks)

    async def _apply(self, request: bytes) -> EngineReport:
        wanted = _body(request, ApplyRequest, "apply")
        async with self._updating:
            ranks = await self._idle("apply")
            before = await self._state(ranks)
            staged, why = before.prepared, before.failure
            if staged is None or wanted.version not in (None, staged.version):
                if why is None or why.during not in ("follow", "stage"):  # else that is why nothing is staged
                    why = failure_of("apply", not_staged(wanted.version, staged.version if staged else None))
                raise _RefusedError(CONFLICT, why, before)
            return await self._apply_staged(wanted, staged, ranks, before)

    async def _apply_staged(
        self, wanted: ApplyRequest, staged: Prepared, ranks: list[RankState], before: EngineState
    ) -> EngineReport:
        """Pause, write, go on. Who had paused the engine before, resumes it; except where a failed apply has."""
        engine, stopped = self._engine, is_stopped(ranks)
        pauses = staged.route != "none" or stopped
        start = drained = time.perf_counter()
        if pauses:
            try:
                await self._attempt("apply", engine.pause(wanted.pause, wanted.reset_caches))
            except _RefusedError:
                if not before.paused:
                    await engine.resume()
                raise
            drained = time.perf_counter()
        try:
            applied = await self._call("apply", "apply", Applied, {"version": staged.version})
        except _RefusedError as error:
            error.state = EngineState(instance="", model=before.model, paused=pauses or before.paused)
            raise
        ranks = [each.state for each in applied]
        after = merge(ranks, Outside(before.model, pauses, before.weight_version))
        version = None if after.version is None else str(after.version)
        if pauses and not is_stopped(ranks) and (stopped or not before.paused):
            await self._attempt("apply", engine.resume(version))
        elif version is not None:
            await self._attempt("apply", engine.report(version))
        end = time.perf_counter()
        if after.failure is not None:
            raise _RefusedError(FAILED, after.failure, await self._state(ranks))
        return EngineReport(
            version=staged.version,
            previous=before.version,
            digest=staged.digest,
            route=staged.route,
            changes=staged.changes,
            fetched_nbytes=staged.fetched_nbytes,
            stage_s=staged.stage_s,
            drain_s=drained - start,
            apply_s=max(each.seconds for each in applied),
            pause_s=end - drained if pauses else 0.0,
            pause=wanted.pause,
            reset_caches=wanted.reset_caches and pauses,
        )

    async def _ready(self, _: bytes) -> Answer:
        """Whether a load balancer may send requests: 200, or 503 before it has caught up and while it is paused."""
        try:
            state = await self._state(await self._call("follow", "state", RankState))
        except _RefusedError as error:
            return _json({"ready": False, "version": None, "reason": error.failure.message}, UNREADY)
        return _json({"ready": state.ready, "version": state.version}, 200 if state.ready else UNREADY)

    async def _idle(self, during: During) -> list[RankState]:
        """The workers' states. Refuses while they work."""
        ranks = await self._call(during, "state", RankState)
        if any(rank.working for rank in ranks):
            failure = Failure(during, BUSY, "the engine is at work for another call: ask again", temporary=True)
            raise _RefusedError(CONFLICT, failure, await self._state(ranks))
        return ranks

    async def _state(self, ranks: list[RankState]) -> EngineState:
        return merge(ranks, await self._attempt("follow", self._engine.outside()))

    async def _call(self, during: During, verb: str, kind: type[T], arguments: dict[str, Any] | None = None) -> list[T]:
        """Call the method of all workers."""
        found = await self._attempt(during, self._engine.call(verb, arguments or {}))
        return [convert(each, kind) for each in found]

    async def _attempt(self, during: During, work: Awaitable[T]) -> T:
        """Await what the engine does. Its errors are answers too, but not that it is out of reach."""
        try:
            return await work
        except EngineError:
            raise
        except Exception as error:
            text = one_line(error)
            log.error("%s: the engine failed: %s", during, text)
            raise _RefusedError(FAILED, Failure(during, type(error).__name__, text)) from error


class Local:
    """The transport to a service in the client's process: one verb at a time, in the thread that asks.

    engine: does its work before it returns, and awaits nothing; so no event loop is needed, and a caller may have one.
    url: what messages call it. looks: as in `engines.client.Transport`.
    """

    def __init__(self, engine: Engine, url: str, looks: tuple[float, float]) -> None:
        self.url, self.looks = url, looks
        self._service, self._turn = Service(engine), threading.Lock()

    def send(self, verb: str, body: bytes, timeout: float) -> Answer:
        """Ask the service. The engine keeps its own timeouts. Raises EngineError if it is out of reach."""
        with self._turn:
            try:
                self._service.answer(verb, body).send(None)
            except StopIteration as ended:
                found: Answer = ended.value
                return found
            raise RuntimeError(f"{self.url}: {verb} awaits something, which a local engine must not")


def _body(request: bytes, kind: type[T], during: During) -> T:
    try:
        return decoder(kind).decode(request or b"{}")
    except msgspec.MsgspecError as error:
        raise _RefusedError(BAD, Failure(during, "ValueError", f"the request's body: {one_line(error)}")) from None


def _json(answer: object, status: int = OK) -> Answer:
    return status, msgspec.json.encode(answer)
