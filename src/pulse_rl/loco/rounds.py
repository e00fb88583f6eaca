"""Rounds: trainers that take inner steps on their own and an outer step together.

    with pulse.PulseLoCo(model, inner_optimizer, sync_every=8) as loco:
        for batch in batches:          # each rank's own
            loss(model, batch).backward()
            inner_optimizer.step()     # every 8th ends in a round: exchange, outer step, proof
            inner_optimizer.zero_grad()

A round: every rank finds s = residual + (θ − live) and what of it to send; all exchange; g is the mean over all W
ranks; θ takes one step of SGD with Nesterov momentum along g; the live parameters become θ; and the digests of θ are
compared. (PULSELoCo: arXiv 2602.03839; DiLoCo: arXiv 2311.08105.) The inner optimizer's state stays each rank's own.
All ranks take the same number of inner steps: one that skips a step keeps the others waiting.

With overlap=n > 0 a round ends n inner steps after its begin, and its exchange goes on beside them, in a thread:

    begin   frozen = live, and all up to g is made of frozen
    end     θ takes the outer step, and live = θ − (frozen − live), in float32

So g is the same function of θ, residual and frozen as ever and what is sent and what is kept still add up to s, bit for
bit; but the n steps were taken from parameters that did not know of the round's outcome yet. They stay on top of θ and
are part of the next round's pseudo-gradient, which begins `sync_every` steps after this one did, so each inner step
counts once. (Streaming DiLoCo, arXiv 2501.18512, mixes instead: live = α·live + (1 − α)·θ. torchft has that as
fragment_sync_delay and fragment_update_alpha.) θ does not depend on when the others' bytes arrived, nor does live.

Nothing of a trainer's state changes until all that it needs of a round has arrived and been checked, and from then
on nothing can fail but the machine. So an error leaves θ, momentum and residual before the round, never amid it;
only where a worker is lost in a round's very last exchange can others stand one whole round apart, and a common
checkpoint is the way back. Where trainers come and go (`membership`), those that are left exchange a round again that
failed, and all commit it or none. Buffers (running statistics, say) are not shared.
"""

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from blake3 import blake3

from pulse_rl.errors import ExchangeError
from pulse_rl.loco import agreement, checkpoint
from pulse_rl.loco.exchange import BlamedError, BrokenPayloadError, Mean, Work
from pulse_rl.loco.gate import Sends
from pulse_rl.loco.group import Group, could_not_go_on
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.membership import Alone, Membership
from pulse_rl.loco.report import LocoReport
from pulse_rl.parallel import ordered_map, submit
from pulse_rl.weights import digests

CANNOT = -2  # in place of the first segment that holds no numbers: the rank cannot go on


class _Brought(NamedTuple):
    """What a round has brought, before anything is changed by it."""

    steps: int  # inner steps that it is made of
    sends: list[Sends]
    sent: int  # elements, of this rank
    workers: int  # whose mean it is
    ways: list[str]  # of each fragment
    means: list[Mean]  # of each segment
    work: Work


class LocalSteps(ABC):
    """What PulseLoCo and DiLoCo share: all but what is exchanged."""

    _KEPT = False  # whether there is a residual

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: int = 0,
        process_group: dist.ProcessGroup | Membership | None = None,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every: expected at least 1 inner step, found {sync_every}")
        if not 0 <= overlap < sync_every:
            raise ValueError(
                f"overlap: expected 0 to {sync_every - 1} inner steps, so that a round ends before the next begins, "
                f"found {overlap}"
            )
        if overlap and isinstance(process_group, Membership):
            raise ValueError(
                f"overlap: expected 0 with a Membership, which may exchange a round again, found {overlap}"
            )
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"expected outer_lr above 0 and outer_momentum from 0 up to, not including, 1, found {outer_lr} and "
                f"{outer_momentum}"
            )
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        stepped = {id(p) for settings in inner_optimizer.param_groups for p in settings["params"]}
        missing = [name for name, p in parameters.items() if id(p) not in stepped]
        if not parameters or missing:
            raise ValueError(
                "expected every trainable parameter in the inner optimizer, found "
                + (f"{len(missing)} that are not: {', '.join(missing[:8])}" if missing else "none that is trainable")
            )
        own = {id(p) for p in model.parameters()}
        if strangers := len(stepped - own):
            raise ValueError(
                f"expected the model's parameters alone in the inner optimizer, found {strangers} others, which no "
                "round would share: make them the model's, or give them an optimizer of their own"
            )
        self.sync_every = sync_every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.overlap = overlap
        self.round = 0  # rounds that are whole
        self.inner_steps = 0  # since the last of them began
        self.reports: list[LocoReport] = []
        self._model = model
        self._inner = inner_optimizer
        self._group = process_group if isinstance(process_group, Membership) else Group(process_group)
        self._members = self._group if isinstance(self._group, Membership) else None
        # The ranks that a checkpoint speaks of: where trainers come and go, each one's is its own.
        self._saved_as = Alone() if self._members else self._group
        self._masters = Masters(parameters, kept=self._KEPT)
        self._hook: Any = None
        self._broken = False
        self._loaded = False  # and not entered since
        self._thread = ThreadPoolExecutor(1, "pulse-round")
        self._underway: Future[_Brought] | None = None
        self._ends_at = 0  # inner steps

    @property
    def report(self) -> LocoReport | None:
        """The last round's report; None before the first."""
        return self.reports[-1] if self.reports else None

    @property
    def digest(self) -> str:
        """The digest of θ, 16 hexadecimal digits: `pulse.digest` of the trainable parameters after a round.

        With overlap, of what they were without the inner steps taken meanwhile.
        """
        return digests.to_hex(self._masters.digest())

    def __enter__(self) -> Self:
        """Make sure that all ranks hold the same, and follow the inner optimizer's steps. A collective.

        With a Membership: wait for the others' round to end, and join them with their θ, momentum and counters.

        Raises IntegrityError, naming the ranks, if their parameters, momenta, counters or options differ, ValueError if
        the parameters are not those of the state that was loaded, ExchangeError after a round that failed.
        """
        if self._hook is not None:
            raise RuntimeError("this context is entered already")
        self._refuse_broken()
        self._follow()
        if self.inner_steps == 0:
            if self._loaded and not self._masters.equal():
                raise ValueError(
                    "expected the parameters that load_state_dict left, found others: load the model before this state"
                )
            self._masters.take()
        self._loaded = False
        options = blake3(repr((type(self).__name__, self.sync_every, self._options(), self._masters.shapes)).encode())
        if self._members is not None:
            self._members.join(self, self._masters, options.hexdigest(8), self._compare)
        else:
            self._compare()
            same = {"options differ": int(options.hexdigest(8), 16)}
            agreement.compare(self._group, same, f"before round {self.round + 1}", "give all ranks the same ones")
        self._hook = self._inner.register_step_post_hook(self._stepped)
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop following. Inner steps since the last round stay where they are: in the live parameters.

        A round that is under way is ended first, which is a collective.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._underway is not None:
            try:
                self.sync()
            except Exception as failed:
                if not isinstance(exception[1], BaseException):
                    raise
                exception[1].add_note(f"round {self.round + 1}, which was under way, failed too: {failed}")

    def state_dict(self, *, workers: int | None = None) -> dict[str, Any]:
        """θ, momentum, this rank's residual and the counters; tensors are views. `checkpoint` has the layout.

        workers: of the checkpoint that is to be loaded into the result, where it had another number of ranks.
        Raises RuntimeError while a round is under way: half of its state is on the network.
        """
        if self._underway is not None:
            raise RuntimeError(
                f"state_dict: expected no round under way, found round {self.round + 1}: call it "
                f"{self._ends_at - self.inner_steps} inner steps later, or after sync() on all ranks, which ends it now"
            )
        return checkpoint.state_dict(self, self._masters, self._saved_as, workers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state, before the context is entered; after whole rounds the live parameters become θ, too.

        Raises ValueError if the state is of another model or lacks a residual that this rank has to take over.
        """
        if self._hook is not None:
            raise RuntimeError("load_state_dict: expected a call before the context is entered, found it entered")
        self._follow()
        checkpoint.load_state_dict(self, self._masters, self._saved_as, state)
        self._loaded = True

    def sync(self) -> LocoReport:
        """One round, now, or the end of the one that is under way. A collective, called by the inner steps.

        Raises ExchangeError if a worker is lost or cannot go on (with a Membership: if this one is), FloatingPointError
        if an element of a pseudo-gradient is infinite or no number, PatchFormatError for a payload that is broken (θ is
        that of the round before in all three), and IntegrityError if the ranks' θ differ after the round.
        """
        clock = time.perf_counter()
        if self._members is not None and self._hook is None:
            raise RuntimeError("sync: expected a call within the context, where the other trainers are known")
        if self._underway is None:
            self._follow()
            brought = self._collect(self.inner_steps, self._claim())
        else:
            brought = self._landed()
            self._follow()
        work = brought.work
        work.start()
        committing = submit(self._thread, self._commit, brought)
        try:
            wait([committing])
        except BaseException:
            wait([committing])  # an interruption is let out when the round is whole
            raise
        total = committing.result()
        work.spent("outer")
        if self._members is not None:
            self._members.settle(lambda: self._prove(total))
        else:
            self._prove(total)
        work.spent("exchange")
        self._broken = False
        work.stalled += time.perf_counter() - clock
        report = self._report(brought, digests.to_hex(total))
        self.reports.append(report)
        return report

    def _stepped(self, *_: object) -> None:
        self.inner_steps += 1
        if self._underway is not None:
            if self.inner_steps >= self._ends_at:
                self.sync()
        elif self.inner_steps >= self.sync_every:
            if self.overlap:
                self._begin()
            else:
                self.sync()

    def _follow(self) -> None:
        """Know where the live parameters are now. One that is frozen for a while is shared all the same."""
        shared = self._masters.shapes
        self._masters.follow({n: p for n, p in self._model.named_parameters() if p.requires_grad or n in shared})

    def _claim(self) -> Work:
        """A round begins; if it does not come to its end, there is no other."""
        self._refuse_broken()
        self._broken = True
        return Work()

    def _refuse_broken(self) -> None:
        if self._broken:
            raise ExchangeError("an earlier round failed: start the trainers again from their last checkpoint")

    def _begin(self) -> None:
        """Have a thread collect a round while inner steps go on."""
        clock = time.perf_counter()
        self._follow()
        work = self._claim()
        self._masters.freeze()
        self._ends_at = self.inner_steps + self.overlap
        self._underway = self._thread.submit(self._collect, self.inner_steps, work)
        work.stalled += time.perf_counter() - clock

    def _landed(self) -> _Brought:
        """What the round under way has brought, once it is there."""
        assert self._underway is not None
        wait([self._underway])  # an interruption here leaves it under way
        underway, self._underway = self._underway, None
        if underway.exception() is not None:
            self._masters.thaw()
        return underway.result()

    def _collect(self, steps: int, work: Work) -> _Brought:
        """Exchange what this rank has to send, until all have all of it; changes nothing."""
        try:
            sends, broken = self._find()
        except Exception:
            self._group.gather_numbers([CANNOT] * (1 + len(self._masters.fragments)))
            raise
        work.spent("gate")
        counts = self._counts(sends)
        while True:
            found: tuple[list[str], list[Mean]] | None = None
            try:
                found = self._gather(sends, counts, broken, work)
            except (ExchangeError, BrokenPayloadError) as error:
                # Where trainers come and go, the one whose payload is broken goes, and the others exchange again.
                if self._members is None or isinstance(error, BlamedError):
                    raise
            workers = self._group.size
            if self._members is not None and not self._members.agree(arrived=found is not None):
                found = None
            work.spent("exchange")
            if found is not None:
                return _Brought(steps, sends, sum(counts), workers, *found, work)

    def _commit(self, brought: _Brought) -> int:
        """Take the outer step; returns θ's digest."""
        masters, sends = self._masters, brought.sends

        def commit(number: int) -> int:
            segment = masters.segments[number]
            gradient = brought.means[number].dense(segment.size)
            return masters.commit(
                segment, sends[number] if sends else None, gradient, self.outer_lr, self.outer_momentum
            )

        total = (masters.empty_digest + sum(ordered_map(commit, range(len(brought.means))))) & digests.MASK
        masters.thaw()
        self.round += 1
        self.inner_steps -= brought.steps
        return total

    def _gather(self, sends: list[Sends], counts: list[int], broken: int, work: Work) -> tuple[list[str], list[Mean]]:
        """Exchange all fragments: the way each went and the mean of each segment."""
        masters = self._masters
        table = self._group.gather_numbers([broken, *counts])
        work.spent("exchange")
        for rank, number in enumerate(table[:, 0].tolist()):
            if number == CANNOT:
                raise ExchangeError(could_not_go_on(rank, "its own error says why"))
            if number >= 0:
                message = (
                    f"rank {rank}, round {self.round + 1}: expected finite numbers in the pseudo-gradient of "
                    f"{masters.segments[number].name!r}, found an infinity or NaN"
                )
                alone = self._members is not None and rank != self._group.rank  # it goes, and the others go on
                raise ExchangeError(message) if alone else FloatingPointError(message)
        means: list[Mean] = []
        ways = []
        for fragment, column in zip(masters.fragments, table[:, 1:].T.tolist(), strict=True):
            way, found = self._exchange(fragment, sends, column, work)
            ways.append(way)
            means += found
        return ways, means

    def _prove(self, total: int) -> None:
        """Make sure that all ranks hold the same θ, of this digest, after a round. A collective."""
        remedy = "start again from the last checkpoint"
        agreement.compare(self._group, {"θ differs": total}, f"after round {self.round}", remedy)

    def _compare(self) -> None:
        """Make sure that all ranks hold the same state before a round. A collective."""
        state = {
            "parameters differ": self._masters.digest(),
            "outer momentum differs": self._masters.momentum_digest(),
            "rounds done differ": self.round,
            "inner steps since the last round differ": self.inner_steps,
        }
        agreement.compare(self._group, state, f"before round {self.round + 1}", "load one checkpoint on all ranks")

    def _report(self, brought: _Brought, digest: str) -> LocoReport:
        elements, sent, ways, work = self._masters.elements, brought.sent, brought.ways, brought.work
        return LocoReport(
            round=self.round,
            workers=brought.workers,
            elements=elements,
            sent=sent,
            density=sent / max(1, elements),
            exchange=ways[0] if len(set(ways)) == 1 else "mixed",  # type: ignore[arg-type]
            sent_nbytes=work.sent,
            received_nbytes=work.received,
            dense_nbytes=4 * elements,
            digest=digest,
            stalled_s=work.stalled,
            **{f"{part}_s": work.seconds[part] for part in ("gate", "encode", "exchange", "decode", "outer")},
        )

    def _options(self) -> tuple[object, ...]:
        """All that has to be the same on all ranks, beside the state."""
        return (self.outer_lr, self.outer_momentum, self.overlap)

    @abstractmethod
    def _find(self) -> tuple[list[Sends], int]:
        """What to send of each segment (none: all of it), and the first segment that holds no numbers, or −1."""

    @abstractmethod
    def _counts(self, sends: list[Sends]) -> list[int]:
        """How many elements of each fragment are sent."""

    @abstractmethod
    def _exchange(self, fragment: range, sends: list[Sends], counts: list[int], work: Work) -> tuple[str, list[Mean]]:
        """Exchange a fragment; returns the way it went and the mean of each segment. counts: of each rank."""
