"""What receivers of lower precision see, against torch's own casts and a plain quantisation in torch."""

from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.kernels.cpu import loco
from pulse_rl.study.measure.precision import CASTS, LARGEST, PRECISIONS, ROWS, SCALED, merge_visible, visible
from pulse_rl.study.results import Visible
from pulse_rl.weights import bits as bits_module
from pulse_rl.weights.bits import HostBits, as_bits
from pulse_rl.weights.segments import SEGMENT

SHAPES = [(300, 257), (77,), (), (3, 5, 7), (4, 1), (1, 9), (0, 3), (SEGMENT // 200 + 9, 200)]


def step(shape: tuple[int, ...], dtype: torch.dtype, *, far: float = 1e-3) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states: half of the first rows move, by little; some rows are zero, some subnormal."""
    random = np.random.default_rng(len(shape))
    old = random.normal(0, 0.02, shape) * 2.0 ** -random.integers(0, 20, shape)
    new = old * (1 + random.normal(0, far, shape) * (random.random(shape) < 0.5))
    if len(shape) == 2 and shape[0] > 8:
        new[10:] = old[10:]
        old[1] = new[1] = 0
        old[2], new[3], new[4] = 0, 0, -old[4]
        old[5:7] *= 1e-39
        new[5:7] *= 1.2e-39
    return tuple(torch.from_numpy(np.asarray(state, np.float32)).to(dtype) for state in (old, new))  # type: ignore[return-value]


def quantised(weight: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales, as somebody would write it in torch."""
    wide = weight.float().reshape(1) if weight.dim() == 0 else weight.float()
    found = {name: (wide.to(getattr(torch, form)), torch.zeros(0)) for name, form in CASTS.items()}
    for name, form in SCALED.items():
        scale = wide.abs().max() / LARGEST[form]
        divided = wide / scale if scale else torch.zeros_like(wide)
        found[name] = divided.to(getattr(torch, CASTS[form])), scale.reshape(1)
    scales = wide.abs().amax(-1, keepdim=True) / 127
    divided = torch.where(scales > 0, wide / scales, 0)
    found[ROWS] = torch.round(divided).clamp(-127, 127).to(torch.int8), scales
    return found


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(getattr(torch, f"int{8 * codes.itemsize}" if codes.itemsize > 1 else "uint8"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_counts_are_those_of_torchs_casts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every precision: codes that differ, scales, and scales that differ; sizes that do not divide into pieces."""
    old, new = step(shape, dtype)
    found = visible(as_bits(old), as_bits(new))
    assert tuple(found) == PRECISIONS
    if not old.numel():
        assert set(found.values()) == {Visible(0, 0, 0.0)}
        return
    before, after = quantised(old), quantised(new)
    for name, one in found.items():
        changed = int((raw(before[name][0]) != raw(after[name][0])).sum())
        scales, rescaled = before[name][1].numel(), int((before[name][1] != after[name][1]).sum())
        assert one == Visible(old.numel(), changed, changed / old.numel(), scales, rescaled), name
    if shape[:1] == (300,):  # this example distinguishes the precisions
        assert 0 < found[ROWS].rescaled < found[ROWS].scales
        assert len({one.changed for one in found.values()}) > 3


def test_a_scale_that_moves_changes_codes_of_elements_that_do_not() -> None:
    """One element, the largest of its row and of its tensor, grows by half; by plain casts one code differs."""
    old = torch.linspace(-1, 1, 1000).reshape(2, 500)
    new = old.clone()
    new[1, 499] *= 1.5
    found = visible(as_bits(old), as_bits(new))
    assert [found[name].changed for name in CASTS] == [1, 1, 1, 1]
    assert (found[ROWS].scales, found[ROWS].rescaled) == (2, 1)
    assert 300 < found[ROWS].changed < 500
    assert all(found[name].rescaled == 1 and found[name].changed > 500 for name in SCALED)


def test_e5m2_is_torchs() -> None:
    """Every upper half of a float32 with the lower halves that decide a rounding, past the largest number too."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    values = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(np.float32)
    values = values[~np.isnan(values)]
    codes = np.empty(len(values), np.uint8)
    loco.cast(values, loco.FORMATS["float8_e5m2"], codes)
    assert (codes == torch.from_numpy(values).to(torch.float8_e5m2).view(torch.uint8).numpy()).all()


def test_bits_of_arrays_and_of_masters_that_are_cast_give_the_same() -> None:
    """A dtype's name with an array of bits, a BF16 tensor, and FP32 masters that are cast while they are read."""
    old, new = step((40, 33), torch.float32)
    narrow = [state.bfloat16() for state in (old, new)]
    arrays = [HostBits("BF16", state.view(torch.uint16).numpy()) for state in narrow]
    expected = visible(as_bits(narrow[0]), as_bits(narrow[1]))
    assert visible(arrays[0], arrays[1]) == expected
    assert visible(*(bits_module.as_bits(state, "bfloat16") for state in (old, new))) == expected
    assert visible(as_bits(old), as_bits(new))["BF16"].changed == expected["BF16"].changed


def test_tensors_add_up() -> None:
    parts = [visible(*map(as_bits, step(shape, torch.bfloat16))) for shape in SHAPES]
    whole = merge_visible(parts)
    assert whole["I8/row"].scales == sum(part["I8/row"].scales for part in parts)
    assert whole["F8_E4M3/tensor"].scales == len(SHAPES) - 1  # the empty one has none
    for name, one in whole.items():
        assert one.changed == sum(part[name].changed for part in parts)
        assert one.density == one.changed / sum(part[name].elements for part in parts)
    assert merge_visible([])["F16"] == Visible(0, 0, 0.0)


def test_values_without_a_scale_are_refused() -> None:
    good = torch.ones(3, 4)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad: Any = good.clone()
        bad[1, 2] = value
        with pytest.raises(FloatingPointError, match="expected finite numbers"):
            visible(as_bits(good), as_bits(bad))
    for other in (good.bfloat16(), good.reshape(4, 3)):
        with pytest.raises(ValueError, match="expected two states of one shape in one of F32, BF16, F16, found F32"):
            visible(as_bits(good), as_bits(other))
    with pytest.raises(ValueError, match="found I64"):
        visible(as_bits(good.long()), as_bits(good.long()))
