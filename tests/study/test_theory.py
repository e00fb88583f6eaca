"""The theory of the study against closed forms, against naive loops, and against a real Adam with FP32 masters."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pulse_rl.checkpoint.shards import write_checkpoint
from pulse_rl.study import values
from pulse_rl.study.explain import theory
from pulse_rl.study.explain.forecast import Forecast
from pulse_rl.study.measure.timeline import Timeline
from pulse_rl.study.results import Report, Settings
from pulse_rl.study.sources.checkpoints import Checkpoints
from pulse_rl.study.verb import study
from pulse_rl.weights.layout import layout

LR, BETAS = 2e-5, (0.9, 0.999)


@pytest.mark.parametrize("beta1", [0.8, 0.9, 0.95])
def test_the_walk_settles_at_the_closed_form(beta1: float) -> None:
    positions = theory.simulate((beta1, 0.99), [600, 601])
    found = np.abs(positions[601] - positions[600]).mean()
    assert found == pytest.approx(math.sqrt(2 / math.pi * (1 - beta1) / (1 + beta1)), rel=0.03)


def test_the_first_step_is_the_sign_of_the_gradient() -> None:
    positions = theory.simulate(BETAS, [1])
    assert np.abs(positions[1]) == pytest.approx(1.0)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.9, 0.5)])
@pytest.mark.parametrize("step", [1, 2, 30, 200])
def test_the_worst_gradients_reach_the_bound_and_none_exceed_it(betas: tuple[float, float], step: int) -> None:
    """The worst are a_i / b_i, where Cauchy's and Schwarz's inequality is an equality."""
    beta1, beta2 = betas
    age = np.arange(step)[::-1]

    def ratio(gradients: NDArray[np.float64]) -> float:
        m = ((1 - beta1) * beta1**age * gradients).sum() / (1 - beta1**step)
        v = ((1 - beta2) * beta2**age * gradients**2).sum() / (1 - beta2**step)
        return float(abs(m) / math.sqrt(v))

    bound = theory.farthest(betas, step - 1, step)
    assert ratio((1 - beta1) * beta1**age / ((1 - beta2) * beta2**age)) == pytest.approx(bound)
    rng = np.random.default_rng(0)
    assert max(ratio(rng.standard_cauchy(step)) for _ in range(300)) <= bound * (1 + 1e-12)


def test_several_steps_are_bounded_by_the_sum() -> None:
    assert theory.farthest(BETAS, 3, 6) == pytest.approx(sum(theory.farthest(BETAS, t, t + 1) for t in (3, 4, 5)))


def test_chances_are_those_of_naive_loops() -> None:
    rng = np.random.default_rng(1)
    before, after = rng.normal(0, 3, 500), rng.normal(0, 3, 500)
    ulps = np.ldexp(np.ones(21), np.arange(-12, 9))
    spread = [np.mean([min(1.0, abs(b - a) / ulp) for a, b in zip(before, after, strict=True)]) for ulp in ulps]
    began = [np.mean([round(a / ulp) != round(b / ulp) for a, b in zip(before, after, strict=True)]) for ulp in ulps]
    assert theory.chances_spread(after - before, ulps) == pytest.approx(np.array(spread))
    assert theory.chances_centred(before, after, ulps) == pytest.approx(np.array(began))


def test_a_zero_of_float64_changes_with_any_move() -> None:
    """Its ULP is so small that a learning rate divided by it is no float64."""
    ulps = values.ulps("F64")
    assert ulps is not None
    moves = np.array([1e-6, -1e-6])
    assert theory.chances_centred(np.zeros(2), moves, ulps[:1]) == theory.chances_spread(moves, ulps[:1]) == 1.0
    assert theory.chances_centred(moves, 2 * moves, ulps[:1]) == 1.0


def test_a_warmup_that_is_longer_than_what_is_simulated() -> None:
    """The rate goes on rising, and moves with it."""
    numbers = [4_000, 4_001, 8_001, 8_002]
    forecast = Forecast(Timeline(numbers), Settings(lr=1e-6, betas=BETAS, warmup=10_000))
    assert forecast.lr == pytest.approx([4.001e-7, 8.002e-7])
    one, two = (forecast.chances(step, np.array([4e-6 * rate])) for step, rate in enumerate((0.4001, 0.8002)))
    assert two == pytest.approx(one, rel=0.01)
    assert one.min() > 0


def trained(directory: Path, *, rounded: bool, warmup: int) -> Report:
    """Study a real AdamW on noise. rounded: whether the FP32 masters start at BF16 values."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(400_000, generator=generator) * 0.01
    master = torch.nn.Parameter(masters.bfloat16().float() if rounded else masters)
    optimizer = torch.optim.AdamW([master], lr=LR, betas=BETAS, weight_decay=0.0)
    paths = []
    for step in range(13):
        if step:
            master.grad = torch.randn(master.shape, generator=generator)
            optimizer.param_groups[0]["lr"] = LR * min(1, step / max(1, warmup))
            optimizer.step()
        if step in (0, 1, 11, 12):
            paths.append(directory / f"step-{step}.safetensors")
            write_checkpoint(paths[-1], layout({"w": master.detach().bfloat16()}))
    return study(Checkpoints(paths), Settings(lr=LR, betas=BETAS, warmup=warmup), codecs=False)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("warmup", [0, 9])
def test_a_real_adam_on_noise_does_what_is_predicted(tmp_path: Path, rounded: bool, warmup: int) -> None:
    report = trained(tmp_path, rounded=rounded, warmup=warmup)
    assert [(step.base, step.target) for step in report.steps] == [(0, 1), (11, 12)]
    for step in report.steps:
        assert step.prediction is not None
        assert step.rate is not None
        predicted = step.prediction.density if rounded else step.prediction.spread
        assert predicted == pytest.approx(step.density, rel=0.03)
        assert step.density <= step.prediction.highest * 1.01 or rounded  # the first step is the highest possible
    first, last = report.steps
    if not rounded:  # then |new − old| is the move in the mean, whatever the ULP
        assert first.rate == pytest.approx(1.0, rel=0.02)
        assert last.moved / LR == pytest.approx(last.rate, rel=0.1)
    for row in report.exponents:
        if row.elements > 5000:
            probability = row.predicted if rounded else row.spread
            assert probability == pytest.approx(row.probability, abs=0.03)
