"""One trainer as those that it meets see it: its state, what it adds to a round, and the outer step."""

from collections.abc import Mapping, Sequence

from blake3 import blake3

from pulse_rl.group import agreement
from pulse_rl.group.collectives import Group
from pulse_rl.kernels.cpu import loco
from pulse_rl.loco.contributions import Contribution
from pulse_rl.loco.masters import Masters, MasterSegment
from pulse_rl.loco.outcome import Outcome, StateAfter
from pulse_rl.loco.sums import Mean
from pulse_rl.weights.segments import map_segments


class Trainer:
    """The state of one trainer, which a round changes at its end and nowhere else.

    options: what must be the same on all trainers, apart from the state. lr, mu: the outer optimizer's learning rate
    and momentum.

    round: rounds done. inner_steps: since the last round began. base: θ's digest, before the next round; known once
    the trainer has joined the others.
    """

    def __init__(
        self, masters: Masters, contribution: Contribution, options: Mapping[str, object], *, lr: float, mu: float
    ) -> None:
        model = blake3(repr(masters.shapes).encode()).hexdigest(8)
        self.masters = masters
        self.contribution = contribution
        self.options = {name: str(value) for name, value in {"model": model, **options}.items()}
        self._lr, self._mu = lr, mu
        self.round = 0
        self.inner_steps = 0
        self.base = ""

    def check(self, means: Sequence[Mean]) -> None:
        """Raise FloatingPointError if the outer step along these means, of each segment, would not leave θ finite."""

        def overflows(pair: tuple[MasterSegment, Mean]) -> bool:
            segment, mean = pair
            return loco.overflows(segment.shared, segment.momentum, mean.dense(segment.size), self._lr, self._mu)

        segments = self.masters.segments
        each = map_segments(overflows, zip(segments, means, strict=True), self.masters.sizes)
        for segment, broken in zip(segments, each, strict=True):
            if broken:
                raise FloatingPointError(
                    f"the outer step overflows float32 in {segment.name!r}: expected finite weights after it, found an "
                    "infinity or NaN; nothing was changed: a trainer diverged, go back to an earlier checkpoint"
                )

    def commit(self, outcome: Outcome, inner_steps: int) -> None:
        """Take the outer step of a round of so many inner steps."""
        masters = self.masters
        numbers = range(len(masters.segments))

        def commit(number: int) -> int:
            return masters.commit(number, outcome, self._lr, self._mu)

        terms = list(map_segments(commit, numbers, masters.sizes))
        masters.thaw()
        self.round = self.round + 1 if outcome.after is None else outcome.after.round
        self.inner_steps -= inner_steps
        self.base = masters.total_of(terms)

    def take_over(self, after: StateAfter) -> None:
        """Start from another trainer's state, with an empty residual."""
        for segment, theta, momentum in zip(self.masters.segments, after.theta, after.momentum, strict=True):
            segment.shared[:], segment.momentum[:] = theta, momentum
        self.masters.begin_anew()
        self.round, self.inner_steps = after.round, 0
        self.base = self.masters.digest()

    def compare(self, group: Group) -> None:
        """Raise IntegrityError unless all ranks hold the same state before a round. A collective."""
        self.base = self.masters.digest()
        state: dict[str, int | str] = {
            "parameters differ": self.base,
            "outer momentum differs": self.masters.momentum_digest(),
            "rounds done differ": self.round,
            "inner steps since the last round differ": self.inner_steps,
        }
        agreement.compare(group, state, f"before round {self.round + 1}", "load one checkpoint on all ranks")

    def prove(self, group: Group) -> None:
        """Raise IntegrityError unless all ranks hold the same θ after a round. A collective."""
        values = {"θ differs": self.base}
        agreement.compare(group, values, f"after round {self.round}", "start again from the last checkpoint")
