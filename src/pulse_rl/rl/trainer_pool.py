"""The trainers of a run, as the driver sees them. None is restarted: what it would exchange is lost with it."""

import time
from typing import Any

from pulse_rl.errors import ExchangeError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.rl.trainer import Trainer

GRACE_S = 10  # time to learn the cause, after a trainer reports that it has lost another


class TrainerPool:
    """All trainers of a run; they start at once."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool) -> None:
        self._handles = [
            start(
                "the trainer" if config.trainers == 1 else f"trainer-{rank}",
                TrainerProcess,
                Trainer,
                (config, buffer, resume, rank),
                where="anywhere" if rank else "here",  # rank 0 writes the run's files, on the driver's node
            )
            for rank in range(config.trainers)
        ]

    def running(self) -> list[ProcessHandle]:
        """The trainers that have not ended."""
        return [handle for handle in self._handles if not handle.ended()]

    def ended(self) -> bool:
        """Whether all trainers have ended, or one has failed."""
        return not self.running() or any(handle.ended() and _failed(handle) for handle in self._handles)

    def result(self) -> dict[str, Any]:
        """What rank 0 returned. Call it once `ended`; raises what a trainer raised, or ProcessDiedError.

        When one trainer fails, the others raise ExchangeError because they lost it. So this waits for the error of the
        one that failed, and raises an ExchangeError only if no other error follows.
        """
        deadline = time.monotonic() + GRACE_S
        while True:
            lost = None
            for handle in set(self._handles) - set(self.running()):
                try:
                    handle.result()
                except ExchangeError as error:
                    lost = error
            left = self.running()
            if lost and (not left or time.monotonic() > deadline):
                raise lost
            if not left:
                found: dict[str, Any] = self._handles[0].result()
                return found
            wait(left, 0.1)


def _failed(handle: ProcessHandle) -> bool:
    try:
        handle.result()
    except Exception:  # noqa: BLE001  # `result` raises it again
        return True
    return False
