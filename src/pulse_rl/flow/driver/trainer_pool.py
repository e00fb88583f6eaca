"""The trainers that share one policy, as the driver sees them.

Where they exchange through a store, or come and go, one that was killed is started again, but for rank 0, which also
publishes. Otherwise none is: what it would exchange is lost with it.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

from pulse_rl.errors import ExchangeError, ProcessDiedError
from pulse_rl.flow.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.trainer import PolicyTrainer

RESTARTS = 100  # of all trainers, so that a fault that returns at once ends the run
GRACE_S = 10  # time to learn the cause, after a trainer reports that it has lost another


class TrainerPool:
    """All trainers of one policy that are started together. log: shows a person one line."""

    def __init__(self, recipe: Recipe, policy: str, dataflow: Any, log: Callable[[str], None]) -> None:
        self._recipe, self._policy, self._dataflow, self._log = recipe, policy, dataflow, log
        self._given = recipe.policies[policy]
        self._several = self._given.trainers > 1
        self._life = secrets.token_hex(4)
        self.restarts = 0
        recipe.files(policy).mkdir(parents=True, exist_ok=True)
        self._handles = [self._start(rank) for rank in range(self._given.trainers)]

    def _name(self, rank: int) -> str:
        """What a person calls a trainer."""
        name = f"trainer-{rank}" if self._several else "the trainer"
        return name if self._recipe.only else f"{name} of {self._policy}"

    def _start(self, rank: int) -> ProcessHandle:
        """Start a trainer's process. Rank 0 writes the run's files, so it is on the driver's node."""
        arguments = (self._recipe, self._policy, self._dataflow, rank, self._life)
        where: Literal["here", "anywhere"] = "anywhere" if rank else "here"
        name, board = self._name(rank), self._dataflow
        return start(name, TrainerProcess, PolicyTrainer, arguments, board=board, where=where)

    def restart(self) -> None:
        """Start trainers again that were lost, where one is started again alone."""
        then = "it joins the others, who go on" if self._given.elastic else "it goes on from the last committed round"
        for rank, handle in enumerate(self._handles):
            if self._starts_again(rank, handle):
                self.restarts += 1
                who = self._name(rank)
                self._log(f"{who} was lost: starting it again; {then}")
                if self._given.elastic:
                    PolicyCalls(self._dataflow, self._policy, self._life).lose_rank(rank)
                self._handles[rank] = self._start(rank)

    def _starts_again(self, rank: int, handle: ProcessHandle) -> bool:
        alone = self._given.restarts_alone and not self._all_ended()
        return rank > 0 and alone and self.restarts < RESTARTS and handle.ended() and self._died(handle)

    def _all_ended(self) -> bool:
        """Whether trainers that come and go have nothing left to join: rank 0 has ended, and the lighthouse with it."""
        return self._given.elastic and self._handles[0].ended()

    def _died(self, handle: ProcessHandle) -> bool:
        try:
            handle.result()
        except ProcessDiedError:
            return True
        except ExchangeError:  # the others may have gone on without it
            return self._given.elastic
        except Exception:  # noqa: BLE001  # `result` raises it again
            return False
        return False

    def close(self) -> None:
        """End all processes that are left."""
        for handle in self._handles:
            handle.close()

    def running(self) -> list[ProcessHandle]:
        """The trainers that have not ended."""
        return [handle for handle in self._handles if not handle.ended()]

    def ended(self) -> bool:
        """Whether all trainers have ended, or one has failed."""
        if not self.running() or self._all_ended():
            return True
        return any(
            handle.ended() and _failed(handle) and not self._starts_again(rank, handle)
            for rank, handle in enumerate(self._handles)
        )

    def result(self) -> dict[str, Any]:
        """What rank 0 returned. Call it once `ended`; raises what a trainer raised, or ProcessDiedError.

        When one trainer fails, the others raise ExchangeError because they lost it. So this waits for the error of the
        one that failed, and raises an ExchangeError only if no other error follows.
        """
        deadline = time.monotonic() + GRACE_S
        if self._all_ended():
            found = self._result()
            while self.running() and time.monotonic() < deadline:  # for those that end with it
                wait(self.running(), 0.1)
            return found
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
                return self._result()
            wait(left, 0.1)

    def _result(self) -> dict[str, Any]:
        found: dict[str, Any] = self._handles[0].result()
        return found


def _failed(handle: ProcessHandle) -> bool:
    try:
        handle.result()
    except Exception:  # noqa: BLE001  # `result` raises it again
        return True
    return False
