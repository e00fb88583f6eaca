"""A vLLM engine in this process, `vllm.LLM`, that follows a history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.ranks import Outside
from pulse_rl.engines.service import Local
from pulse_rl.engines.states import PauseMode

METHOD = "pulse_rl"  # which `transfer` adds to vLLM's workers
_LOOKS_S = (0.005, 0.05)
_MISSING = "not implemented", "has no attribute"  # as vLLM says it that runs in one process, and in several


@contextmanager
def add_start_hint() -> Iterator[None]:
    """Raise RuntimeError, which says how to start vLLM, where its workers do not have the method."""
    try:
        yield
    except Exception as error:
        if METHOD in str(error) and any(words in str(error) for words in _MISSING):
            raise RuntimeError(
                'its workers follow no history: start vLLM with --weight-transfer-config \'{"backend":"pulse"}\', '
                'or vllm.LLM with weight_transfer_config={"backend": "pulse"}'
            ) from error
        raise


class InProcess(EngineClient):
    """A `vllm.LLM` that was made with `weight_transfer_config={"backend": "pulse"}`.

    Staging runs in a thread of the engine's processes. Start it with `stage(wait=False)`, call `llm.generate`, and then
    `apply`, which waits for the staging: between two calls of `generate` no request runs, so `pause` says nothing here.
    Use it in the thread that uses the LLM. Where an error's `paused` is True, do not generate before an update has
    succeeded: the weights are of no version.

    Args:
        llm: The `vllm.LLM`.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(Local(_Engine(llm), "vllm.LLM", _LOOKS_S))


class _Engine:
    """A `vllm.LLM` as `engines.service.Engine`. Nothing has to be paused: no request runs."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._paused = llm, False

    async def call(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        with add_start_hint():
            found: list[Any] = self._llm.collective_rpc(METHOD, args=(verb, arguments))
        if verb == "state":  # another client may have left it so
            self._paused |= any(rank["stopped"] for rank in found)
        return found

    async def pause(self, mode: PauseMode, reset_caches: bool) -> None:
        if reset_caches:
            self._llm.reset_prefix_cache()
        self._paused = True

    async def resume(self, version: str | None = None) -> None:
        if version is not None:
            await self.report(version)
        self._paused = False

    async def report(self, version: str) -> None:
        self._llm.update_weight_version(version)

    async def outside(self) -> Outside:
        return Outside("", self._paused, str(self._llm.get_weight_version()))
