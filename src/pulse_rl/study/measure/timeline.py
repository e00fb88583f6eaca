"""Which versions of a study are compared with which."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pulse_rl.study.results import SPANS


class Timeline:
    """Versions in order, named by their places here: 0, 1, 2, …

    numbers: of the versions, strictly rising, two at least.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        distances = Counter(b - a for a, b in pairwise(numbers))
        self.stride = min(distances, key=lambda distance: (-distances[distance], distance))
        place = {number: i for i, number in enumerate(numbers)}
        self.bases: list[dict[int, int]] = []  # by target: k → the version that lies k strides before
        for here, number in enumerate(numbers):
            before = ((k, place.get(number - k * self.stride)) for k in SPANS)
            # A step leads to the next version there is, though with an odd one between a stride may lead farther.
            self.bases.append({k: base for k, base in before if base is not None and (k > 1 or base == here - 1)})
        self.pairs = [(k, base) for bases in self.bases for k, base in bases.items()]  # all that are compared
        self.steps = [(bases[1], target) for target, bases in enumerate(self.bases) if 1 in bases]  # base and target
        self.last_use = list(range(len(numbers)))  # by base: the last target that is compared with it
        for target, bases in enumerate(self.bases):
            for base in bases.values():
                self.last_use[base] = target
        self.run, self.run_steps = _longest_run(self.steps)  # first and last version; steps between them

    @property
    def held(self) -> int:
        """How many versions are held at once, at most, to compare each with its bases; and the first of the run."""
        change = [1] * len(self.last_use) + [0]  # at each version: it comes, and those last used at the one before go
        for last in self.last_use:
            change[last + 1] -= 1
        return 1 + max(accumulate(change))


def _longest_run(steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], int]:
    """The longest chain of steps, each from where the one before leads: its first and its last version, its length."""
    runs: dict[int, tuple[int, int]] = {}  # by its last version: how many steps, from where
    for base, target in steps:
        length, first = runs.get(base, (0, base))
        runs[target] = (length + 1, first)
    last = max(runs, key=lambda end: runs[end][0])
    return (runs[last][1], last), runs[last][0]
