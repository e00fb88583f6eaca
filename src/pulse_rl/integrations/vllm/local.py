"""A vLLM engine in this process, `vllm.LLM`, that follows a history."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.engines.client import STAGE_S, absolute
from pulse_rl.engines.outcomes import failed, report, staged_for
from pulse_rl.engines.ranks import Applied, Outside, RankState, merge
from pulse_rl.engines.states import EngineReport, EngineState, Failure, Follow
from pulse_rl.integrations.vllm.names import METHOD

_LOOK_S = 0.005


class InProcess:
    """A `vllm.LLM` that was made with `weight_transfer_config={"backend": "pulse"}`.

    Staging runs in a thread of the engine's processes. Start it with `stage(wait=False)`, call `llm.generate`, and then
    `apply`: between two calls of `generate` no request runs, so nothing has to be paused. Use it in the thread that
    uses the LLM.

    Args:
        llm: The `vllm.LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def state(self) -> EngineState:
        """Ask the engine what it holds.

        Returns:
            What it holds and does.
        """
        return self._state(self._call("state"))

    def follow(
        self,
        store: str | Path,
        *,
        cache: str | Path | None = None,
        public_key: str | Path | None = None,
        heartbeat: str | None = None,
        patience: float = 30.0,
    ) -> EngineState:
        """Tell the engine which history to follow, as `EngineClient.follow`.

        Args:
            store: The store's URL, or a directory.
            cache: A directory for one download per host; None: no cache.
            public_key: The path of a PEM file: a history that it did not sign is refused.
            heartbeat: An id under which the engine writes what it holds to the store, for `pulse-rl status`.
            patience: Seconds for which a failing store is tried again, before a stage fails.

        Returns:
            What it holds and does.
        """
        wanted = Follow(
            store=absolute(store),
            cache=None if cache is None else str(cache),
            public_key=None if public_key is None else str(public_key),
            heartbeat=heartbeat,
            patience=patience,
        )
        return self._state(self._call("follow", msgspec.to_builtins(wanted)))

    def stage(self, version: int | None = None, *, wait: bool = True, timeout: float = STAGE_S) -> EngineState:
        """Fetch, decode and prove a version. No weight is touched.

        Args:
            version: The version; None for the newest.
            wait: Whether to wait until it is staged; otherwise `apply` does.
            timeout: Seconds to wait.

        Returns:
            What it holds.

        Raises:
            EngineError: It failed. The engine holds its version.
            TimeoutError: It stages still.
        """
        state = self._state(self._call("stage", {"version": version}))
        return self._settled(timeout) if wait else state

    def apply(self, version: int | None = None, *, reset_caches: bool = True) -> EngineReport:
        """Write the staged version. No request may run.

        Args:
            version: The version that must be staged; None for whichever is.
            reset_caches: Whether to drop cached keys and values, which old weights have made.

        Returns:
            What was done, and what it took.

        Raises:
            EngineError: Nothing is staged, or it failed. Where `paused` is True, do not generate before an update has
                succeeded: the weights are of no version.
        """
        before = self._settled(STAGE_S)
        staged, start = staged_for(version, before.prepared), time.perf_counter()
        if isinstance(staged, Failure):
            raise failed(staged, before)
        found_by = self._llm.collective_rpc(METHOD, args=("apply", {"version": staged.version}))
        applied = [msgspec.convert(each, Applied) for each in found_by]
        after = self._state([each.state for each in applied])
        if after.version is not None:
            self._llm.update_weight_version(str(after.version))
        if after.failure is not None:
            raise failed(after.failure, after)
        if reset_caches:
            self._llm.reset_prefix_cache()
        return report(
            staged,
            before.version,
            drain_s=0.0,
            apply_s=max(each.seconds for each in applied),
            pause_s=time.perf_counter() - start,
            pause="wait",
            reset_caches=reset_caches,
        )

    def update(self, version: int | None = None, *, reset_caches: bool = True) -> EngineReport:
        """Stage a version, then apply it.

        Args:
            version: The version; None for the newest.
            reset_caches: As in `apply`.

        Returns:
            What was done, and what it took.

        Raises:
            EngineError: As `stage` and `apply`.
            TimeoutError: As `stage`.
        """
        self.stage(version)
        return self.apply(reset_caches=reset_caches)

    def verify(self) -> str:
        """Recount the digest of all live weights.

        Returns:
            The digest, 16 hex digits, which is that of the version it holds.

        Raises:
            EngineError: The weights no longer hold it, or there is none.
        """
        self._call("verify")
        state = self._settled(STAGE_S)
        if state.digest is None:
            raise failed(Failure("verify", "VersionNotFoundError", "no version is held"), state)
        return state.digest

    def _settled(self, timeout: float) -> EngineState:
        """Wait until the engine's threads are idle. Raises what went wrong there."""
        deadline = time.monotonic() + timeout
        while (state := self.state()).phase == "working":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine has not staged a version within {timeout:g} s")
            time.sleep(_LOOK_S)
        if state.failure is not None:
            raise failed(state.failure, state)
        return state

    def _call(self, verb: str, arguments: dict[str, Any] | None = None) -> list[RankState]:
        found = self._llm.collective_rpc(METHOD, args=(verb, arguments or {}))
        return [msgspec.convert(each, RankState) for each in found]

    def _state(self, ranks: list[RankState]) -> EngineState:
        stopped = any(rank.stopped for rank in ranks)
        return merge(ranks, Outside("", stopped, str(self._llm.get_weight_version())))
