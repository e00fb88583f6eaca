"""The trainers of a run, as the driver sees them.

Where they exchange through a store, one that was killed is started again, but for rank 0, which also publishes.
Otherwise none is: what it would exchange is lost with it.
"""

import time
from collections.abc import Callable
from typing import Any

from pulse_rl.errors import ExchangeError, ProcessDiedError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.rl.trainer import Trainer

RESTARTS = 100  # of all trainers, so that a fault that returns at once ends the run
GRACE_S = 10  # time to learn the cause, after a trainer reports that it has lost another


class TrainerPool:
    """All trainers of a run; they start at once."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool, log: Callable[[str], None]) -> None:
        self._config, self._buffer, self._log = config, buffer, log
        self._restarts = 0
        self._handles = [self._start(rank, resume) for rank in range(config.trainers)]

    def _start(self, rank: int, resume: bool) -> ProcessHandle:
        return start(
            "the trainer" if self._config.trainers == 1 else f"trainer-{rank}",
            TrainerProcess,
            Trainer,
            (self._config, self._buffer, resume, rank),
            where="anywhere" if rank else "here",  # rank 0 writes the run's files, on the driver's node
        )

    def restart(self) -> None:
        """Start trainers again that were killed, where they exchange through a store."""
        for rank, handle in enumerate(self._handles):
            if self._starts_again(rank, handle):
                self._restarts += 1
                self._buffer.repeat(self._config.round_steps)
                self._log(f"trainer-{rank} was killed: starting it again; it goes on from the last committed round")
                self._handles[rank] = self._start(rank, True)

    def _starts_again(self, rank: int, handle: ProcessHandle) -> bool:
        config = self._config
        allowed = config.trainer_store is not None and not config.deterministic and self._restarts < RESTARTS
        return rank > 0 and allowed and handle.ended() and _died(handle)

    def running(self) -> list[ProcessHandle]:
        """The trainers that have not ended."""
        return [handle for handle in self._handles if not handle.ended()]

    def ended(self) -> bool:
        """Whether all trainers have ended, or one has failed."""
        return not self.running() or any(
            handle.ended() and _failed(handle) and not self._starts_again(rank, handle)
            for rank, handle in enumerate(self._handles)
        )

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


def _died(handle: ProcessHandle) -> bool:
    try:
        handle.result()
    except ProcessDiedError:
        return True
    except Exception:  # noqa: BLE001  # `result` raises it again
        return False
    return False


def _failed(handle: ProcessHandle) -> bool:
    try:
        handle.result()
    except Exception:  # noqa: BLE001  # `result` raises it again
        return True
    return False
