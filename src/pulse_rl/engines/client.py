"""One engine, wherever it is: what it holds; stage while it generates, then apply in a short pause.

A `Service` answers: over HTTP in the engine's own process, which pauses, applies, proves and goes on in one request, so
a client that is killed in the middle leaves no engine paused. For an SGLang server and for an engine in the trainer's
process the service is in this one (`engines.service.Local`). What an engine holds is always asked of it, never
remembered here: it may have been started again in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.engines.http import Server, no_answer
from pulse_rl.engines.states import (
    BUSY,
    During,
    EngineReport,
    EngineState,
    ErrorBody,
    Failure,
    Follow,
    PauseMode,
    failed,
)
from pulse_rl.errors import EngineError, FormatError, one_line, printable
from pulse_rl.observers import tell
from pulse_rl.store.urls import as_path, is_url

TIMEOUT_S = 30.0  # of an answer that takes no work
APPLY_S = 600.0  # "wait" lasts as long as the longest request that runs
STAGE_S = 3600.0  # a first anchor over a slow line
_LEAST_S = 0.02  # that an apply is given, however late it is
_SLOWER = 1.2  # each look at an engine that works comes so much later than the one before

T = TypeVar("T")


def absolute(store: str | Path) -> str:
    """A store as another process finds it: its URL, or the whole path of a directory."""
    return str(store) if is_url(str(store)) else str(as_path(str(store)).absolute())


class Transport(Protocol):
    """What carries a verb to the service of one engine.

    url: the engine's address, or what messages call it. looks: seconds between two looks at an engine that works, the
    first and the longest: each costs the engine something.
    """

    @property
    def url(self) -> str: ...

    @property
    def looks(self) -> tuple[float, float]: ...

    def send(self, verb: str, body: bytes, timeout: float) -> tuple[int, bytes]:
        """Ask for a verb of `engines.states.VERBS`, with JSON. Returns the answer's HTTP status, and JSON.

        timeout: seconds for the whole answer. Raises EngineError if the engine is out of reach.
        """


class EngineClient:
    """One engine with the plug-in of pulse-rl.

    Safe to use from several threads, and from several processes: the engine takes one update at a time.

    Args:
        url: The engine's address, as "http://host:8000". The /v1 of an API's address is left out. Or a transport.
        api_key: The key that the engine was started with; None: none.
        timeout: Seconds that an answer without work may take, all of it: the engine answers between two of its steps.

    Raises:
        ValueError: The address is none.
        MissingExtraError: The extra `follow` is not installed.

    Attributes:
        url: The engine's address.
    """

    _follow_waits = False  # by default

    def __init__(self, url: str | Transport, *, api_key: str | None = None, timeout: float = TIMEOUT_S) -> None:
        self._transport = Server(url, api_key) if isinstance(url, str) else url
        self.url = self._transport.url
        self._timeout = timeout

    def state(self) -> EngineState:
        """Ask the engine what it holds.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It is out of reach, or has no plug-in.
        """
        return self._ask("state", EngineState)

    def follow(
        self,
        store: str | Path,
        *,
        cache: str | Path | None = None,
        public_key: str | Path | None = None,
        heartbeat: str | None = None,
        patience: float = 30.0,
        view: str | None = None,
        wait: bool | None = None,
        timeout: float = STAGE_S,
    ) -> EngineState:
        """Tell the engine which history to follow. It opens it and finds its weights while it goes on generating.

        Told the same again, it looks whether the store was begun anew, and else does nothing. Told another one, it goes
        on with the first until the other is opened and its tensors are found, and if that fails: `state` says why in
        `failure`, and a `stage` raises it.

        Args:
            store: The store's URL as the engine reaches it, or a directory.
            cache: A directory on the engine's host for one download per host; None: no cache.
            public_key: The path of a PEM file on the engine's host: a history that it did not sign is refused.
            heartbeat: An id under which the engine writes what it holds to the store, for `pulse-rl status`.
            patience: Seconds for which the engine tries a failing store again, before a stage fails.
            view: The view of the history to follow, whose anchor the engine was started on; None: as published.
            wait: Whether to wait until it has found its weights. None: `SGLangEngine` waits, others do not.
            timeout: Seconds to wait.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It is out of reach, or has no plug-in. If it was waited for: it cannot follow that in place.
            TimeoutError: It looks for its weights still.
        """
        wanted = Follow(
            store=absolute(store),
            cache=None if cache is None else str(cache),
            public_key=None if public_key is None else str(public_key),
            heartbeat=heartbeat,
            patience=patience,
            view=view,
        )
        state = self._ask("follow", EngineState, msgspec.to_builtins(wanted))
        if self._follow_waits if wait is None else wait:
            state = self._ended("follow", state, timeout)
            if state.failure is not None:
                raise failed(state.failure, state, self.url)
        return state

    def stage(self, version: int | None = None, *, wait: bool = True, timeout: float = STAGE_S) -> EngineState:
        """Fetch, decode and prove a version, while the engine generates. No weight is touched.

        Args:
            version: The version; None for the newest.
            wait: Whether to wait until it is staged. Otherwise ask `state` until its `phase` is "staged".
            timeout: Seconds to wait.

        Returns:
            What it holds; `prepared` says what is staged, or `failure` why it could not be, if it was not waited for.

        Raises:
            EngineError: It failed, or is out of reach, or was started again meanwhile. It goes on with its version.
            TimeoutError: It stages still.
        """
        start = time.monotonic()
        state = self._in_turn("stage", EngineState, {"version": version}, timeout)
        if not wait:
            return state
        state = self._ended("stage", state, timeout, start)
        if state.phase != "staged":
            raise failed(state.failure or Failure("stage", "RuntimeError", "nothing is staged"), state, self.url)
        return state

    def apply(
        self,
        version: int | None = None,
        *,
        pause: PauseMode = "keep",
        reset_caches: bool = True,
        timeout: float = APPLY_S,
    ) -> EngineReport:
        """Write the staged version: pause, scatter, prove, go on. On several ranks all write, or none.

        Args:
            version: The version that must be staged; None for whichever is.
            pause: What happens to requests that run: "keep" freezes them and goes on with them under the new weights;
                "wait" lets them end first; "abort" ends them.
            reset_caches: Whether to drop cached keys and values, which old weights have made. Without it, the
                engine answers from them: right only where a slight mixture of versions is wanted.
            timeout: Seconds to wait for the answer.

        Returns:
            What was done, and what it took.

        Raises:
            EngineError: Nothing is staged, or it is obsolete, or it failed. `version` and `paused` say what the
                engine holds then: its old version, or it stays paused until an update succeeds.
            TimeoutError: It is at work for another call still.
        """
        body = {"version": version, "pause": pause, "reset_caches": reset_caches}
        return self._in_turn("apply", EngineReport, body, timeout)

    def update(
        self, version: int | None = None, *, pause: PauseMode = "keep", reset_caches: bool = True
    ) -> EngineReport:
        """Stage a version, then apply it.

        Args:
            version: The version; None for the newest.
            pause: As in `apply`.
            reset_caches: As in `apply`.

        Returns:
            What was done, and what it took.

        Raises:
            EngineError: As `stage` and `apply`.
            TimeoutError: It stages still.
        """
        state = self.stage(version)
        target = state.prepared.version if state.prepared else version
        return self.apply(target, pause=pause, reset_caches=reset_caches)

    def verify(self, *, timeout: float = STAGE_S) -> str:
        """Recount the digest of all live weights, while the engine generates.

        Args:
            timeout: Seconds to wait.

        Returns:
            The digest, 16 hex digits, which is that of the version it holds.

        Raises:
            EngineError: The weights no longer hold it, or there is none. The next update repairs them.
            TimeoutError: It counts still.
        """
        start = time.monotonic()
        state = self._in_turn("verify", EngineState, {}, timeout)
        state = self._ended("verify", state, timeout, start)
        if state.failure is not None or state.digest is None:
            raise failed(state.failure or Failure("verify", "RuntimeError", "no version is held"), state, self.url)
        return state.digest

    def resume(self) -> EngineState:
        """Let a paused engine go on. Refused where its weights are not proved: only an update repairs them.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It was refused, or the engine is out of reach.
        """
        return self._ask("resume", EngineState)

    def _ended(self, during: During, state: EngineState, timeout: float, start: float | None = None) -> EngineState:
        """Wait until the engine has done what it began: state is what it said then. start: of the timeout."""
        deadline = (time.monotonic() if start is None else start) + timeout
        instance, (look, longest) = state.instance, self._transport.looks
        while state.phase == "working":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url}: {during} has not ended within {timeout:g} s")
            time.sleep(look)
            look = min(look * _SLOWER, longest)
            state = self.state()
        if state.instance != instance:
            raise EngineError(
                f"{self.url} was started again during {during}",
                url=self.url,
                during=during,
                temporary=True,
                version=state.version,
                paused=state.paused,
            )
        return state

    def _in_turn(self, verb: During, kind: type[T], body: Mapping[str, Any], timeout: float) -> T:
        """Ask for work, again when the engine has ended another call's. Raises EngineError or TimeoutError."""
        start = time.monotonic()
        deadline = start + timeout
        while True:
            left = max(_LEAST_S, deadline - time.monotonic()) if verb == "apply" else None  # others return at once
            try:
                return self._ask(verb, kind, body, left)
            except EngineError as error:
                if error.kind != BUSY or time.monotonic() > deadline:
                    raise
            self._ended(verb, self.state(), timeout, start)  # a look is cheaper, and in no access log

    def _ask(self, verb: str, kind: type[T], body: Mapping[str, Any] | None = None, timeout: float | None = None) -> T:
        """Ask for a verb. Raises EngineError."""
        status, found = self._transport.send(verb, json.dumps(body or {}).encode(), timeout or self._timeout)
        if status != HTTPStatus.OK:
            raise self._refused(verb, status, found)
        try:
            answer = decode_json(found, kind, "its answer")
        except FormatError as error:
            text = f"answers, but not as the plug-in of pulse-rl does: {one_line(error, 500)}"
            raise no_answer(self.url, verb, text, status) from error
        tell(self, answer)
        return answer

    def _refused(self, during: str, status: int, body: bytes) -> EngineError:
        """The error for an answer that is no success."""
        try:
            refusal = decode_json(body, ErrorBody, "its answer")
        except FormatError:
            advice = {
                401: "it wants its API key",
                404: "it has no plug-in: start vLLM with VLLM_PLUGINS=pulse, and pulse-rl installed beside it; to "
                "`pulse-rl follow` the address of an SGLang server is sglang+http://host:30000",
            }.get(status, printable(body[:300].decode(errors="replace")))
            return no_answer(self.url, during, f"answers {status}: {advice}", status)
        return failed(refusal.failure, refusal.state, self.url, status)


def check_holds(
    url: str, found: EngineState | EngineReport, version: int | None, digest: str | None, during: str
) -> None:
    """Raise EngineError if an engine does not hold this version of the history, whatever number it says."""
    if (found.version, found.digest) != (version, digest):
        raise EngineError(
            f"{url}: expected version {version} of digest {digest}, as the history has it, found version "
            f"{found.version} of digest {printable(str(found.digest))}: it follows another history",
            url=url,
            during=during,
            kind="IntegrityError",
            version=found.version,
        )
