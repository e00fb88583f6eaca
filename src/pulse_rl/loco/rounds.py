"""Rounds: trainers that take inner steps on their own and an outer step together.

    with pulse.PulseLoCo(model, inner_optimizer, sync_every=8) as loco:
        for batch in batches:          # each rank's own
            loss(model, batch).backward()
            inner_optimizer.step()     # every 8th ends in a round: exchange, outer step, proof
            inner_optimizer.zero_grad()

A round: every rank finds s = residual + (θ − live) and what of it to send; all exchange; g is the mean over all W
ranks; θ takes one step of SGD with Nesterov momentum along g; the live parameters become θ; and the digests of θ are
compared. (PULSELoCo: arXiv 2602.03839; DiLoCo: arXiv 2311.08105.) All ranks take the same number of inner steps: one
that skips a step keeps the others waiting. The inner optimizer's state and buffers stay each rank's own.

From a round's begin in the caller's thread to its end a trainer counts as failed, so that any error or interruption
leaves it so: then start again from a checkpoint. It does not while a thread exchanges a round in the background; such
a round ends `overlap` inner steps later, by `sync()`, or when the context is left.

With overlap=n > 0 a round ends n inner steps after it began:

    begin   frozen = live, and everything up to g is made of frozen
    end     θ takes the outer step, and live = θ − (frozen − live), in float32

So g is the same function of θ, residual and frozen as without overlap, and what is sent and what is kept still add up
to s, bit for bit; but the n steps were taken from parameters without the round's outcome. They stay on top of θ and
are part of the next round's pseudo-gradient, which begins `sync_every` steps after this one did, so each inner step
counts once. (Streaming DiLoCo, arXiv 2501.18512, mixes instead: live = α·live + (1 − α)·θ.) Neither θ nor live
depends on when the others' bytes arrived.

Nothing of a trainer's state changes until all that it needs of a round has arrived and been checked; from then on only
the machine can fail. So an error leaves θ, momentum and residual as before the round. Only where a worker is lost in a
round's very last exchange can others be one whole round apart; then start again from a common checkpoint. Where
trainers come and go (`elastic`), those that are left exchange a failed round again, and all commit it or none.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from pulse_rl.errors import ExchangeError
from pulse_rl.group.collectives import Group
from pulse_rl.loco import checkpoint
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.elastic import Membership
from pulse_rl.loco.exchange import Timings
from pulse_rl.loco.masters import Masters
from pulse_rl.loco.meeting.group import StoreGroup
from pulse_rl.loco.members import TRAINERS, FixedMembers, Members
from pulse_rl.loco.outcome import LocoReport, Outcome
from pulse_rl.loco.steps import InnerSteps, await_context, await_no_more, check_stepped, trainable, warn_unexchanged
from pulse_rl.loco.trainer import Trainer
from pulse_rl.observers import tell, telling_failures
from pulse_rl.parallel import submit
from pulse_rl.weights.names import named_parameters


class _Background(NamedTuple):
    """A round that a thread exchanges."""

    outcome: Future[Outcome]
    inner_steps: int  # that it is made of
    ends_at: int  # inner steps


@contextmanager
def _round_named(number: int) -> Iterator[None]:
    """Give an ExchangeError the number of the round, which is not known where it is raised."""
    try:
        yield
    except ExchangeError as error:
        error.round = number
        raise


def _members_of(group: dist.ProcessGroup | Membership | StoreGroup | Group | None) -> Members:
    """Who takes part in the rounds of a PulseLoCo or DiLoCo with this `group`; a benchmark's is a Group."""
    if isinstance(group, Membership | StoreGroup):
        return group._members
    return FixedMembers(group if isinstance(group, Group) else Group.of(group, TRAINERS))


class LocalSteps:
    """What PulseLoCo and DiLoCo share: all but what is exchanged."""

    _HAS_RESIDUAL = False

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        overlap: int = 0,
        group: dist.ProcessGroup | Membership | StoreGroup | None = None,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every: expected at least 1 inner step, found {sync_every}")
        if not 0 <= overlap < sync_every:
            raise ValueError(
                f"overlap: expected 0 to {sync_every - 1} inner steps, so that a round ends before the next begins, "
                f"found {overlap}"
            )
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"expected outer_lr above 0 and outer_momentum from 0 up to, not including, 1, found {outer_lr} and "
                f"{outer_momentum}"
            )
        parameters = trainable(model, inner_optimizer)
        self.sync_every = sync_every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.overlap = overlap
        self.reports: list[LocoReport] = []
        self._model = model
        self._inner = inner_optimizer
        self._members = _members_of(group)
        if overlap and self._members.no_overlap:
            raise ValueError(f"overlap: expected 0 {self._members.no_overlap}, found {overlap}")
        self._masters = Masters(parameters, with_residual=self._HAS_RESIDUAL)
        contribution = self._contribute(group)
        options = {"method": type(self).__name__, "sync_every": sync_every} | self._options()
        self._trainer = Trainer(self._masters, contribution, options, lr=outer_lr, mu=outer_momentum)
        self._steps: InnerSteps | None = None  # in the context
        self._background: _Background | None = None
        self._failed = False
        self._loaded = False  # a state was loaded, and the context not entered since
        self._thread = ThreadPoolExecutor(1, "pulse-round")
        self._fixed = options.keys()  # what all trainers compare when they begin, and a round takes from there
        await_context(model, sync_every)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__.get("_fixed", ()):
            raise AttributeError(
                f"{name}: expected {getattr(self, name)}, with which this context was made, found {value}: make "
                "another context, and load this one's state_dict into it"
            )
        super().__setattr__(name, value)

    def _contribute(self, group: object) -> Contribution:
        """What this trainer adds to each round."""
        raise NotImplementedError

    def _options(self) -> dict[str, object]:
        """All that must be the same on all ranks, apart from the state."""
        return {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum, "overlap": self.overlap}

    @property
    def round(self) -> int:
        """Rounds done."""
        return self._trainer.round

    @property
    def inner_steps(self) -> int:
        """Inner steps since the last round began."""
        return self._trainer.inner_steps

    @property
    def report(self) -> LocoReport | None:
        """The last round's report; None before the first."""
        return self.reports[-1] if self.reports else None

    @property
    def rank(self) -> int:
        """This trainer's number among all."""
        return self._members.place.rank

    @property
    def digest(self) -> str:
        """The digest of θ, 16 hex digits: `pulse.digest` of the trainable parameters after a round.

        With overlap the parameters are θ plus the inner steps taken during the exchange, and their digest differs.
        """
        return self._masters.digest()

    def __enter__(self) -> Self:
        """Make sure that all ranks hold the same, and count the inner optimizer's steps. A collective.

        With a Membership: wait for the others' round to end, and take over their θ, momentum and counters. With a
        StoreGroup: take over those of the last committed round, whatever parameters the model has.

        Raises:
            IntegrityError: The ranks' models, parameters, momenta, counters or options differ; `ranks` names those
                that do.
            ValueError: The parameters are not those of the state that was loaded.
            ExchangeError: An earlier round failed, or the others cannot be reached.
            RuntimeError: This context is entered already, or another one on parameters of the same model.
            TypeError: The inner optimizer only wraps one, and calls no hooks.
        """
        self._refuse_failed()
        if self._steps is not None or self._background is not None:
            raise RuntimeError("this context is entered already")
        steps = InnerSteps(self._model, self._inner, self._stepped)
        try:
            self._join()
        except BaseException:
            steps.stop()
            raise
        self._steps = steps
        return self

    def _join(self) -> None:
        """Make sure that all ranks hold the same, or take over the others' state. A collective."""
        self._rebind()
        if self.inner_steps == 0:
            if self._loaded and not self._masters.equals_live():
                raise ValueError(
                    "expected the parameters that load_state_dict left, found others: load the model before this state"
                )
            self._masters.copy_from_live()
        self._loaded = False
        with _round_named(self.round + 1):
            self._members.join(self._trainer)

    def __exit__(self, *exception: object) -> None:
        """Stop counting. Inner steps since the last round stay where they are: in the live parameters.

        A round that is exchanged in the background is ended first, which is a collective. Unless an error ends the
        context, steps that no round has exchanged are reported as a warning.
        """
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.stop()
        if self._background is not None:
            try:
                self.sync()
            except Exception as failed:
                if not isinstance(exception[1], BaseException):
                    raise
                exception[1].add_note(f"round {self.round + 1}, whose exchange had begun, failed too: {failed}")
        if steps is not None and self.inner_steps and not self._failed and exception[1] is None:
            warn_unexchanged(self.inner_steps, self.round)

    def state_dict(self, *, workers: int | None = None) -> dict[str, Any]:
        """θ, momentum, this rank's residual and the counters, for torch.save or torch.distributed.checkpoint.

        The tensors are views of what the next round changes.

        Args:
            workers: The number of ranks of a checkpoint that is to be loaded into the result; None for this run's.

        Returns:
            `round`, `inner_steps` and `workers`; `theta` and `momentum`, name → float32 tensor; `residual`,
            rank → name → float32 tensor.

        Raises:
            RuntimeError: A round is being exchanged (half of its state is on the network), or the transfer of another
                trainer's state was cut off.
        """
        if self._background is not None:
            raise RuntimeError(
                f"state_dict: round {self.round + 1} is being exchanged: call it "
                f"{self._background.ends_at - self.inner_steps} inner steps later, or after sync() on all ranks, which "
                "ends the round now"
            )
        if not self._masters.whole:
            raise RuntimeError("state_dict: the transfer of another trainer's state was cut off: load a checkpoint")
        return checkpoint.state_dict(self._trainer, self._members, workers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state before the context is entered.

        If no inner step followed its last round, the live parameters become θ.

        Args:
            state: What `state_dict` gave, of as many ranks or loaded into `state_dict(workers=…)`.

        Raises:
            TypeError: The state, or something in it, is no dict or no dense tensor.
            ValueError: The state lacks something, holds an infinity or NaN, is of another model, of the other of
                PulseLoCo and DiLoCo, of a trainer with a Membership where this one has none, or lacks a residual that
                this rank has to take over. Nothing is changed then.
            RuntimeError: The context is entered.
        """
        if self._steps is not None:
            raise RuntimeError("load_state_dict: call it before the context is entered")
        self._rebind()
        checkpoint.load_state_dict(self._trainer, self._members, state)
        self._loaded = True

    def sync(self) -> LocoReport:
        """Exchange a round now, or end the one that is being exchanged. A collective; the inner steps call it.

        θ, momentum and residual are those of the round before after all errors but IntegrityError.

        Returns:
            The round's report.

        Raises:
            ExchangeError: A worker is lost, cannot go on, or sent a payload that cannot be read (with a Membership:
                this trainer is that worker). `ranks` names who is at fault.
            FloatingPointError: An element of a pseudo-gradient, of the mean or of θ after it is infinite or NaN.
            IntegrityError: The ranks' θ differ after the round.
        """
        await_no_more(self._model)
        while True:
            with telling_failures(self), _round_named(self.round + 1):
                report = self._sync()
            if report.counted or self.overlap:
                return report  # else it came too late, and counts in the next round, without further steps

    def _sync(self) -> LocoReport:
        clock = time.perf_counter()
        if self._members.elastic and self._steps is None and self._background is None:
            raise RuntimeError("sync: call it within the context, where the other trainers are known")
        if self._background is None:
            self._rebind()
            inner_steps = self.inner_steps
            outcome = self._members.collect(self._trainer, self._begin())
        else:
            inner_steps = self._background.inner_steps
            outcome = self._end_background(self._background)
            self._rebind()
        timings = outcome.timings
        timings.start()
        committing = submit(self._thread, self._trainer.commit, outcome, inner_steps)
        try:
            wait([committing])
        except BaseException:
            wait([committing])  # an interruption is raised only when the round is whole
            raise
        committing.result()
        timings.spent("outer")
        self._members.settle(self._trainer)
        timings.spent("exchange")
        self._failed = False
        timings.stalled += time.perf_counter() - clock
        report = outcome.report(self.round, self._masters.elements, self._trainer.base)
        self.reports.append(report)
        tell(self, report)
        return report

    def _stepped(self) -> None:
        """After each inner step."""
        self._trainer.inner_steps += 1
        if self._background is not None:
            if self.inner_steps >= self._background.ends_at:
                self.sync()
        elif self.inner_steps >= self.sync_every:
            if self.overlap:
                self._begin_background()
            else:
                self.sync()

    def _begin(self) -> Timings:
        """Begin a round: until it has ended, the trainer has failed."""
        self._refuse_failed()
        self._failed = True
        return Timings()

    def _begin_background(self) -> None:
        """Have a thread exchange a round while inner steps go on."""
        clock = time.perf_counter()
        self._rebind()
        timings = self._begin()
        self._masters.freeze()
        outcome = self._thread.submit(self._members.collect, self._trainer, timings)
        self._background = _Background(outcome, self.inner_steps, self.inner_steps + self.overlap)
        self._failed = False
        timings.stalled += time.perf_counter() - clock

    def _end_background(self, background: _Background) -> Outcome:
        """Wait for the thread; returns or raises what it did."""
        wait([background.outcome])  # an interruption here leaves the round in the background
        self._background, self._failed = None, True
        if background.outcome.exception() is not None:
            self._masters.thaw()
        return background.outcome.result()

    def _refuse_failed(self) -> None:
        if self._failed:
            raise ExchangeError("an earlier round failed: start the trainers again from their last checkpoint")

    def _rebind(self) -> None:
        """Find the live parameters again. One that is frozen for a while is shared all the same."""
        shared = self._masters.shapes
        live = {n: p for n, p in named_parameters(self._model).items() if p.requires_grad or n in shared}
        self._masters.rebind(live)
        check_stepped(self._model, live, self._inner)
