"""The trainers that share one model, as the driver sees them.

Where they exchange through a store, one that was killed is started again, but for rank 0, which also publishes.
Otherwise none is: what it would exchange is lost with it.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from pulse_rl.errors import ExchangeError, ProcessDiedError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.rl.trainer import Trainer

RESTARTS = 100  # of all trainers, so that a fault that returns at once ends the run
GRACE_S = 10  # time to learn the cause, after a trainer reports that it has lost another


class Crew(Protocol):
    """What a pool knows of its run: how a trainer is started, and who makes up for what one has lost."""

    def name(self, rank: int) -> str:
        """What a person calls a trainer."""

    def start(self, rank: int, *, again: bool) -> ProcessHandle:
        """Start a trainer's process. again: in the place of one that was killed."""

    def lost(self, rank: int) -> None:
        """A trainer was killed and is about to be started again."""


class ReferenceCrew:
    """The trainers of the reference run. resume: whether the run goes on from its checkpoint."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool) -> None:
        self._config, self._buffer, self._resume = config, buffer, resume

    def name(self, rank: int) -> str:
        return "the trainer" if self._config.trainers == 1 else f"trainer-{rank}"

    def start(self, rank: int, *, again: bool) -> ProcessHandle:
        arguments = (self._config, self._buffer, self._resume or again, rank)
        return start(self.name(rank), TrainerProcess, Trainer, arguments, where=place(rank))

    def lost(self, rank: int) -> None:
        self._buffer.repeat(self._config.round_steps)


def place(rank: int) -> Literal["here", "anywhere"]:
    """Where a trainer runs: rank 0 writes the run's files, so it is on the driver's node."""
    return "anywhere" if rank else "here"


class TrainerPool:
    """All trainers of one model; they start at once. log: shows a person one line."""

    def __init__(self, config: RunConfig, crew: Crew, log: Callable[[str], None]) -> None:
        self._config, self._crew, self._log = config, crew, log
        self.restarts = 0
        self._handles = [crew.start(rank, again=False) for rank in range(config.trainers)]

    def restart(self) -> None:
        """Start trainers again that were killed, where they exchange through a store."""
        for rank, handle in enumerate(self._handles):
            if self._starts_again(rank, handle):
                self.restarts += 1
                self._crew.lost(rank)
                who = self._crew.name(rank)
                self._log(f"{who} was killed: starting it again; it goes on from the last committed round")
                self._handles[rank] = self._crew.start(rank, again=True)

    def _starts_again(self, rank: int, handle: ProcessHandle) -> bool:
        config = self._config
        allowed = config.trainer_store is not None and not config.deterministic and self.restarts < RESTARTS
        return rank > 0 and allowed and handle.ended() and _died(handle)

    def close(self) -> None:
        """End all processes that are left."""
        for handle in self._handles:
            handle.close()

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
