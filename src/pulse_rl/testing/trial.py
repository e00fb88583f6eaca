"""One receiver in one check: what is asked of it, and what must hold after every call.

After every call, whether it succeeded or not: a rank that reports a version holds the bits of that version. After a
failure that is not a kill: the weights are those of a version, or those before the first sync, on all ranks alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from pulse_rl.testing.faults import Fault
from pulse_rl.testing.memory import Place, make_weights
from pulse_rl.testing.models import PublishedModel, State
from pulse_rl.testing.protocol import (
    Adapter,
    CanDisturb,
    CanStage,
    ConformanceError,
    Held,
    Receiver,
    StagedVersion,
    Unsupported,
)
from pulse_rl.testing.recorded import Recorded
from pulse_rl.testing.source import Course
from pulse_rl.weights.layout import layout
from pulse_rl.weights.pieces import pieces_of

SLOW_POINTS = 5  # calls of the store that are tried of a receiver in other processes, which takes long to make


def needs_store(adapter: Adapter) -> None:
    if adapter.reads == "weights":
        raise Unsupported("the receiver reads no store")


def needs_faults(adapter: Adapter) -> None:
    if adapter.reads != "store":
        raise Unsupported("the receiver does not read through Source.store")


def needs_ranks(trial: ReceiverTrial) -> None:
    if len(trial.receiver.held()) == 1:
        raise Unsupported("the receiver has one rank")


def read(ranks: Sequence[Held], model: PublishedModel) -> State:
    """What all ranks hold together. Raises ConformanceError where an element is held by no rank, or differently."""
    found: State = {}
    covered: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        for name, bits in layout(rank.weights).all_names().items():
            owner = model.tied.get(name, name)
            if owner not in model.tensors:
                raise ConformanceError(f"tensor {name!r}: expected one that was published", tensor=name)
            shape = model.tensors[owner][1]
            if tuple(bits.shape) != shape:
                raise ConformanceError(f"tensor {name!r}: expected shape {shape}, found {bits.shape}", tensor=name)
            whole = found.setdefault(name, np.zeros(shape, f"u{bits.itemsize}"))
            known = covered.setdefault(name, np.zeros(shape, bool))
            for piece in pieces_of(bits):
                at = tuple(slice(a, a + n) for a, n in zip(piece.box.offset, piece.box.sizes, strict=True))
                held = piece.bits.read(0, piece.bits.size).reshape(piece.box.sizes)
                if (known[at] & (whole[at] != held)).any():
                    raise ConformanceError(
                        f"tensor {name!r}: rank {number} holds other bits of it than the ranks before it", tensor=name
                    )
                whole[at], known[at] = held, True
    for name in model.tensors:
        if name not in found or not covered[name].all():
            raise ConformanceError(f"tensor {name!r}: some of its elements are held by no rank", tensor=name)
    return found


def difference(found: State, model: PublishedModel, expected: State) -> tuple[str, int] | None:
    """The first tensor that has other bits than a state, and in how many elements; None if all are alike."""
    for name, bits in found.items():
        other = expected.get(model.tied.get(name, name))
        count = bits.size if other is None or other.shape != bits.shape else int((bits != other).sum())
        if count:
            return name, count
    return None


class ReceiverTrial:
    """A receiver, the history that it follows, and what it must hold.

    place: how the weights lie in memory. start: the bits that the receiver begins with; None for arbitrary ones. shown:
    versions that are published when it is made. tied_apart: whether tied names have memory of their own. model: of the
    receiver, where it is another one than the history's. Raises Unsupported where the adapter does.
    """

    def __init__(
        self,
        adapter: Adapter,
        recorded: Recorded,
        *,
        place: Place = "plain",
        start: State | None = None,
        shown: int = 1,
        tied_apart: bool = False,
        model: PublishedModel | None = None,
    ) -> None:
        self.adapter, self.model = adapter, model or recorded.model
        self._others: list[Recorded] = []  # runs that were in the store before
        self._stack = ExitStack()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-rl-trial-")))
        try:
            self.source = Course(recorded, directory)
            self.source.show(shown)
            self._begin = start if start is not None else self.model.states(1, seed=77)[0]
            self.weights, self._guards = make_weights(self.model, self._begin, place, tied_apart=tied_apart)
            self.receiver: Receiver = adapter.make(self.weights, self.source)
            self._stack.callback(lambda: self.receiver.close())
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        self.truthful()
        return self

    def __exit__(self, *_: object) -> None:
        self.source.control.plan(None)
        self._stack.close()

    # What is asked.

    def sync(self, version: int | None = None) -> None:
        """A sync that must succeed, and leave the bits of the version."""
        wanted = self.source.newest if version is None else version
        try:
            reported = self.receiver.sync(version)
        except Unsupported:
            raise
        except Exception as error:
            raise ConformanceError(
                f"sync({version}): expected version {wanted}, found {type(error).__name__}: {error}", version=wanted
            ) from error
        if reported != wanted:
            raise ConformanceError(
                f"sync({version}): expected version {wanted} to be reported, found {reported}", version=wanted
            )
        self.holds(wanted)

    def holds(self, version: int) -> None:
        """The weights are those of a version, and all ranks report it."""
        ranks = self.truthful()
        found = [rank.version for rank in ranks]
        if any(one != version for one in found):
            raise ConformanceError(
                f"expected version {version} to be reported by all ranks, found {', '.join(map(str, found))}",
                version=version,
            )

    def attempt(self, call: Callable[[], object]) -> Exception | None:
        """A call that may fail. Returns its error. The weights are those of some version, or as they began."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - any that a receiver raises
            self.intact(f"after {type(error).__name__}: {error}")
            return error
        self.intact("after a call that reported success")
        return None

    def refused(self, call: Callable[[], object], why: str) -> Exception:
        """A call that must fail, and leave the weights as they are."""
        before = self.bits()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - any that a receiver raises
            self.unchanged(before, f"after it was refused ({why})")
            self.truthful()
            return error
        raise ConformanceError(f"{why}: expected an error, found none")

    def stage(self, version: int | None = None) -> StagedVersion:
        """Stage a version; no weight may be touched."""
        staging = self.staging
        before = self.bits()
        staged = staging.stage(version)
        self.unchanged(before, "after stage, before apply")
        self.truthful()
        return staged

    def apply(self, staged: StagedVersion) -> None:
        """An apply that must succeed, and leave the bits of the version."""
        version = staged.version
        try:
            staged.apply()
        except Exception as error:
            raise ConformanceError(
                f"apply of version {version}: expected success, found {type(error).__name__}: {error}", version=version
            ) from error
        self.holds(version)

    @property
    def staging(self) -> CanStage:
        if not isinstance(self.receiver, CanStage):
            raise Unsupported("the receiver has no stage")
        return self.receiver

    def disturbance(self) -> Callable[[], None]:
        """What writes to the weights behind the receiver's back."""
        if not isinstance(self.receiver, CanDisturb):
            raise Unsupported("the receiver cannot be disturbed")
        return self.receiver.disturb

    # What must hold.

    def _look(self) -> tuple[Sequence[Held], State]:
        """What ranks report, and what they hold together. Memory beside it is as it was."""
        ranks = self.receiver.held()
        found = read(ranks, self.model)
        for guard in self._guards:
            guard.check()
        return ranks, found

    def bits(self) -> State:
        """What the receiver holds now."""
        return self._look()[1]

    def truthful(self) -> Sequence[Held]:
        """Each rank that reports a version holds its bits."""
        ranks, found = self._look()
        for number, rank in enumerate(ranks):
            if rank.version is None:
                continue
            expected = self._state_of(rank.version)
            other = difference(found, self.model, expected)
            if other is not None:
                who = f"rank {number} of {len(ranks)} reports" if len(ranks) > 1 else "it reports"
                raise ConformanceError(
                    f"{who} version {rank.version}, but tensor {other[0]!r} holds other bits in {other[1]} elements",
                    tensor=other[0],
                    version=rank.version,
                )
        return ranks

    def intact(self, when: str) -> None:
        """Truthful, and the weights are some version's, or as they began."""
        self.truthful()
        found = self.bits()
        states = [self._begin, *(state for _, state in self._all_states())]
        differing = [one for state in states if (one := difference(found, self.model, state)) is not None]
        if len(differing) == len(states):
            name, count = min(differing, key=lambda one: one[1])
            raise ConformanceError(
                f"{when}: expected the bits of one version, found a mixture: tensor {name!r} differs from the nearest "
                f"one in {count} elements",
                tensor=name,
            )

    def unchanged(self, before: State, when: str) -> None:
        """The weights are as they were."""
        found = self.bits()
        for name, bits in before.items():
            count = int((bits != found[name]).sum())
            if count:
                raise ConformanceError(f"{when}: {count} elements of tensor {name!r} were written to", tensor=name)

    def plan(self, fault: Fault | None) -> None:
        """Let something happen to calls of the store from now on."""
        self.source.control.plan(fault)

    def replace_run(self, recorded: Recorded) -> None:
        """Let another run have taken the place of the history: a version is one of either."""
        self._others.append(self.source.recorded)
        self.source.begin_anew(recorded)

    def _all_states(self) -> list[tuple[int, State]]:
        return [item for recorded in [self.source.recorded, *self._others] for item in recorded.states.items()]

    def _state_of(self, version: int) -> State:
        states = [state for number, state in self._all_states() if number == version]
        if not states:
            raise ConformanceError(f"it reports version {version}, which was never published", version=version)
        if len(states) > 1:
            found = read(self.receiver.held(), self.model)
            states.sort(key=lambda state: difference(found, self.model, state) is not None)
        return states[0]
