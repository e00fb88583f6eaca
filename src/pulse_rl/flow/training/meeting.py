"""Trainers of a policy of which one that was killed is started again alone.

    StoreExchange               what a round sends goes through an object store (`trainer_store`, `pulse.StoreGroup`)
    elastic.ElasticExchange     a round goes on without a trainer that is killed (`elastic`, `pulse.Membership`)

What is left to agree on within a run (the version of a round, the metrics, who has written its checkpoint) goes through
the Dataflow, which every process of a run reaches. A trainer that is started again takes part from the round that is
open then, or from the next one: so the others wait, in a round, only for what those do who were there when it began.
"""

import time
from collections.abc import Mapping
from typing import Any, Self

import torch

from pulse_rl import Membership, StoreGroup
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.exchange import Rounds
from pulse_rl.flow.training.group import merge_rounds
from pulse_rl.flow.training.join import IDLE_S, TIMEOUT_S


class RestartableTrainers(Rounds):
    """Trainers that agree through the Dataflow; what rounds are exchanged through is up to the subclasses."""

    def __init__(
        self,
        recipe: PolicyRecipe,
        rank: int,
        calls: PolicyCalls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._rank, self._calls = rank, calls
        super().__init__(recipe, model, optimizer, self._meet(recipe))
        self._barriers = 0  # in this round

    def __enter__(self) -> Self:
        super().__enter__()
        self._calls.share("joined", self._rank, self.loco.round)
        return self

    @property
    def step(self) -> int:
        """Steps done."""
        return self.loco.round * self._recipe.round_steps

    def end_round(self, record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        exchanged = self.exchanged()
        self._barriers = 0
        found = self._gather("record", (record, exchanged))
        return merge_rounds(self._recipe, self._elements, found.values())

    def agree(self, number: int) -> int:
        what = f"version {self.loco.round}"
        found = self._calls.share(what, self._rank, number)
        while 0 not in found:
            time.sleep(IDLE_S)
            found = self._calls.shared(what)
        return int(found[0])

    def barrier(self) -> None:
        self._barriers += 1
        self._gather(f"barrier {self._barriers}", True)

    def _meet(self, recipe: PolicyRecipe) -> StoreGroup | Membership:
        """What this trainer's rounds are exchanged through."""
        raise NotImplementedError

    def _gather(self, what: str, value: Any) -> dict[int, Any]:
        """The values, by rank, of all trainers that were there when the last round began."""
        what = f"{what} {self.loco.round}"
        found = self._calls.share(what, self._rank, value)
        while not _there(self._calls.shared("joined"), self.loco.round) <= found.keys():
            time.sleep(IDLE_S)
            found = self._calls.shared(what)
        return dict(sorted(found.items()))


class StoreExchange(RestartableTrainers):
    """A TrainerGroup whose rounds go through a store."""

    def _meet(self, recipe: PolicyRecipe) -> StoreGroup:
        assert recipe.trainer_store is not None
        return StoreGroup(recipe.trainer_store, rank=self._rank, world_size=recipe.trainers, timeout=TIMEOUT_S)


def _there(joined: Mapping[int, int | None], round: int) -> set[int]:
    """The ranks that have joined before a round.

    joined: rank → the rounds that were done when it did; None: it died, or is still joining.
    """
    return {rank for rank, rounds in joined.items() if rounds is not None and rounds < round}
