"""Trainers of a policy that come and go (`elastic`): a round goes on without one that is killed (`pulse.Membership`).

Rank 0 runs torchft's lighthouse, and shares its address through the Dataflow. So when rank 0 dies, all start again from
their checkpoints. Any other trainer is started again alone, and waits until the others' exchange ends.

The driver tells the Dataflow when a trainer has died: then no other waits for what it would have shared.
"""

import time
from typing import Any, Self

from pulse_rl import Membership
from pulse_rl.errors import require
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.join import IDLE_S, TIMEOUT_S, own_address
from pulse_rl.flow.training.meeting import RestartableTrainers

LIGHTHOUSE = "lighthouse"  # what rank 0 shares: the lighthouse's URL


class ElasticExchange(RestartableTrainers):
    """A TrainerGroup whose rounds are of the trainers that live."""

    def _meet(self, recipe: PolicyRecipe) -> Membership:
        host = own_address()
        self._lighthouse = _start_lighthouse(self._calls, host) if self._rank == 0 else None
        while not (found := self._calls.shared(LIGHTHOUSE)):
            time.sleep(IDLE_S)
        self._members = Membership(found[0], f"trainer-{self._rank}", timeout=TIMEOUT_S, host=host)
        return self._members

    def __enter__(self) -> Self:
        # All begin together, so the first round is of all. When one is started again, all have been here before.
        found = self._calls.share("joined", self._rank, None)
        while len(found) < self._recipe.trainers:
            time.sleep(IDLE_S)
            found = self._calls.shared("joined")
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._members.close()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def _start_lighthouse(calls: PolicyCalls, host: str) -> Any:
    """Start torchft's lighthouse in this process, and share its URL."""
    server = require("torchft.coordination", "ft").LighthouseServer(
        bind=f"{host}:0",
        min_replicas=1,  # nobody reaches a lighthouse in rank 0's process without rank 0
        join_timeout_ms=1000 * TIMEOUT_S,  # one that has not ended the exchange yet may wait for batches
    )
    calls.share(LIGHTHOUSE, 0, f"http://{host}:{server.address().rpartition(':')[2]}")
    return server
