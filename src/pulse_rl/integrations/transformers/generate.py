"""What follows a history between the tokens that a model generates."""

import threading
from typing import Any, Self

from pulse_rl import Staged, Subscriber, SyncReport
from pulse_rl.errors import StoreError, VersionNotFoundError, one_line, require
from pulse_rl.logs import logger

log = logger(__name__)

_transformers = require("transformers", "run")


class FollowWhileGenerating(_transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    """Keeps a model at the newest version of a history while it generates.

    A thread stages each new version, which only reads the weights. `apply` writes what is staged: call it between two
    calls of `generate`. Given to `generate` as a logits processor, it applies between two tokens too, in the thread
    that generates, when no forward pass runs; it leaves the scores as they are. The tokens after that are of the new
    version, over keys and values that the old weights have made for those before. Where these must not mix, leave it
    out of `generate`, and give no cache of one version to another.

    While it is entered, nothing else may use the subscriber or write to the model. What `apply` was not there to raise
    is raised where the block ends.

    Args:
        subscriber: Follows the history, for this model alone.
        model: The model. Its weights may be of any version, or none.
        poll: Seconds between two looks at the history.

    Raises:
        ValueError: `poll` is not positive.

    Attributes:
        reports: Of each version that was written.
    """

    def __init__(self, subscriber: Subscriber, model: Any, *, poll: float = 1.0) -> None:
        if not poll > 0:
            raise ValueError(f"poll: expected more than 0 seconds, found {poll}")
        self.reports: list[SyncReport] = []
        self._subscriber, self._model, self._poll = subscriber, model, poll
        self._lock = threading.Lock()  # of the subscriber and of what follows
        self._staged: Staged | None = None
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pulse-rl", daemon=True)

    @property
    def version(self) -> int | None:
        """The version that the weights are proved to hold; None before the first."""
        return self._subscriber.version

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._staged is not None:
            self._staged.discard()
        if self._error is not None and error is None:
            raise self._error

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.apply()
        return scores

    def apply(self) -> SyncReport | None:
        """Write the version that is staged, if one is. Call it in the thread that generates.

        Returns:
            What was done; None if no version was staged.

        Raises:
            PulseError: A version could not be staged or written, for a reason that does not pass. The next versions are
                tried all the same.
        """
        if not self._lock.acquire(blocking=False):
            return None  # the thread looks or stages
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            staged, self._staged = self._staged, None
            if staged is None:
                return None
            report = staged.apply()
            self.reports.append(report)
            return report
        finally:
            self._lock.release()

    def _follow(self) -> None:
        """The thread: stage every new version, until the block ends."""
        failed: int | None = None  # the version that cannot be staged
        while True:
            with self._lock:
                try:
                    newest = self._subscriber.latest()
                    if self._staged is not None and self._staged.version != newest:
                        self._staged.discard()
                        self._staged = None
                    if self._staged is None and newest not in (None, failed, self._subscriber.version):
                        failed = newest
                        self._staged = self._subscriber.stage(self._model, version=newest)
                        failed = None
                except StoreError as error:
                    if isinstance(error, VersionNotFoundError) or error.temporary:
                        failed = None
                        log.warning("following is delayed: %s", one_line(error))
                    else:
                        self._error = error
                except Exception as error:  # noqa: BLE001 - raised by the next apply
                    self._error = error
            if self._stop.wait(self._poll):
                return
