"""How dense an Adam step is by theory: from the sizes of the weights, the learning rate and the betas alone.

A BF16 weight with exponent e has neighbouring values ULP = 2^(e−7) away. It stands for the cell of that width whose
numbers round to it, and its bits change when its FP32 master crosses an edge of the cell. A step moves the master by
lr · r, with r = m̂ / (√v̂ + ε).

Where is the master? There are two answers:
- Anywhere in the cell (`chances_spread`). Then it crosses with probability min(1, lr·|r| / ULP), independent of earlier
  steps. This holds once moves have added up to a few cells, and from the first step if the run began from FP32 weights.
- In the middle of the cell at step 0 (`chances_centred`). A run begins there from a BF16 checkpoint, as RL mostly does.
  Then no bits change until lr · |Σ r| reaches ULP / 2, and large weights do not change at all for hundreds of steps.

What is r? The weights do not show it. Two models need only the betas and the number of steps:
- `simulate`: the gradients of an element are independent noise of one variance. In the long run m̂ has
  (1−β1)/(1+β1) of a gradient's variance, and E|r| = √(2/π · (1−β1)/(1+β1)): 0.183 at β1 = 0.9. In the first steps it is
  larger (1 in the first), because v̂ has seen as few gradients as m̂. The distribution comes from simulating Adam on
  SAMPLES elements.
- `farthest`: the largest |r| of any sequence of gradients. With weights a_i = (1−β1) β1^i of the last gradients in m
  and b_i = (1−β2) β2^i of their squares in v, the Cauchy–Schwarz inequality gives |m| ≤ √v · √(Σ a_i² / b_i); both are
  corrected for bias. That is 1 in the first step and 7.3 in the long run for (0.9, 0.999), 1.2 for (0.9, 0.95).

Of a schedule of learning rates only a linear warm-up is modelled (`warmup_factor`). Weight decay, ε and the clipping of
gradients are left out. Real gradients are not noise: the true size of moves shows at the smallest weights, whose cells
are smaller than a move (`StepStudy.rate`).
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SAMPLES = 1 << 14  # elements simulated
SMALLEST = 1e-290  # ULP: any move crosses many such cells
LONGEST = 4_000  # steps simulated before a move, and in one; later ones are taken to be like the last of them

Reals = NDArray[np.float64]
Positions = NDArray[np.float32]


def warmup_factor(warmup: int, t: int) -> float:
    """The learning rate of optimizer step t, from 1, as a fraction of the full one, which step `warmup` reaches."""
    return min(1.0, t / max(1, warmup))


def simulate(betas: tuple[float, float], numbers: Iterable[int], warmup: int = 0) -> dict[int, Positions]:
    """Simulate Adam on elements that start at 0 and whose gradients are independent noise.

    numbers: of optimizer steps. Returns the positions of the elements after each, (SAMPLES,), in full learning rates.
    """
    beta1, beta2 = betas
    wanted = set(numbers)
    rng = np.random.default_rng(0)
    m, v, position = np.zeros(SAMPLES), np.zeros(SAMPLES), np.zeros(SAMPLES)
    positions = {0: position.astype(np.float32)}
    for t in range(1, max(wanted, default=0) + 1):
        gradient = rng.standard_normal(SAMPLES)
        m += (1 - beta1) * (gradient - m)
        v += (1 - beta2) * (gradient * gradient - v)
        position += warmup_factor(warmup, t) * m / (1 - beta1**t) / np.sqrt(v / (1 - beta2**t))
        if t in wanted:
            positions[t] = position.astype(np.float32)
    return positions


def farthest(betas: tuple[float, float], base: int, target: int) -> float:
    """The farthest that Adam can move an element from optimizer step base to target, in learning rates."""
    beta1, beta2 = betas
    ratio = beta1**2 / beta2
    t = np.arange(base + 1, target + 1, dtype=np.float64)
    # Σ ratio^i over the t gradients so far; where ratio ≥ 1 the bound grows with t without limit.
    with np.errstate(over="ignore"):
        geometric = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    bound = (1 - beta1) / math.sqrt(1 - beta2) * np.sqrt(geometric * (1 - beta2**t)) / (1 - beta1**t)
    return float(bound.sum())


def chances_spread(moves: Positions | Reals, ulps: Reals) -> Reals:
    """P(change) at each ULP (E,) of masters that lie anywhere in their cells and move by one of moves (n,)."""
    # With the moves in order, the sum of those below an ULP is a running sum: O((n + E) log n).
    ordered = np.sort(np.abs(moves)).astype(np.float64)
    below = np.searchsorted(ordered, ulps)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    chances: Reals = (sums[below] / ulps + (len(ordered) - below)) / len(ordered)
    return chances


def chances_centred(before: Positions | Reals, after: Positions | Reals, ulps: Reals) -> Reals:
    """P(change) at each ULP (E,) of masters that began in the middle of their cells.

    before, after: how far they are from there, (n,).
    """
    ulps = np.maximum(ulps, SMALLEST)  # a move overflows in cells of float64's smallest numbers: ∞ is not another ∞
    return np.array([(np.rint(before / ulp) != np.rint(after / ulp)).mean() for ulp in ulps])
