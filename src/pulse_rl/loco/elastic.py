"""Trainers that come and go: who takes part in a round, agreed on through torchft's lighthouse.

    with (
        pulse.Membership("http://host:29510", "trainer-0") as members,
        pulse.PulseLoCo(model, inner_optimizer, sync_every=8, group=members),
    ): ...

The lighthouse (`torchft_lighthouse --min_replicas 2`) hears every trainer's heartbeat. At the end of an exchange every
trainer that lives asks it for a quorum, and reports whether all of this round has arrived here. The lighthouse
answers all of them with one table of reports, so all decide the same:

    all have all of it    all commit the round; trainers that wait to join are in the group of the next
    some have not         none commits it: those that are left form a group and exchange it again, for a mean over
                          their own number; no inner step is redone, for what each sends does not depend on the others

So the lighthouse's answer is the point where a round is committed. There is at most one Group at a time:

    apart      no group: before `join`, and as soon as one has to be left (the old group is released)
    agreed     `_next` names the members of the next group, which is not connected yet
    formed     the group is connected, newcomers have the state, and all have compared theirs

torchft's Manager is not used: a Manager commits for one replica alone, and one that could not commit takes over
another's state, which here would cost it its residual. A newcomer gets the counters, θ and the momentum from a trainer
that has them, and starts with an empty residual. A trainer that the others went on without, because the lighthouse did
not hear it, ends with an error; started again, it is a newcomer. Groups are Gloo's: payloads are in host memory in any
case.
"""

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from pulse_rl.errors import ExchangeError, IntegrityError, require
from pulse_rl.group.collectives import Group, RankPlace, torch_errors
from pulse_rl.loco import log8
from pulse_rl.loco.lighthouse import Lighthouse, Quorum, QuorumReport
from pulse_rl.loco.members import TRAINERS, GroupMembers, fingerprint
from pulse_rl.loco.trainer import Trainer
from pulse_rl.logs import logger

log = logger(__name__)


class Decision(NamedTuple):
    """What all trainers make of one quorum, alike."""

    name: str  # of the quorum, and of the group that it leads to
    ids: list[str]  # the members of the next group, by rank
    holders: list[str]  # the trainers that hold the state of the run
    whole: bool  # whether the holders' state is whole
    options: str  # the holders'
    between: bool  # whether newcomers may join: no round is to be exchanged again
    rendezvous: str  # where the members connect

    def transfers(self) -> list[tuple[int, int]]:
        """Who hands the state over to whom: (rank, newcomer's rank)."""
        givers = [rank for rank, id_ in enumerate(self.ids) if id_ in self.holders]
        takers = [rank for rank, id_ in enumerate(self.ids) if id_ not in self.holders]
        return [(givers[number % len(givers)], taker) for number, taker in enumerate(takers)]


def decide(quorum: Quorum) -> Decision:
    """Who holds the state, who is in the next group, and whether the round is committed.

    The holders are those of the newest group, or where all are new those with the most rounds. They commit the round
    only if all of it is at all of them. Newcomers with other options are left out.
    """
    reports = quorum.reports
    highest = max(report.progress for report in reports.values())
    holders = [id_ for id_, report in reports.items() if report.progress == highest]
    options = reports[holders[0]].options
    established, whole, _, _ = highest
    between = not established or all(reports[id_].arrived for id_ in holders)
    ids = [
        id_
        for id_, report in sorted(reports.items())
        if report.options == options and (id_ in holders or (between and not report.group))
    ]
    rendezvous = f"{quorum.stores[ids[0]]}/pulse/{quorum.name}"
    return Decision(quorum.name, ids, holders, whole, options, between, rendezvous)


class ElasticMembers(GroupMembers):
    """One trainer's view of the trainers that take part, as they come and go.

    lighthouse, name, host: as of Membership. timeout: seconds.
    """

    elastic = True
    no_overlap = "with a Membership, which may exchange a round again"
    place = RankPlace(0, 1)  # in checkpoints: each trainer saves its own residual only
    workers = 0

    def __init__(self, lighthouse: str, name: str, *, timeout: float, host: str | None) -> None:
        self.name = name
        self.turn = log8.turn_of_name(name)
        self._gloo = require("torchft", "ft").ProcessGroupGloo
        self._timeout = timedelta(seconds=timeout)
        self._id = f"{name}:{uuid.uuid4()}"  # a trainer that is started again is another one
        self._lighthouse = Lighthouse(lighthouse, self._id, timeout=self._timeout, host=host)
        self._closed = False
        self._joined: Trainer | None = None
        self._group: Group | None = None
        self._ids: list[str] = []  # the members of the group, by rank
        self._next: Decision | None = None  # the group to be formed
        self._agreed = ""  # the last group whose state this trainer has

    def close(self) -> None:
        """Leave the run."""
        self._leave()
        self._closed = True
        self._lighthouse.close()

    @property
    def group(self) -> Group:
        """The group that exchanges now. Raises ExchangeError before `join`."""
        if self._group is None:
            raise ExchangeError(f"{self.name}: this trainer is in no group: enter PulseLoCo or DiLoCo first")
        return self._group

    def join(self, trainer: Trainer) -> None:
        """Wait for the others' round to end, and take over their state. Raises as `agree` does."""
        if self._closed or self._joined not in (None, trainer):
            raise ExchangeError(
                f"{self.name}: expected an open Membership of one PulseLoCo or DiLoCo, found one that is "
                f"{'closed' if self._closed else 'of another already'}: make one for each"
            )
        self._joined = trainer
        self._meet(trainer, arrived=False)
        self._settle(trainer, trainer.compare)

    def agree(self, *, arrived: bool) -> bool:
        """Whether to commit the round; if not, a new group to exchange it again is formed.

        arrived: whether all of it is here. Raises ExchangeError if the lighthouse does not answer or the others went
        on without this trainer, IntegrityError if its options differ from theirs.
        """
        assert self._joined is not None
        if self._meet(self._joined, arrived):
            return True
        self._settle(self._joined, self._joined.compare)
        return False

    def settle(self, trainer: Trainer) -> None:
        self._settle(trainer, trainer.prove)

    def _settle(self, trainer: Trainer, prove: Callable[[Group], None]) -> None:
        """Prove that all hold the same, after forming the next group where one is agreed on.

        prove: a collective for a group that has not changed; a new one compares everything.
        """
        while True:
            try:
                if self._next is None:
                    prove(self.group)
                else:
                    self._group = self._form(self._next)
                    self._hand_over(trainer, self._group, self._next)
                    self._next = None
                    trainer.compare(self._group)
                return
            except ExchangeError:
                self._meet(trainer, arrived=False)

    def _meet(self, trainer: Trainer, arrived: bool) -> bool:
        """Agree with all trainers that live on the next group; returns whether all of the round is at all of them."""
        if not arrived:
            self._leave()
        options = fingerprint(trainer.options)
        while True:
            report = QuorumReport(trainer.round, trainer.masters.whole, arrived, self._agreed, options)
            decision = decide(self._lighthouse.ask(report))
            self._check(decision, report)
            if self._id in decision.ids:
                break  # else a newcomer, which waits for the end of the others' round
        if arrived and decision.between and decision.ids == self._ids:
            return True
        self._leave()
        names = ", ".join(id_.rpartition(":")[0] for id_ in decision.ids)
        log.info("%s: a group of %d trainers: %s", self.name, len(decision.ids), names)
        self._next = decision
        if self._id in decision.holders:
            self._agreed = decision.name
        return decision.between

    def _check(self, decision: Decision, mine: QuorumReport) -> None:
        """Raise if this trainer lost its place among those that hold the state, or nobody holds it."""
        if self._agreed and self._id not in decision.holders:
            raise ExchangeError(
                f"the other trainers went on without {self.name}, which the lighthouse did not hear in round "
                f"{mine.round + 1}: start it again, and it joins them"
            )
        if not decision.whole:
            raise ExchangeError(
                f"{self.name}: no trainer holds the shared weights: the last one was lost while it handed them over: "
                "start the trainers again from their last checkpoint"
            )
        if mine.options != decision.options:
            raise IntegrityError(
                f"{self.name} has another model, sync_every or options than the trainers that it joins: start it "
                "again with theirs",
                expected=decision.options,
                found=mine.options,
            )

    def _form(self, decision: Decision) -> Group:
        """Connect to the other members."""
        gloo = self._gloo(self._timeout)
        place = RankPlace(decision.ids.index(self._id), len(decision.ids))
        with torch_errors(TRAINERS):
            gloo.configure(decision.rendezvous, self._id, *place)
        self._ids = decision.ids
        return Group(gloo.parent, *place, wording=TRAINERS)

    def _hand_over(self, trainer: Trainer, group: Group, decision: Decision) -> None:
        """Give newcomers the counters, θ and the momentum. A newcomer's residual becomes empty."""
        masters = trainer.masters
        counters = np.array([trainer.round, trainer.inner_steps], np.int64)
        state = [counters, *(array for segment in masters.segments for array in (segment.shared, segment.momentum))]
        for giver, taker in decision.transfers():
            if group.rank == giver:
                self._transfer(group, state, taker, dist.isend)
            elif group.rank == taker:
                masters.whole = False
                self._transfer(group, state, giver, dist.irecv)
                masters.begin_anew()
                trainer.round, trainer.inner_steps = counters.tolist()
                masters.whole = True
        self._agreed = decision.name

    def _transfer(self, group: Group, arrays: Sequence[Any], rank: int, send_or_receive: Callable[..., Any]) -> None:
        with torch_errors(TRAINERS):
            for array in arrays:
                send_or_receive(torch.from_numpy(array), None, group.handle, 0, rank).wait()

    def _leave(self) -> None:
        """Release the group: its connections end, and with them the waits of its other members."""
        if self._group is not None:
            self._group.release()
        self._group = None
        self._ids = []


class Membership:
    """A trainer's place among trainers that come and go: the `group` of one PulseLoCo or DiLoCo.

    A round completes without a trainer that dies, and trainers join a run that is under way. From here until `close`
    the others may wait for this trainer, so load the model before.

    Args:
        lighthouse: The URL of a torchft lighthouse, one for each run. Its join timeout (60 s of the command, 0.1 s of a
            LighthouseServer made in Python) must be longer than trainers are apart at the end of an exchange.
        name: This trainer's name, unlike every other's. Ranks follow the order of names.
        timeout: Seconds that an exchange may take, the slowest trainer's lag included, and the transfer of 8 bytes a
            parameter to a newcomer.
        host: A name or address where the other trainers reach this one; None for the machine's name.

    Attributes:
        name: This trainer's name.

    Raises:
        MissingExtraError: torchft is not installed.
        ExchangeError: The lighthouse does not answer within the timeout, or `host` does not reach this machine.
    """

    def __init__(self, lighthouse: str, name: str, *, timeout: float = 60.0, host: str | None = None) -> None:
        self.name = name
        self._members = ElasticMembers(lighthouse, name, timeout=timeout, host=host)

    def __enter__(self) -> Self:
        """Return the Membership: it takes part since it was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Leave the run: the others go on without this trainer."""
        self._members.close()
