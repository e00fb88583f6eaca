"""The trainers of a run, as its driver sees them: start them, and know when they have ended or one is lost."""

import time
from typing import Any

from pulse_rl.errors import ExchangeError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import Life, start_trainer, wait

GRACE_S = 10  # for the cause to be known, when a trainer says that it has lost another


class Team:
    """All trainers of a run; none is started again, because what it would exchange is lost with it."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool) -> None:
        self._lives = [start_trainer(rank, config, buffer, resume) for rank in range(config.trainers)]

    def at_work(self) -> list[Life]:
        """Those that have not ended."""
        return [life for life in self._lives if not life.ended()]

    def ended(self) -> bool:
        """Whether all have ended, or one by an error."""
        return not self.at_work() or any(life.ended() and _failed(life) for life in self._lives)

    def result(self) -> dict[str, Any]:
        """What rank 0 returned, once `ended`. Raises what a trainer raised, or ProcessDiedError if one died.

        The others' ExchangeError only says that one is lost, so its own error goes first.
        """
        deadline = time.monotonic() + GRACE_S
        while True:
            lost = None
            for life in set(self._lives) - set(self.at_work()):
                try:
                    life.result()
                except ExchangeError as error:
                    lost = error
            left = self.at_work()
            if lost and (not left or time.monotonic() > deadline):
                raise lost
            if not left:
                found: dict[str, Any] = self._lives[0].result()
                return found
            wait(left, 0.1)


def _failed(life: Life) -> bool:
    try:
        life.result()
    except Exception:  # noqa: BLE001  # `result` raises it again
        return True
    return False
