"""One SGLang engine over HTTP: what it holds; stage while it generates, then apply in a short pause.

Each order is a weight update of SGLang's, in a session, with generation paused: SGLang would otherwise wait until the
running requests have ended. An order that writes nothing takes milliseconds, and running requests go on afterwards
with what they have cached.
"""

from __future__ import annotations

import json
import secrets
import time
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch.distributed as dist

from pulse_rl.engines.client import absolute
from pulse_rl.engines.outcomes import failed, report, staged_for
from pulse_rl.engines.ranks import Outside, RankState, is_stopped, merge
from pulse_rl.engines.states import EngineReport, EngineState, Failure, Follow
from pulse_rl.errors import EngineError, one_line, printable
from pulse_rl.integrations.sglang.orders import Order, await_answers, payload

LOADER = "pulse_rl.integrations.sglang.load"
TIMEOUT_S = 60.0
STAGE_S = 3600.0
_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0  # between two looks at an engine that works; each pauses it for milliseconds
_MAX_NBYTES = 16 << 20  # of an answer

Pause = Literal["keep", "abort"]


class SGLangEngine:
    """One SGLang engine that was started with `--custom-weight-loader pulse_rl.integrations.sglang.load`.

    One client at a time: SGLang takes one weight update at a time. If a client dies while it has paused the engine, the
    next one's first call lets it go on.

    Args:
        url: The engine's address, as "http://host:30000".
        api_key: The key that the engine was started with; None: none.
        reply_host: The address of this machine as the engine's ranks reach it: they answer to a port that torch's
            TCPStore opens here.
        timeout: Seconds that an answer may take.

    Raises:
        ValueError: The address is none.

    Attributes:
        url: The engine's address.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, reply_host: str = "127.0.0.1", timeout: float = TIMEOUT_S
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine: expected a URL as http://host:30000, found {printable(url)!r}")
        self.url = url.rstrip("/")
        self._api_key, self._timeout = api_key, timeout
        self._host = reply_host
        self._store = dist.TCPStore(reply_host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._ranks: int | None = None
        self._keeps_paused = False  # old keys and values could not be dropped

    def state(self) -> EngineState:
        """Ask the engine what it holds.

        Returns:
            What it holds and does.

        Raises:
            EngineError: It is out of reach, or was started without the loader.
        """
        return self._brief("state", "reach")

    def follow(
        self,
        store: str | Path,
        *,
        cache: str | Path | None = None,
        public_key: str | Path | None = None,
        heartbeat: str | None = None,
        patience: float = 30.0,
        timeout: float = STAGE_S,
    ) -> EngineState:
        """Tell the engine which history to follow, and wait until it has found its weights.

        Told the same again, it does nothing.

        Args:
            store: The store's URL as the engine reaches it, or a directory.
            cache: A directory on the engine's host for one download per host; None: no cache.
            public_key: The path of a PEM file on the engine's host: a history that it did not sign is refused.
            heartbeat: An id under which the engine writes what it holds to the store, for `pulse-rl status`.
            patience: Seconds for which the engine tries a failing store again, before a stage fails.
            timeout: Seconds to wait.

        Returns:
            What it holds.

        Raises:
            EngineError: It is out of reach, or cannot follow the history in place.
            TimeoutError: It is not done in time.
        """
        history = Follow(
            store=absolute(store),
            cache=None if cache is None else str(cache),
            public_key=None if public_key is None else str(public_key),
            heartbeat=heartbeat,
            patience=patience,
        )
        return self._finish(self._brief("follow", "follow", history=history), "follow", timeout)

    def stage(self, version: int | None = None, *, timeout: float = STAGE_S) -> EngineState:
        """Fetch, decode and prove a version, while the engine generates. No weight is touched.

        Args:
            version: The version; None for the newest.
            timeout: Seconds to wait.

        Returns:
            What it holds; `prepared` says what is staged.

        Raises:
            EngineError: It failed, or is out of reach. The engine goes on with its version.
            TimeoutError: It stages still.
        """
        state = self._finish(self._brief("stage", "stage", version=version), "stage", timeout)
        if state.prepared is None:
            raise failed(Failure("stage", "RuntimeError", "nothing is staged"), state, self.url)
        return state

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
        state = self._finish(self._brief("verify", "verify"), "verify", timeout)
        if state.digest is None:
            raise failed(Failure("verify", "RuntimeError", "no version is held"), state, self.url)
        return state.digest

    def apply(self, version: int | None = None, *, pause: Pause = "keep", reset_caches: bool = True) -> EngineReport:
        """Write the staged version: pause, scatter, prove, go on. On several ranks all write, or none.

        The engine's `weight_version` becomes the version when that is proved, before it goes on.

        Args:
            version: The version that must be staged; None for whichever is.
            pause: What happens to requests that run: "keep" goes on with them under the new weights; "abort" ends them.
            reset_caches: Whether to drop cached keys and values, which the old weights have made. With "keep", running
                requests are then prefilled again.

        Returns:
            What was done, and what it took.

        Raises:
            EngineError: Nothing is staged, or it is obsolete, or it failed. `version` and `paused` say what the
                engine holds then: its old version, or it stays paused until an update succeeds.
        """
        before = self._brief("state", "reach")
        staged = staged_for(version, before.prepared)
        if isinstance(staged, Failure):
            raise failed(staged, before, self.url)
        mode = "abort" if pause == "abort" else "retract" if reset_caches else "in_place"
        start = time.perf_counter()
        self._post("apply", "pause_generation", {"mode": mode})
        paused = time.perf_counter()
        try:
            ranks, seconds = self._order("apply", "apply", version=version, flush=reset_caches)
        except EngineError as error:
            # What it holds is not known, or its caches are those of the old weights.
            self._keeps_paused, error.paused = True, True
            raise
        self._keeps_paused = False
        state = self._merged(ranks, paused=is_stopped(ranks))
        if state.failure is None and state.version is not None:
            body = {"new_version": str(state.version), "abort_all_requests": False}
            self._post("apply", "update_weight_version", body)
        if not state.paused:
            self._post("resume", "continue_generation", {})
        ended = time.perf_counter()
        if state.failure is not None or state.version is None:
            raise failed(state.failure or Failure("apply", "RuntimeError", "the ranks differ"), state, self.url)
        return report(
            staged,
            before.version,
            drain_s=paused - start,
            apply_s=seconds,
            pause_s=ended - paused,
            pause=pause,
            reset_caches=reset_caches,
        )

    def update(self, version: int | None = None, *, pause: Pause = "keep", reset_caches: bool = True) -> EngineReport:
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
        return self.apply(state.prepared.version if state.prepared else version, pause=pause, reset_caches=reset_caches)

    def _brief(self, op: Any, during: str, *, history: Follow | None = None, version: int | None = None) -> EngineState:
        """An order that writes nothing, in a short pause. A torn engine stays paused."""
        self._post(during, "pause_generation", {"mode": "in_place"})
        stopped = self._keeps_paused
        try:
            ranks, _ = self._order(op, during, history=history, version=version)
            stopped |= is_stopped(ranks)
        finally:
            if not stopped:
                self._post("resume", "continue_generation", {})
        return self._merged(ranks, paused=stopped)

    def _finish(self, state: EngineState, during: str, timeout: float) -> EngineState:
        """Wait until the engine has done what it began. Raises EngineError if that failed, TimeoutError."""
        deadline, look = time.monotonic() + timeout, _LOOK_S
        while state.phase == "working":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url}: {during} has not ended within {timeout:g} s")
            time.sleep(look)
            look = min(look * 1.2, _LONGEST_LOOK_S)
            state = self._brief("state", during)
        # One that follows already keeps the failure of its last stage, which is not of this call.
        if state.failure is not None and (during != "follow" or state.mapping is None):
            raise failed(state.failure, state, self.url)
        return state

    def _merged(self, ranks: list[RankState], *, paused: bool) -> EngineState:
        info = self._get("model_info")
        outside = Outside(str(info.get("model_path", "")), paused, str(info.get("weight_version", "")))
        return merge(ranks, outside)

    def _order(
        self,
        op: Any,
        during: str,
        *,
        history: Follow | None = None,
        version: int | None = None,
        flush: bool = False,
    ) -> tuple[list[RankState], float]:
        """Send an order to all ranks. Returns what they hold, and the seconds of the slowest. The engine is paused."""
        if self._ranks is None:
            self._ranks = int(self._get("server_info")["tp_size"])
        order = Order(op, secrets.token_hex(8), self._host, self._store.port, history, version)
        begin = {"selector": "target"}
        try:
            self._post(during, "begin_weight_update", begin)
        except EngineError as error:
            if error.status != HTTPStatus.BAD_REQUEST:
                raise
            # A client that died has left its session open.
            self._post(during, "end_weight_update", {})
            self._post(during, "begin_weight_update", begin)
        try:
            self._post(
                during,
                "update_weights_from_tensor",
                {
                    "serialized_named_tensors": [payload(order)] * self._ranks,
                    "load_format": LOADER,
                    "flush_cache": flush,
                    "selector": "target",
                },
            )
        finally:
            self._post(during, "end_weight_update", {})
        try:
            found = await_answers(self._store, order, self._ranks, self._timeout)
        except TimeoutError as error:
            raise EngineError(
                f"{self.url}: {error}: was it started with --custom-weight-loader {LOADER}, and do its ranks reach "
                f"{self._host}:{self._store.port}?",
                url=self.url,
                during=during,
            ) from None
        for rank, answer in enumerate(found):
            if answer.state is None:
                raise EngineError(
                    f"{self.url}: rank {rank}: {printable(answer.failure or 'no state')}", url=self.url, during=during
                )
        return [answer.state for answer in found if answer.state], max(answer.seconds for answer in found)

    def _get(self, route: str) -> dict[str, Any]:
        return self._ask("reach", route, None)

    def _post(self, during: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask(during, route, body)

    def _ask(self, during: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """One request. Raises EngineError."""
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}/{route}", data, headers, method="GET" if body is None else "POST")
        try:
            with urlopen(request, timeout=self._timeout) as answer:
                found = json.loads(answer.read(_MAX_NBYTES))
        except HTTPError as error:
            with error:
                text = printable(error.read(2000).decode(errors="replace"))
            raise EngineError(
                f"{self.url} answers {error.code} to {route}: {text}",
                url=self.url,
                during=during,
                status=error.code,
                temporary=error.code in (502, 503, 504),
            ) from None
        except (URLError, OSError, ValueError, HTTPException) as error:
            raise EngineError(
                f"{self.url} is out of reach: {one_line(error)}", url=self.url, during=during, temporary=True
            ) from error
        return found if isinstance(found, dict) else {}
