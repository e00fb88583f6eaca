"""Which versions of a study are compared with each other."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pulse_rl.study.results import SPANS


class Timeline:
    """The comparisons of a study. Versions are named by their places: 0, 1, 2, …

    numbers: of the versions, strictly rising, at least two.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        distances = Counter(b - a for a, b in pairwise(numbers))
        self.stride = min(distances, key=lambda distance: (-distances[distance], distance))
        place = {number: i for i, number in enumerate(numbers)}
        self.bases: list[dict[int, int]] = []  # by target: k → the version k strides before
        for here, number in enumerate(numbers):
            before = ((k, place.get(number - k * self.stride)) for k in SPANS)
            # A step (k = 1) leads to the next version; one between two versions a stride apart breaks it.
            self.bases.append({k: base for k, base in before if base is not None and (k > 1 or base == here - 1)})
        self.pairs = [(k, base) for bases in self.bases for k, base in bases.items()]  # every comparison
        self.steps = [(bases[1], target) for target, bases in enumerate(self.bases) if 1 in bases]  # base and target
        self.last_use = list(range(len(numbers)))  # by base: the last target that is compared with it
        for target, bases in enumerate(self.bases):
            for base in bases.values():
                self.last_use[base] = target
        self.chain, self.chain_steps = _longest_chain(self.steps)  # first and last version; number of steps

    @property
    def held(self) -> int:
        """The most versions that are held at once: those still needed for comparisons, and the chain's first."""
        delta = [1] * len(self.last_use) + [0]  # at each version: one is added, those last used at the one before go
        for last in self.last_use:
            delta[last + 1] -= 1
        return 1 + max(accumulate(delta))


def _longest_chain(steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], int]:
    """The longest chain of steps, each starting where the one before ends: its first and last version, its length."""
    chains: dict[int, tuple[int, int]] = {}  # by last version: number of steps, first version
    for base, target in steps:
        length, first = chains.get(base, (0, base))
        chains[target] = (length + 1, first)
    last = max(chains, key=lambda end: chains[end][0])
    return (chains[last][1], last), chains[last][0]
