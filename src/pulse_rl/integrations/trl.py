"""TRL's trainers bring their weights to vLLM servers that follow, which pause for the write of what changed alone.

    transfer = PulseWeightTransfer("s3://bucket/run", ["http://gpu-1:8000"])
    trainer = AsyncGRPOTrainer(…, weight_transfer=transfer)

    trl.generation.vllm_generation.VLLMClient = vllm_client(transfer)     # before a GRPOTrainer in server mode is made

TRL hands out whole tensors, one at a time, on rank 0. Each sync is a version: it is published, staged by all engines
while they generate, and then written, and TRL goes on when all hold it. TRL passes no version: they are counted, after
the history's newest. The attributes that are used are those of TRL 1.16, which need not be imported here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pulse_rl import Publisher, PublishReport
from pulse_rl.engines.fleet import Engines
from pulse_rl.engines.outcomes import check_holds
from pulse_rl.engines.states import EngineReport, PauseMode
from pulse_rl.errors import EngineError, require
from pulse_rl.logs import logger

log = logger(__name__)

_T = TypeVar("_T")

_RETRY_S = 1.0


class PulseWeightTransfer:
    """Brings each sync of a TRL trainer to engines that follow, as the `weight_transfer` of `AsyncGRPOTrainer`.

    A sync ends when all engines are proved to hold the version. One that was killed and started again meanwhile is
    brought back within it. If the sync fails, its error ends TRL's training, or TRL stays at the version before it.

    Args:
        store: The URL or path of the store, as the engines reach it.
        engines: The engines' addresses, as "http://host:8000"; or `Engines`, as with an API key.
        publisher: A Publisher, which is not closed. Default: one for the store, with cast="bfloat16".
        pause: What happens to requests that run while a version is written, as in `Engines.apply`.
        timeout: Seconds in which all engines must hold a version, engines that are started again included.

    Attributes:
        published: The report of the last version; None before the first.
        applied: What each engine reported of it, in the order of their addresses: the true pause, which TRL does not
            see.
    """

    def __init__(
        self,
        store: str | Path,
        engines: Sequence[str] | Engines,
        *,
        publisher: Publisher | None = None,
        pause: PauseMode = "keep",
        timeout: float = 600.0,
    ) -> None:
        self._store, self._pause, self._timeout = store, pause, timeout
        self._engines = engines if isinstance(engines, Engines) else Engines(engines)
        self._owned = publisher is None
        self._publisher = Publisher(store, cast="bfloat16") if publisher is None else publisher
        self.published: PublishReport | None = None
        self.applied: list[EngineReport] = []

    def init_weight_transfer(self) -> None:
        """Wait until all engines answer. TRL calls it when training begins.

        Raises:
            EngineError: One has no plug-in, or is out of reach for `timeout` seconds.
        """
        self._until(self._engines.states)

    def pause(self) -> None:
        """Nothing: an engine pauses for its own write alone."""

    def resume(self) -> None:
        """Nothing: an engine goes on after its own write."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish what TRL hands out, and bring all engines to it.

        Args:
            iterator: (name, whole tensor), one at a time. It is read to its end, also where something fails: the other
                ranks gather until then.

        Raises:
            PulseError: The version could not be published, or an engine could not be brought to it.
            TimeoutError: An engine has not staged it in time.
        """
        try:
            self.published = self._publisher.publish(iterator)
        finally:
            deque(iterator, maxlen=0)
        self.applied = self._until(lambda: self._bring(self._publisher.version, self._publisher.digest))

    def destroy(self) -> None:
        """Close the publisher that this made. TRL calls it when training ends."""
        if self._owned:
            self._publisher.close()

    def _bring(self, version: int | None, digest: str | None) -> list[EngineReport]:
        self._engines.follow(self._store)  # each time: one that was started again follows nothing
        self._engines.stage(version, timeout=self._timeout)
        reports = self._engines.apply(version, pause=self._pause)
        for client, report in zip(self._engines.clients, reports, strict=True):
            check_holds(client.url, report, version, digest, "apply")
        return reports

    def _until(self, verb: Callable[[], _T]) -> _T:
        """Do a verb of all engines, again where its failure may pass, until the time is over."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return verb()
            except EngineError as error:
                # What was staged is lost where an engine was started again since, and a torn write is repaired.
                again = error.temporary or (error.during == "apply" and error.kind != "IntegrityError")
                if not again or time.monotonic() > deadline:
                    raise
                log.warning("the sync is tried again: %s", error)
            time.sleep(_RETRY_S)


def vllm_client(transfer: PulseWeightTransfer) -> type[Any]:
    """Make a `VLLMClient` for TRL's trainers in server mode, as GRPOTrainer, that brings weights by a transfer.

    Args:
        transfer: What brings them. The servers' engines are its own; TRL asks its one server for completions.

    Returns:
        The class: assign it to `trl.generation.vllm_generation.VLLMClient` before the trainer is made.

    Raises:
        MissingExtraError: TRL is not installed.
    """
    base: Any = require("trl.generation.vllm_client", "trl").VLLMClient

    class PulseVLLMClient(base):  # type: ignore[misc]
        """TRL's client, whose weights go another way."""

        def init_communicator(self, device: Any = 0) -> None:
            transfer.init_weight_transfer()

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
            transfer.send_weights(named_params)

        def reset_prefix_cache(self) -> None:
            """Nothing: what old weights have made was dropped in the pause."""

        def close_communicator(self) -> None:
            transfer.destroy()

    return PulseVLLMClient
