"""The trainers of a run, as the driver sees them: one or several for each policy.

One that dies goes on from its checkpoint. Of several that share a policy, all go on from theirs, as what they were to
exchange is lost with the one. But where they exchange through a store, or come and go (`elastic`), one that is not
rank 0, which also publishes, is started again alone: the others wait for it, or do not.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any, Literal

from pulse_rl.errors import ExchangeError, ProcessDiedError
from pulse_rl.flow import metrics
from pulse_rl.flow.engine import ProcessHandle, TrainerProcess, start, wait
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.checkpoints import saved_step
from pulse_rl.flow.training.trainer import PolicyTrainer

DEATHS = 5  # of a policy's trainers without a new version between them; then the run ends
ALONE = 100  # starts of single trainers while the others go on, so that a fault that returns at once ends the run
GRACE_S = 10  # time to learn the cause, after a trainer reports that it has lost another


class PolicyTrainers:
    """The trainers of one policy; they start at once. log: shows a person one line.

    Attributes:
        policy: Its name.
        result: What rank 0 has returned, and the restarts of all; None until they have ended.
    """

    def __init__(self, recipe: Recipe, policy: str, dataflow: Any, log: Callable[[str], None]) -> None:
        self.policy = policy
        self.result: dict[str, Any] | None = None
        self._recipe, self._dataflow, self._log = recipe, dataflow, log
        self._given = recipe.policies[policy]
        self._of = "" if recipe.only else f" of {policy}"
        self._files = recipe.files(policy)
        self._restarts = 0
        self._futile = 0  # deaths since their last version
        self._versions = 0  # when they were started last
        self._files.mkdir(parents=True, exist_ok=True)
        self._start_all()

    def _start_all(self) -> None:
        self._life, self._alone = secrets.token_hex(4), 0
        self._handles = [self._start(rank) for rank in range(self._given.trainers)]

    def _start(self, rank: int) -> ProcessHandle:
        """Start a trainer's process. Rank 0 writes the run's files, so it is on the driver's node."""
        arguments = (self._recipe, self.policy, self._dataflow, rank, self._life)
        where: Literal["here", "anywhere"] = "anywhere" if rank else "here"
        return start(self._name(rank), TrainerProcess, PolicyTrainer, arguments, board=self._dataflow, where=where)

    def _name(self, rank: int) -> str:
        """What a person calls a trainer."""
        return (f"trainer-{rank}" if self._given.trainers > 1 else "the trainer") + self._of

    def running(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [handle for handle in self._handles if not handle.ended()]

    def poll(self) -> None:
        """Collect the result, and start those again that died. Raises as `Trainers.poll`."""
        if self.result is not None:
            return
        for rank, handle in enumerate(self._handles):
            if self._starts_again(rank, handle):
                self._start_alone(rank)
        if not self._ended():
            return
        try:
            result = self._wait()
        except (ProcessDiedError, ExchangeError) as error:  # the latter: they have lost each other
            self._check_deaths(error)
            self._close()
            self._restarts += 1
            count = self._given.trainers
            who = f"the trainer{self._of} died; it goes"
            who = who if count == 1 else f"one of the {count} trainers{self._of} died; all go"
            self._log(f"{who} on from step {saved_step(self._files)}")
            self._start_all()
            return
        self._close()
        self.result = result | {"restarts": self._restarts}

    def _starts_again(self, rank: int, handle: ProcessHandle) -> bool:
        """Whether a trainer was lost, and is started again while the others go on."""
        alone = rank > 0 and self._given.restarts_alone and not self._led_out() and self._alone < ALONE
        lost = (ProcessDiedError, ExchangeError) if self._given.elastic else ProcessDiedError  # they go on without it
        return alone and handle.ended() and isinstance(_failure(handle), lost)

    def _start_alone(self, rank: int) -> None:
        self._alone += 1
        self._restarts += 1
        then = "it joins the others, who go on" if self._given.elastic else "it goes on from the last committed round"
        self._log(f"{self._name(rank)} was lost: starting it again; {then}")
        if self._given.elastic:
            PolicyCalls(self._dataflow, self.policy, self._life).lose_rank(rank)
        self._handles[rank] = self._start(rank)

    def _led_out(self) -> bool:
        """Whether trainers that come and go have nothing left to join: rank 0 has ended, and the lighthouse with it."""
        return self._given.elastic and self._handles[0].ended()

    def _ended(self) -> bool:
        """Whether all trainers have ended, or one has failed."""
        return (
            self._led_out()
            or all(handle.ended() for handle in self._handles)
            or any(
                handle.ended() and _failure(handle) is not None and not self._starts_again(rank, handle)
                for rank, handle in enumerate(self._handles)
            )
        )

    def _wait(self) -> dict[str, Any]:
        """What rank 0 returned. Raises what a trainer raised, or ProcessDiedError.

        When one trainer fails, the others raise ExchangeError because they lost it. So this waits for the error of the
        one that failed, and raises an ExchangeError only if no other error follows. Once rank 0 has ended, trainers
        that come and go end with it.
        """
        deadline = time.monotonic() + GRACE_S
        while True:
            left = self.running()  # before looking at those that have ended: one may end meanwhile
            ended = self._handles[:1] if self._led_out() else [each for each in self._handles if each not in left]
            failures = [failure for each in ended if (failure := _failure(each)) is not None]
            for failure in failures:
                if self._led_out() or not isinstance(failure, ExchangeError):
                    raise failure
            late = time.monotonic() > deadline
            if failures and (late or not left):
                raise failures[-1]
            if not left or (late and self._led_out()):
                found: dict[str, Any] = self._handles[0].result()
                return found
            wait(left, 0.1)

    def _check_deaths(self, error: ProcessDiedError | ExchangeError) -> None:
        """Raise ProcessDiedError where trainers end again and again."""
        records = metrics.read(self._files)
        versions = records[-1]["version"] if records else 0
        self._futile = 1 if versions > self._versions else self._futile + 1
        self._versions = versions
        if self._futile >= DEATHS:
            raise ProcessDiedError(
                f"policy {self.policy}: its trainers ended {DEATHS} times without a new version in between: {error}",
                process=self.policy,
            ) from None

    def _close(self) -> None:
        for handle in self._handles:
            handle.close()


class Trainers:
    """All trainers of a run; they start at once. log: shows a person one line."""

    def __init__(self, recipe: Recipe, dataflow: Any, log: Callable[[str], None]) -> None:
        self._trainers = [PolicyTrainers(recipe, name, dataflow, log) for name in recipe.policies]

    def running(self) -> list[ProcessHandle]:
        """Those that have not ended."""
        return [handle for each in self._trainers if each.result is None for handle in each.running()]

    def ended(self) -> bool:
        """Whether the trainers of all policies have."""
        return all(each.result is not None for each in self._trainers)

    def results(self) -> dict[str, dict[str, Any]]:
        """The last version, digest and step of each policy whose trainers have ended, and their restarts."""
        return {each.policy: each.result for each in self._trainers if each.result is not None}

    def poll(self) -> None:
        """Collect the results of those that ended, and start those again that died.

        Raises what a trainer raised, ProcessDiedError if those of a policy die again and again.
        """
        for each in self._trainers:
            each.poll()


def _failure(handle: ProcessHandle) -> Exception | None:
    """What a process that has ended raised, or that it died; None where it returned."""
    try:
        handle.result()
    except Exception as error:  # noqa: BLE001  # raised by whoever asks
        return error
    return None
