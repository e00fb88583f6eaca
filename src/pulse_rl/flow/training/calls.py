"""What the trainers of one policy ask of the Dataflow, and tell it."""

import os
from collections.abc import Mapping
from typing import Any

from pulse_rl.flow.data.board import workers
from pulse_rl.flow.samples import PolicyBatch


class PolicyCalls:
    """The Dataflow's calls, for one policy.

    life: a name for the trainers that were started together, so that what they share is not mistaken for what an
    earlier life has shared.
    """

    def __init__(self, dataflow: Any, name: str, life: str) -> None:
        self._dataflow, self._name, self._life = dataflow, name, life

    def begin(self, step: int, version: int) -> None:
        """The trainers start, or start again: their weights hold so many steps, and are published as this version."""
        self._dataflow.begin(self._name, step, version)

    def begin_rank(self, rank: int, step: int) -> None:
        """One trainer starts while the others go on."""
        self._dataflow.begin_rank(self._name, rank, step)

    def lose_rank(self, rank: int) -> None:
        """One trainer died, and the others go on without it."""
        self.share("joined", rank, None)
        self._dataflow.lose_rank(self._name, rank)

    def pull(self, number: int) -> PolicyBatch | None:
        """The batch of that number; None until there is one, and when the policy is stopping."""
        found = self._dataflow.pull(self._name, number)
        return found and PolicyBatch(*found)

    def publish(self, version: int, digest: str, step: int) -> None:
        """The store holds a new version, with so many steps."""
        self._dataflow.publish(self._name, version, digest, step)

    def commit(self, step: int) -> None:
        """A checkpoint holds so many steps."""
        self._dataflow.commit(self._name, step)

    def finish(self) -> None:
        """The trainers need no batch any more."""
        self._dataflow.finish(self._name)

    def stopping(self) -> bool:
        """Whether there will be no further batch."""
        return bool(self._dataflow.stopping(self._name))

    def report(self, facts: Mapping[str, Any]) -> None:
        """Facts about the trainers, to be shown."""
        self._dataflow.report(f"{self._name}/trainer", dict(facts) | {"pid": os.getpid()})

    def workers(self) -> dict[str, dict[str, Any]]:
        """What each worker that has not left holds of this policy."""
        there = workers(self._dataflow.board())
        return {who: facts["policies"].get(self._name, {}) for who, facts in there.items()}

    def dropped(self) -> int:
        """Groups that were dropped, for whatever reason."""
        return sum(self._dataflow.status()["policies"][self._name]["dropped"].values())

    def share(self, what: str, rank: int, value: Any) -> dict[int, Any]:
        """Put a trainer's value of something; returns the values of all trainers so far, by rank."""
        return dict(self._dataflow.share(f"{self._name} {self._life} {what}", rank, value))

    def shared(self, what: str) -> dict[int, Any]:
        """The values of something that trainers have put, by rank."""
        return dict(self._dataflow.shared(f"{self._name} {self._life} {what}"))
