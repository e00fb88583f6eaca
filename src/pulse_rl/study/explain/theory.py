"""How dense an Adam step is by theory: from the sizes of the weights, the learning rate and the betas alone.

A BF16 weight with exponent e has neighbours ULP = 2^(e−7) away, and stands for the cell of that width that rounds to
it. Its bits change when its FP32 master crosses an edge of the cell. A step moves the master by lr · r, with
r = m̂ / (√v̂ + ε).

Where is the master? There are two answers:
- anywhere in the cell (`spread`): then it crosses with the probability min(1, lr·|r| / ULP), whatever came before. So
  it is once moves have added up to a few cells, and from the first step where the run began from FP32 weights;
- in the middle of the cell at step 0 (`began`): so it is where a run begins from a BF16 checkpoint, as RL mostly does.
  Then no bits change until lr · |Σ r| reaches ULP / 2, and large weights do not change at all for hundreds of steps.

What is r? The weights do not tell. Two models need nothing but the betas and the number of steps:
- `walk`: the gradients of an element are independent noise of one variance. Then m̂ has (1−β1)/(1+β1) of the variance
  of a gradient in the long run, and E|r| = √(2/π · (1−β1)/(1+β1)): 0.183 at β1 = 0.9. In the first steps it is larger
  (1 in the first), because v̂ has seen as little as m̂. The distribution comes from simulating Adam on SAMPLES elements;
- `most`: no sequence of gradients whatever gives a larger |r|. With weights a_i = (1−β1) β1^i of the last gradients in
  m and b_i = (1−β2) β2^i of their squares in v, Cauchy and Schwarz give |m| ≤ √v · √(Σ a_i² / b_i), and both are
  corrected for bias. That is 1 in the first step and 7.3 in the long run for (0.9, 0.999), 1.2 for (0.9, 0.95).

Of a learning rate's schedule only a linear warm-up is known (`pace`). Weight decay, ε and the norm's clipping are left
out. Real gradients are no noise: what the moves are in truth shows at the smallest weights, whose cells are smaller
than a move (`Step.rate`).
"""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SAMPLES = 1 << 14  # elements simulated
LONGEST = 4_000  # steps simulated before a move, and in one; what comes later is taken to be like the last of them

Reals = NDArray[np.float64]
Places = NDArray[np.float32]


def pace(warmup: int, t: int) -> float:
    """The learning rate of optimizer step t, from 1, as a part of the full one, which step `warmup` reaches."""
    return min(1.0, t / max(1, warmup))


def walk(betas: tuple[float, float], numbers: Iterable[int], warmup: int = 0) -> dict[int, Places]:
    """Where Adam has moved elements whose gradients are independent noise, from 0, in full learning rates.

    numbers: of optimizer steps. Returns the places of SAMPLES elements after each, (SAMPLES,).
    """
    beta1, beta2 = betas
    wanted = set(numbers)
    rng = np.random.default_rng(0)
    m, v, place = np.zeros(SAMPLES), np.zeros(SAMPLES), np.zeros(SAMPLES)
    places = {0: place.astype(np.float32)}
    for t in range(1, max(wanted, default=0) + 1):
        gradient = rng.standard_normal(SAMPLES)
        m += (1 - beta1) * (gradient - m)
        v += (1 - beta2) * (gradient * gradient - v)
        place += pace(warmup, t) * m / (1 - beta1**t) / np.sqrt(v / (1 - beta2**t))
        if t in wanted:
            places[t] = place.astype(np.float32)
    return places


def most(betas: tuple[float, float], base: int, target: int) -> float:
    """The farthest that Adam can move an element from optimizer step base to target, in learning rates."""
    beta1, beta2 = betas
    ratio = beta1**2 / beta2
    t = np.arange(base + 1, target + 1, dtype=np.float64)
    # Σ ratio^i over the t gradients there were; where ratio ≥ 1 the bound goes on growing with t.
    with np.errstate(over="ignore"):
        geometric = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    bound = (1 - beta1) / math.sqrt(1 - beta2) * np.sqrt(geometric * (1 - beta2**t)) / (1 - beta1**t)
    return float(bound.sum())


def spread(moves: Places | Reals, ulps: Reals) -> Reals:
    """P(change) at each ULP (E,) of masters that lie anywhere in their cells and move by one of moves (n,)."""
    # In order of the moves the sum of what stays below 1 is a running sum: O((n + E) log n).
    ordered = np.sort(np.abs(moves)).astype(np.float64)
    below = np.searchsorted(ordered, ulps)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    chances: Reals = (sums[below] / ulps + (len(ordered) - below)) / len(ordered)
    return chances


def began(before: Places | Reals, after: Places | Reals, ulps: Reals) -> Reals:
    """P(change) at each ULP (E,) of masters that began in the middle of their cells, and lie so far from there (n,)."""
    return np.array([(np.rint(before / ulp) != np.rint(after / ulp)).mean() for ulp in ulps])
