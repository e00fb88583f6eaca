"""One engine over HTTP: what it holds; stage while it generates, then apply in a short pause.

The engine does the work. Its own process pauses, applies, proves and goes on in one request, so a client that is killed
in the middle leaves no engine paused. What an engine holds is always asked of it, never remembered here: it may have
been started again in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec

from pulse_rl.engines.outcomes import failed
from pulse_rl.engines.states import (
    BUSY,
    ROUTES,
    During,
    EngineReport,
    EngineState,
    Failure,
    Follow,
    PauseMode,
    Refusal,
)
from pulse_rl.errors import EngineError, one_line, printable
from pulse_rl.store.urls import as_path, is_url

TIMEOUT_S = 30.0  # of an answer that takes no work
APPLY_S = 600.0  # "wait" lasts as long as the longest request that runs
STAGE_S = 3600.0  # a first anchor over a slow line
_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.5  # between two looks at an engine that stages
_MAX_NBYTES = 16 << 20  # of an answer

T = TypeVar("T")


def absolute(store: str | Path) -> str:
    """A store as another process finds it: its URL, or the whole path of a directory."""
    return str(store) if is_url(str(store)) else str(as_path(str(store)).absolute())


class EngineClient:
    """One engine with the plug-in of pulse-rl, over HTTP.

    Safe to use from several threads, and from several processes: the engine takes one update at a time.

    Args:
        url: The engine's address, as "http://host:8000".
        api_key: The key that the engine was started with; None: none.
        timeout: Seconds that an answer without work may take: the engine answers between two of its steps.

    Raises:
        ValueError: The address is none.

    Attributes:
        url: The engine's address.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine: expected a URL as http://host:8000, found {printable(url)!r}")
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._timeout = timeout

    def state(self) -> EngineState:
        """Ask the engine what it holds.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It is out of reach, or has no plug-in.
        """
        return self._ask("reach", "GET", "state", EngineState)

    def follow(
        self,
        store: str | Path,
        *,
        cache: str | Path | None = None,
        public_key: str | Path | None = None,
        heartbeat: str | None = None,
        patience: float = 30.0,
    ) -> EngineState:
        """Tell the engine which history to follow. It opens it and finds its weights while it goes on generating.

        Told the same again, it does nothing. Told another one, it forgets the first; its weights stay as they are.

        Args:
            store: The store's URL as the engine reaches it, or a directory.
            cache: A directory on the engine's host for one download per host; None: no cache.
            public_key: The path of a PEM file on the engine's host: a history that it did not sign is refused.
            heartbeat: An id under which the engine writes what it holds to the store, for `pulse-rl status`.
            patience: Seconds for which the engine tries a failing store again, before a stage fails.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It is out of reach, or has no plug-in.
        """
        wanted = Follow(
            store=absolute(store),
            cache=None if cache is None else str(cache),
            public_key=None if public_key is None else str(public_key),
            heartbeat=heartbeat,
            patience=patience,
        )
        return self._ask("follow", "POST", "follow", EngineState, msgspec.to_builtins(wanted))

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
        deadline, look = time.monotonic() + timeout, _LOOK_S
        began = state = self._in_turn("stage", EngineState, {"version": version}, deadline)
        if not wait:
            return began
        while state.phase == "working":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} has not staged a version within {timeout:g} s")
            time.sleep(look)
            look = min(look * 1.2, _LONGEST_LOOK_S)
            state = self._ask("stage", "GET", "state", EngineState)
        if state.instance != began.instance:
            raise EngineError(
                f"{self.url} was started again while it staged",
                url=self.url,
                during="stage",
                temporary=True,
                version=state.version,
                paused=state.paused,
            )
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
        """
        body = {"version": version, "pause": pause, "reset_caches": reset_caches}
        return self._in_turn("apply", EngineReport, body, time.monotonic() + timeout)

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

    def verify(self, *, timeout: float = APPLY_S) -> str:
        """Recount the digest of all live weights, while the engine generates.

        Args:
            timeout: Seconds to wait.

        Returns:
            The digest, 16 hex digits, which is that of the version it holds.

        Raises:
            EngineError: The weights no longer hold it, or there is none. The next update repairs them.
            TimeoutError: It counts still.
        """
        deadline = time.monotonic() + timeout
        state = self._in_turn("verify", EngineState, {}, deadline)
        while state.phase == "working":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} has not counted its weights within {timeout:g} s")
            time.sleep(_LOOK_S)
            state = self._ask("verify", "GET", "state", EngineState)
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
        return self._ask("resume", "POST", "resume", EngineState)

    def _in_turn(self, verb: During, kind: type[T], body: Mapping[str, Any], deadline: float) -> T:
        """Ask for work, again while the engine is at work for another call. Raises EngineError."""
        while True:
            left = max(_LOOK_S, deadline - time.monotonic()) if verb == "apply" else None  # others return at once
            try:
                return self._ask(verb, "POST", verb, kind, body, left)
            except EngineError as error:
                if error.kind != BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_S)

    def _ask(
        self,
        during: str,
        method: str,
        route: str,
        kind: type[T],
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> T:
        """Send one request. Raises EngineError."""
        url = f"{self.url}{ROUTES}/{route}"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = json.dumps(body or {}).encode() if method == "POST" else None
        try:
            with urlopen(Request(url, data, headers, method=method), timeout=timeout or self._timeout) as answer:
                found = answer.read(_MAX_NBYTES)
        except HTTPError as error:
            with error:
                raise self._refused(during, error.code, error.read(_MAX_NBYTES)) from None
        except (URLError, OSError, ValueError) as error:  # http.client's errors are among them, but for one
            reason = error.reason if isinstance(error, URLError) else error
            text = one_line(reason) if isinstance(reason, BaseException) else printable(str(reason))
            raise self._away(during, text) from error
        except HTTPException as error:
            raise self._away(during, one_line(error)) from error
        try:
            return msgspec.json.decode(found, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(
                f"{self.url} answers, but not as the plug-in of pulse-rl does: {one_line(error)}",
                url=self.url,
                during=during,
                status=200,
            ) from error

    def _away(self, during: str, text: str) -> EngineError:
        return EngineError(f"{self.url} is out of reach: {text}", url=self.url, during=during, temporary=True)

    def _refused(self, during: str, status: int, body: bytes) -> EngineError:
        """The error for an answer that is no success."""
        try:
            refusal = msgspec.json.decode(body, type=Refusal)
        except msgspec.MsgspecError:
            advice = {
                401: "it wants its API key",
                404: "it has no plug-in: start it with VLLM_PLUGINS=pulse, and pulse-rl installed beside it",
            }.get(status, printable(body[:300].decode(errors="replace")))
            return EngineError(
                f"{self.url} answers {status}: {advice}",
                url=self.url,
                during=during,
                status=status,
                temporary=status in (502, 503, 504),  # a proxy whose engine restarts
            )
        return failed(refusal.failure, refusal.state, self.url, status)
