"""Trainers that come and go: who takes part in a round, agreed on through torchft's lighthouse.

    with (
        pulse.Membership("http://host:29510", "trainer-0") as members,
        pulse.PulseLoCo(model, inner_optimizer, sync_every=8, process_group=members),
    ): ...

The lighthouse (`torchft_lighthouse --min_replicas 2`) hears every trainer's heartbeat. At the end of an exchange every
trainer that lives asks it for a quorum, and lays down an offer: has all of this round arrived here? The lighthouse
answers all of them with one table of offers, so all decide the same:

    all have all of it    all commit the round; trainers that wait to join are in the group of the next
    some have not         none commits it: those that are left form a group and exchange it again, for a mean over
                          their own number; no inner step is redone, for what each sends does not depend on the others

So the lighthouse's answer is the point where a round is committed. torchft's Manager is not used, only the lower
interface below it (https://docs.pytorch.org/torchft/coordination.html) and its Gloo group: a Manager commits for one
replica alone, and one that could not commit takes over another's state, which here would cost it its residual.

A newcomer gets the counters, θ and the momentum from a trainer that has them, and starts with an empty residual. A
trainer that the others went on without, because the lighthouse did not hear it, ends with an error that says so;
started again, it is a newcomer. Groups are Gloo's: payloads are in host memory in any case.
"""

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pulse_rl.errors import ExchangeError, IntegrityError, require
from pulse_rl.loco.checkpoint import Counters
from pulse_rl.loco.group import Group, lost
from pulse_rl.loco.masters import Masters

log = logging.getLogger(__name__)

HEARTBEAT = timedelta(milliseconds=100)  # torchft's default; its lighthouse takes 5 s without one for a death
PATIENCE = timedelta(days=1)  # for an answer: a newcomer waits for the end of a round, however long that is
_GONE: Any = object()  # a process group that is none: None would be the default one


class Offer(msgspec.Struct, frozen=True):
    """What a trainer tells the others when it asks for a quorum."""

    round: int  # rounds that are whole here; −1 amid the transfer of another's state
    arrived: bool  # whether all of the next one is here
    group: str  # the last that was agreed on, later ones sort higher; "" for a newcomer
    options: str  # a hash of what has to be the same on all trainers, beside the state

    @property
    def standing(self) -> tuple[bool, int, str]:
        """Those of the highest hold the state: the newest group, or where all are new those that are furthest on."""
        return self.group != "", self.round, self.group


class Alone(Group):
    """A trainer by itself, rank 0 of 1: before it has met others, and in checkpoints, where trainers come and go."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group = None
        self._device = torch.device("cpu")


class Membership(Alone):
    """A trainer's place among trainers that come and go: the `process_group` of one PulseLoCo or DiLoCo.

    lighthouse: the URL of a torchft lighthouse; its join timeout (of the command 60 s, of a LighthouseServer made in
    Python 0.1 s) is longer than trainers are apart at the end of an exchange. name: this trainer's own; ranks are in
    the order of names. timeout: seconds that an exchange may take, the slowest trainer's lag included, and the
    transfer of 8 bytes a parameter to a newcomer. host: where the other trainers reach this one, by default the
    machine's name. From here until `close` the others may wait for this trainer, so the model is loaded before.

    Raises MissingExtraError without torchft, ExchangeError if the lighthouse does not answer within the timeout.
    """

    def __init__(self, lighthouse: str, name: str, *, timeout: float = 60.0, host: str | None = None) -> None:
        torchft = require("torchft", "ft")
        coordination = require("torchft.coordination", "ft")
        super().__init__()
        self.name = name
        self._gloo = torchft.ProcessGroupGloo
        self._lighthouse = lighthouse
        self._timeout = timedelta(seconds=timeout)
        self._id = f"{name}:{uuid.uuid4()}"  # a trainer that is started again is another one
        self._joined: Counters | None = None
        self._closed = False
        self._agreed = ""  # the group of which this trainer has the state
        self._ids: list[str] = []  # the members of the group, by rank
        self._rendezvous = ""  # where it is to be formed; "" once it stands
        self._transfers: list[tuple[int, int]] = []  # from which rank to which newcomer
        host = host or socket.gethostname()
        try:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        except RuntimeError as error:
            raise ExchangeError(
                f"host: expected a name or address where other trainers reach this one, found {host!r}, where it does "
                f"not reach itself ({str(error).splitlines()[0]})"
            ) from error
        self._address = f"{host}:{self._store.port}"
        try:
            # It sends heartbeats from a thread that no Python code can hold up.
            self._server = coordination.ManagerServer(
                replica_id=self._id,
                lighthouse_addr=lighthouse,
                hostname=host,
                bind="[::]:0",
                store_addr=self._address,
                world_size=1,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=self._timeout,
                quorum_retries=0,
            )
            self._client = coordination.LighthouseClient(lighthouse, self._timeout)
        except (RuntimeError, TimeoutError) as error:
            raise self._silent(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the others go on without this trainer."""
        self._leave()
        self._closed = True
        self._server.shutdown()

    def join(self, trainer: Counters, masters: Masters, options: str, compare: Callable[[], None]) -> None:
        """Take part from now on: wait for the others' round to end, and take over their state.

        options: a hash of what has to be the same on all. compare: a collective that raises if states differ.
        Raises as `agree` does.
        """
        if self._closed or self._joined not in (None, trainer):
            raise ExchangeError(
                f"{self.name}: expected an open Membership of one PulseLoCo or DiLoCo, found one that is "
                f"{'closed' if self._closed else 'of another already'}: make one for each"
            )
        self._joined = trainer
        self._trainer, self._masters, self._options, self._compare = trainer, masters, options, compare
        self._meet(arrived=False)
        self.settle(compare)

    def agree(self, *, arrived: bool) -> bool:
        """Whether to commit the round, or else to exchange it again, in a group that stands then.

        arrived: whether all of it is here. Raises ExchangeError if the lighthouse does not answer or the others went
        on without this trainer, IntegrityError if it has other options than they.
        """
        if self._meet(arrived):
            return True
        self.settle(self._compare)
        return False

    def settle(self, prove: Callable[[], None]) -> None:
        """After a round: prove that all hold the same; if others come or go, form a group and compare all in it."""
        while True:
            try:
                if self._rendezvous:
                    self._form()
                    self._hand_over()
                    self._compare()
                else:
                    prove()
                return
            except ExchangeError:
                self._meet(arrived=False)

    def _meet(self, arrived: bool) -> bool:
        """Meet all trainers that live, and agree on a group; returns whether all of the round is at all of them."""
        if not arrived:
            self._leave()
        while True:
            created, members = self._quorum(arrived)
            offers = {id_: offer for id_, (offer, _) in members.items()}
            highest = max(offer.standing for offer in offers.values())
            standing = [id_ for id_, offer in offers.items() if offer.standing == highest]
            options = offers[standing[0]].options
            self._check(highest, self._id in standing, options)
            between = not highest[0] or all(offers[id_].arrived for id_ in standing)
            ids = [
                id_
                for id_, offer in sorted(offers.items())
                if offer.options == options and (id_ in standing or (between and not offer.group))
            ]
            if self._id in ids:
                break
        if arrived and between and ids == self._ids:
            return True
        self._leave()
        log.info("%s: a group of %d trainers: %s", self.name, len(ids), ", ".join(id_.split(":")[0] for id_ in ids))
        self._ids = ids
        self._rendezvous = f"{members[ids[0]][1]}/pulse/{created}"
        givers = [rank for rank, id_ in enumerate(ids) if id_ in standing]
        takers = [rank for rank, id_ in enumerate(ids) if id_ not in standing]
        self._transfers = [(givers[number % len(givers)], taker) for number, taker in enumerate(takers)]
        if self._id in standing:
            self._agreed = created
        return between

    def _check(self, highest: tuple[bool, int, str], stands: bool, options: str) -> None:
        """Raise if this trainer has no place among those that hold the state, or nobody holds it."""
        if self._agreed and not stands:
            raise ExchangeError(
                f"the other trainers went on without {self.name}, which the lighthouse did not hear in round "
                f"{self._trainer.round + 1}: start it again, and it joins them"
            )
        if highest[1] < 0:
            raise ExchangeError(
                f"{self.name}: expected a trainer that holds the shared weights, found none, since the last was lost "
                "while it handed them over: start the trainers again from their last checkpoint"
            )
        if self._options != options:
            raise IntegrityError(
                f"expected {self.name} to have the model, sync_every and options of the trainers that it joins, found "
                "others: start it again with theirs"
            )

    def _form(self) -> None:
        gloo = self._gloo(self._timeout)
        self.rank, self.size = self._ids.index(self._id), len(self._ids)
        with lost():
            gloo.configure(self._rendezvous, self._id, self.rank, self.size)
        self._group = gloo.parent

    def _hand_over(self) -> None:
        """Give newcomers the counters, θ and the momentum. A newcomer's residual becomes empty."""
        trainer, masters = self._trainer, self._masters
        counters = np.array([trainer.round, trainer.inner_steps], np.int64)
        state = [
            counters,
            *(array for segment in masters.segments for array in (segment.shared, segment.momentum)),
        ]
        for giver, taker in self._transfers:
            if self.rank == giver:
                self._transfer(state, taker, dist.isend)
            elif self.rank == taker:
                trainer.round = -1
                self._transfer(state, giver, dist.irecv)
                for residual in masters.residual.values():
                    residual.fill(0)
                masters.put()
                trainer.round, trainer.inner_steps = counters.tolist()
        self._agreed = self._rendezvous.rpartition("/")[2]
        self._rendezvous = ""

    def _transfer(self, arrays: Sequence[Any], rank: int, way: Callable[..., Any]) -> None:
        with lost():
            for array in arrays:
                way(torch.from_numpy(array), None, self._group, 0, rank).wait()

    def _leave(self) -> None:
        """Let go of the group: when nothing refers to it, its connections end, and with them its members' waits."""
        self._group = _GONE
        self._ids = []

    def _quorum(self, arrived: bool) -> tuple[str, dict[str, tuple[Offer, str]]]:
        """The lighthouse's answer, the same for all that are in it: its name, and each one's offer and store."""
        answers: SimpleQueue[Any] = SimpleQueue()
        offer = Offer(self._trainer.round, arrived, self._agreed, self._options)

        def ask() -> None:
            until = None
            while True:
                try:
                    answer = self._client.quorum(
                        replica_id=self._id,
                        timeout=PATIENCE,
                        address=self._server.address(),
                        store_address=self._address,
                        step=max(0, offer.round),
                        world_size=1,
                        shrink_only=False,
                        data=msgspec.to_builtins(offer),
                    )
                    return answers.put(answer)
                except (RuntimeError, TimeoutError) as error:
                    # A lighthouse has no state of its own: one that is started again serves as well.
                    until = until or time.monotonic() + self._timeout.total_seconds()
                    if time.monotonic() > until:
                        return answers.put(error)
                    time.sleep(0.5)

        # In a thread, since Ctrl-C does not end a call into torchft.
        threading.Thread(target=ask, daemon=True).start()
        answer = answers.get()
        if isinstance(answer, Exception):
            raise self._silent(answer) from answer
        members = {}
        for member in answer.participants:
            try:
                members[member.replica_id] = msgspec.convert(member.data, Offer), member.store_address
            except msgspec.ValidationError as error:
                raise ExchangeError(
                    f"expected the trainers of one run at the lighthouse {self._lighthouse}, found {member.replica_id} "
                    f"({error}): give each run a lighthouse of its own"
                ) from error
        return f"{answer.created.seconds:012}.{answer.created.nanos:09}", members

    def _silent(self, error: Exception) -> ExchangeError:
        return ExchangeError(
            f"expected an answer from the lighthouse at {self._lighthouse}, found none: see that it runs and is "
            f"reached, then start the trainers again from their last checkpoint ({error})"
        )
