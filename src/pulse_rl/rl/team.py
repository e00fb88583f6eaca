"""The trainers of a run, as its driver sees them: start them, and know when they have ended or one is lost."""

import time
from typing import Any

from pulse_rl.errors import ExchangeError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.rl.lead import LeadTrainer
from pulse_rl.rl.trainer import Trainer

GRACE_S = 10  # for the cause to be known, when a trainer says that it has lost another


class Team:
    """All trainers of a run; none is started again, because what it would exchange is lost with it."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool) -> None:
        self._handles = [self._start(rank, config, buffer, resume) for rank in range(config.trainers)]

    @staticmethod
    def _start(rank: int, config: RunConfig, buffer: DataBuffer, resume: bool) -> ProcessHandle:
        """The first trainer runs on the driver's node, where the run's files are; the others run on any."""
        name = "the trainer" if config.trainers == 1 else f"trainer-{rank}"
        arguments = (config, buffer, resume, rank)
        if rank == 0:
            return start(name, TrainerProcess, LeadTrainer, *arguments, where="here")
        return start(name, TrainerProcess, Trainer, *arguments, where="anywhere")

    def at_work(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [handle for handle in self._handles if not handle.ended()]

    def ended(self) -> bool:
        """Whether all have ended, or one by an error."""
        return not self.at_work() or any(handle.ended() and _failed(handle) for handle in self._handles)

    def result(self) -> dict[str, Any]:
        """What rank 0 returned, once `ended`. Raises what a trainer raised, or ProcessDiedError if one died.

        The others' ExchangeError only says that one is lost, so its own error goes first.
        """
        deadline = time.monotonic() + GRACE_S
        while True:
            lost = None
            for handle in set(self._handles) - set(self.at_work()):
                try:
                    handle.result()
                except ExchangeError as error:
                    lost = error
            left = self.at_work()
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
