"""The gate and the outer step against torch and against their naive twins; error feedback adds up."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse_rl.dtypes import DTYPES, UINTS
from pulse_rl.kernels.cpu import loco
from pulse_rl.loco.gate import GATES, find_sends
from pulse_rl.loco.payload import rounded
from tests.naive import loco as reference

SIZES = st.integers(0, 90)
SEEDS = st.integers(0, 2**32)


def torch_cast(values: Any, gate: str) -> Any:
    narrow = torch.from_numpy(values.copy()).to(getattr(torch, gate))
    return narrow.view(getattr(torch, f"uint{8 * narrow.itemsize}")).numpy()


def compiled_cast(values: Any, gate: str) -> Any:
    bits = np.empty(len(values), UINTS[DTYPES[gate][1]])
    loco.cast(values, loco.FORMATS[gate], bits)
    return bits


@pytest.mark.parametrize("gate", GATES)
def test_casts_are_torchs(gate: str) -> None:
    """Each upper half of float32 with the lower halves that decide a rounding; all subnormals of the narrow formats."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = [0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xEFFF, 0xF000, 0xF001, 0xFFFF]
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    values = np.concatenate([*(upper | low for low in lower), random]).view(np.float32)
    steps = np.arange(-(1 << 12), 1 << 12).astype(np.float32)
    values = np.concatenate([values, *(steps * np.float32(2.0**-power) for power in (10, 11, 24, 25, 26))])
    values = values[~np.isnan(values)]
    assert (compiled_cast(values, gate) == torch_cast(values, gate)).all()
    nan = torch.from_numpy(compiled_cast(np.array([np.nan], np.float32), gate)).view(getattr(torch, gate))
    assert torch.isnan(nan.float()).all()


def numbers(n: int, seed: int, near: int = 24) -> Any:
    """Floats from about 1 down to 2^−near, with both zeros and subnormals."""
    random = np.random.default_rng(seed)
    values = random.normal(0, 1, n) * 2.0 ** -random.integers(0, near, n)
    values[random.random(n) < 0.1] = random.choice([0.0, -0.0, 1e-40, -1e-44])
    return values.astype(np.float32)


def state(n: int, seed: int) -> tuple[Any, Any, Any]:
    """θ, live and residual: live differs from θ by some thousandths, so that some elements pass the gate."""
    shared = numbers(n, seed)
    live = shared + shared * np.random.default_rng(seed + 1).normal(0, 3e-3, n).astype(np.float32)
    return shared, live, (shared * np.float32(1e-3) * numbers(n, seed + 2, 3)).astype(np.float32)


@settings(max_examples=60)
@given(SIZES, SEEDS, st.sampled_from(GATES), st.sampled_from([1.0, 1.33, 7.0]))
def test_kernels_equal_their_twins(n: int, seed: int, gate: str, scale: float) -> None:
    shared, live, residual = state(n, seed)
    width = UINTS[DTYPES[gate][1]]
    before, after = np.empty((2, 2, n), width)
    for kernel, form, row in ((loco, loco.FORMATS[gate], 0), (reference, gate, 1)):
        assert kernel.gate(shared, live, residual, form, scale, before[row], after[row])
    assert (before[0] == before[1]).all()
    assert (after[0] == after[1]).all()

    indices = np.flatnonzero(before[0] != after[0]).astype(np.uint32)
    values, kept, total, dense = (np.zeros((2, k), np.float32) for k in (len(indices), n, n, n))
    momentum, theta = np.array([numbers(n, seed + 3)] * 2), np.array([shared] * 2)
    kept[:] = residual
    for row, kernel in enumerate((loco, reference)):
        kernel.pick(shared, live, residual, indices, values[row])
        kernel.keep(shared, live, kept[row], indices, values[row])
        kernel.add(total[row], indices, values[row])
        assert kernel.difference(shared, live, dense[row])
        kernel.outer(theta[row], momentum[row], dense[row], 0.7, 0.9)
    for pair in (values, kept, total, dense, momentum, theta):
        assert pair[0].tobytes() == pair[1].tobytes()


@settings(max_examples=100)
@given(SIZES, SEEDS, st.sampled_from(GATES), st.sampled_from(["float32", "bfloat16"]))
def test_send_plus_residual_is_s(n: int, seed: int, gate: str, value_dtype: str) -> None:
    """Bit for bit, for every element; a float32 value is sent whole or kept whole."""
    shared, live, residual = state(n, seed)
    s = residual + (shared - live)
    found = find_sends(shared, live, residual, gate)
    assert found is not None
    expected = np.flatnonzero(torch_cast(shared, gate) != torch_cast(shared - s, gate))
    assert found.indices.tolist() == expected.tolist()
    assert found.values.tobytes() == s[expected].tobytes()
    sent = np.zeros(n, np.float32)
    sent[found.indices] = values = rounded(found.values, value_dtype)
    loco.keep(shared, live, residual, found.indices, values)
    whole = sent + residual
    # A zero that is kept has the sign of s, and loses it when added to a sent +0: zeros are compared without sign.
    assert np.where(s == 0, np.float32(0), s).tobytes() == np.where(whole == 0, np.float32(0), whole).tobytes()
    if value_dtype == "float32":
        assert ((sent == 0) | (residual == 0)).all()
        assert residual[found.indices].tobytes() == bytes(4 * len(found.indices))
        rest = np.delete(np.arange(n), found.indices)
        assert residual[rest].tobytes() == s[rest].tobytes()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["live", "residual", "shared"])
@pytest.mark.parametrize("at", [0, 40, 76])
def test_nan_and_infinity_are_found(broken: float, where: str, at: int) -> None:
    shared, live, residual = state(77, 1)
    {"live": live, "residual": residual, "shared": shared}[where][at] = broken
    assert find_sends(shared, live, residual, "bfloat16") is None
    if where != "residual":
        assert not loco.difference(shared, live, np.empty(77, np.float32))


@settings(max_examples=60)
@given(SIZES, SEEDS, st.data())
def test_an_outer_step_that_overflows_is_found_before_it_is_taken(n: int, seed: int, data: st.DataObject) -> None:
    """At random places near float32's ends: the kernel, its twin, and whether the step taken leaves all finite."""
    theta, gradient = numbers(n, seed), numbers(n, seed + 1)
    momentum = numbers(n, seed + 2)
    huge = np.float32(3.4e38) * np.random.default_rng(seed).choice([-1.0, -0.5, 0.5, 1.0], n).astype(np.float32)
    for array in (theta, gradient, momentum):
        if n:
            at = data.draw(st.lists(st.integers(0, n - 1), max_size=2))
            array[at] = huge[at]
    lr, mu = data.draw(st.sampled_from([(0.7, 0.9), (1.0, 0.0), (0.01, 0.5)]))
    found = loco.overflows(theta, momentum, gradient, lr, mu)
    with np.errstate(all="ignore"):
        assert found == reference.overflows(theta, momentum, gradient, lr, mu)
    loco.outer(theta, momentum, gradient, lr, mu)
    assert found == (not (np.isfinite(theta).all() and np.isfinite(momentum).all()))


def test_the_outer_step_is_torchs_sgd() -> None:
    """Ten Nesterov steps of a thousand and one elements: θ and momentum, bit for bit."""
    random = np.random.default_rng(0)
    theta, momentum = random.normal(0, 0.02, 1001).astype(np.float32), np.zeros(1001, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(10):
        gradient = random.normal(0, 1e-5, 1001).astype(np.float32)
        gradient[random.random(1001) < 0.5] = 0
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        loco.outer(theta, momentum, gradient, 0.7, 0.9)
        assert theta.tobytes() == parameter.detach().numpy().tobytes()
        assert momentum.tobytes() == optimizer.state[parameter]["momentum_buffer"].numpy().tobytes()
