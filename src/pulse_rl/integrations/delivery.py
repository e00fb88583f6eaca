"""What the adapters of training frameworks share that hand out their weights and wait until the engines have them.

Such a framework hands out whole tensors, one at a time, on rank 0. Each handing out is a version: it is published,
staged by all engines while they generate, and then written; it ends when all are proved to hold it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pulse_rl import Publisher, PublishReport
from pulse_rl.engines.client import check_holds
from pulse_rl.engines.fleet import Engines
from pulse_rl.engines.states import EngineReport, PauseMode
from pulse_rl.errors import EngineError
from pulse_rl.logs import logger
from pulse_rl.units import check_seconds

__all__ = ["EngineDelivery"]

log = logger(__name__)

_T = TypeVar("_T")

_RETRY_S = 1.0


def drain(weights: Iterable[Any]) -> None:
    """Read what is handed out to its end. Where one rank does not, the others hang in the gathering of a tensor."""
    deque(weights, maxlen=0)


class EngineDelivery:
    """Publishes what a trainer hands out, and brings all engines to it.

    An engine that was killed and started again meanwhile is brought back within the delivery.

    Args:
        store: The URL or path of the store, as the engines reach it.
        engines: The engines' addresses, as "http://host:8000"; or `Engines`, as with an API key.
        publisher: A Publisher, which is not closed. Default: one for the store, with cast="bfloat16".
        pause: What happens to requests that run while a version is written, as in `Engines.apply`.
        timeout: Seconds in which all engines must hold a version, engines that are started again included.

    Raises:
        ValueError: An argument makes no sense.

    Attributes:
        published: The report of the last version; None before the first.
        applied: What each engine reported of it, in the order of their addresses: the true pause, which the framework
            does not see.
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
        check_seconds("timeout", timeout)
        self._store, self._pause, self._timeout = store, pause, timeout
        self._engines = engines if isinstance(engines, Engines) else Engines(engines)
        self._owned = publisher is None
        self._publisher = Publisher(store, cast="bfloat16") if publisher is None else publisher
        self.published: PublishReport | None = None
        self.applied: list[EngineReport] = []

    def reach(self) -> None:
        """Wait until all engines answer.

        Raises:
            EngineError: One has no plug-in, or is out of reach for `timeout` seconds.
        """
        self._until(self._engines.states)

    def send(
        self,
        weights: Iterable[tuple[str, Any]],
        *,
        version: int | None = None,
        reset_caches: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish what is handed out, and bring all engines to it.

        Args:
            weights: (name, whole tensor), one at a time. It is read to its end, also where something fails.
            version: Its version. Default: the one after the history's newest.
            reset_caches: Whether to drop cached keys and values, which old weights have made.
            metadata: What is noted of it, as the trainer's own number for it.

        Raises:
            PulseError: The version could not be published, or an engine could not be brought to it.
            TimeoutError: An engine has not staged it in time.
        """
        handed = iter(weights)
        try:
            self.published = self._publisher.publish(handed, version=version, metadata=metadata)
        finally:
            drain(handed)
        self.applied = self._until(lambda: self._bring(reset_caches))

    def close(self) -> None:
        """Close the publisher that this made."""
        if self._owned:
            self._publisher.close()

    def _bring(self, reset_caches: bool) -> list[EngineReport]:
        version, digest = self._publisher.version, self._publisher.digest
        self._engines.follow(self._store)  # each time: one that was started again follows nothing
        self._engines.stage(version, timeout=self._timeout)
        reports = self._engines.apply(version, pause=self._pause, reset_caches=reset_caches)
        for client, report in zip(self._engines.clients, reports, strict=True):
            check_holds(client.url, report, version, digest, "apply")
        return reports

    def _until(self, verb: Callable[[], _T]) -> _T:
        """Do a verb of all engines, again where its failure may pass, until the time is over."""
        deadline, said = time.monotonic() + self._timeout, ""
        while True:
            try:
                return verb()
            except EngineError as error:
                # What was staged is lost where an engine was started again since, and a torn write is repaired.
                again = error.temporary or (error.during == "apply" and error.kind != "IntegrityError")
                left = deadline - time.monotonic()
                if not again or left < 0:
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("%s: it is tried again for up to %.0f s", said, left)
            time.sleep(_RETRY_S)
