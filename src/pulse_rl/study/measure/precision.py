"""What receivers of lower precision see of a step: how many codes of FP16, FP8 and INT8 change.

Both states of a tensor, FP32 masters or weights in BF16 or FP16, are converted:

    BF16, F16             by a cast: round to the nearest, ties to even
    F8_E4M3, F8_E5M2      by a plain cast. E4M3 saturates at ±448; E5M2 overflows to infinity, as torch casts
    F8_E4M3/tensor, …     by a cast of w / scale, one scale per tensor: its largest |w| over the largest FP8 number,
                          448 or 57344
    I8/row                symmetric: round(w / scale) within ±127, one scale per row: its largest |w| over 127. A row
                          is the elements that differ in the last index alone, an output channel of a linear layer;
                          a tensor of one dimension is one row

Each state has its own scales. All arithmetic is float32, as in torch on a CPU: torch.round(w / scale); a scale of 0
gives codes of 0. A code is what a patch would send. A scale that changes gives other values to all its codes but 0,
even where the codes stay the same; so changed scales are counted separately.

From FP32 masters, this is what a receiver sees whose weights are cast from the masters; from BF16 weights, one whose
weights are cast from the published ones. Masters on the BF16 grid, as in a run's first steps, often lie on midpoints
between FP8 numbers, where the smallest move changes the code.

Elements with the same bits and the same scale have the same codes: only the others are cast.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray, field_of
from pulse_rl.kernels.cpu import loco
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.parallel import ordered_map
from pulse_rl.study.results import Visible
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.segments import SEGMENT

CASTS = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}  # the largest finite numbers; Micikevicius et al., arXiv 2209.05433
SCALED = {f"{name}/tensor": name for name in LARGEST}
ROWS = "I8/row"
INT8 = 127.0  # symmetric: −128 is not used
PRECISIONS = (*CASTS, *SCALED, ROWS)
SOURCES = ("F32", "BF16", "F16")


def visible(old: Bits, new: Bits) -> dict[str, Visible]:
    """Count what receivers of each of PRECISIONS see of a tensor's step from old to new.

    old, new: of one shape and one dtype, F32, BF16 or F16; live tensors, mapped files, or arrays as HostBits(dtype,
    bits). Both are read twice, a few rows at a time: about 2^20 elements per thread are held, or one row if longer.
    Raises ValueError for other dtypes and for two that differ, FloatingPointError for an infinity or NaN, which has no
    scale.
    """
    if old.dtype != new.dtype or old.shape != new.shape or old.dtype not in SOURCES:
        raise ValueError(
            f"expected two states of one shape in one of {', '.join(SOURCES)}, found {old.dtype} {list(old.shape)} and "
            f"{new.dtype} {list(new.shape)}"
        )
    if not old.size:
        return {name: Visible(0, 0, 0.0) for name in PRECISIONS}
    width = old.shape[-1] if old.shape else 1
    height = max(1, SEGMENT // width)
    pieces = [(start, min(start + height * width, old.size)) for start in range(0, old.size, height * width)]
    tops = [np.concatenate(list(ordered_map(partial(_tops, state, width), pieces))) for state in (old, new)]
    before, after = (_Scales(found) for found in tops)
    counts = np.sum(list(ordered_map(partial(_count, old, new, before, after, width), pieces)), 0)
    scales = {name: (1, int(before.tensor[name] != after.tensor[name])) for name in SCALED}
    scales[ROWS] = len(before.rows), int((before.rows != after.rows).sum())
    return {
        name: Visible(old.size, int(count), int(count) / old.size, *scales.get(name, ()))
        for name, count in zip(PRECISIONS, counts, strict=True)
    }


def merge_visible(tensors: Iterable[dict[str, Visible]]) -> dict[str, Visible]:
    """What receivers see of several tensors, from what they see of each."""
    every = list(tensors)

    def total(name: str, count: str) -> int:
        return sum(getattr(one[name], count) for one in every)

    return {
        name: Visible(
            elements := total(name, "elements"),
            changed := total(name, "changed"),
            changed / max(1, elements),
            total(name, "scales"),
            total(name, "rescaled"),
        )
        for name in PRECISIONS
    }


class _Scales:
    """The scales of one state of a tensor. tops: the largest |w| of each row, (rows,)."""

    def __init__(self, tops: F32) -> None:
        if not np.isfinite(tops).all():
            raise FloatingPointError("expected finite numbers, found an infinity or NaN, which has no scale")
        self.rows: F32 = tops / np.float32(INT8)
        self.tensor = {name: tops.max() / np.float32(LARGEST[form]) for name, form in SCALED.items()}


def _tops(state: Bits, width: int, piece: tuple[int, int]) -> F32:
    """The largest |w| of each row of a piece, (rows,)."""
    kind = UINTS[state.itemsize].type
    magnitudes = state.read(*piece) & kind(field_of(state.dtype).mask)  # in the order of the numbers
    return _widen(magnitudes.reshape(-1, width).max(1), state.dtype)


def _count(
    old: Bits, new: Bits, before: _Scales, after: _Scales, width: int, piece: tuple[int, int]
) -> NDArray[np.int64]:
    """How many codes of a piece differ, as PRECISIONS."""
    bits = old.read(*piece), new.read(*piece)
    indices = find_changes(*bits).indices
    states = tuple(_widen(one, old.dtype) for one in bits)
    changed = tuple(one[indices] for one in states)
    counts = [_differing(changed, partial(_cast, form)) for form in CASTS.values()]
    for name, form in SCALED.items():
        scales = before.tensor[name], after.tensor[name]
        seen = changed if scales[0] == scales[1] else states
        counts.append(
            _differing([_divide(w, s) for w, s in zip(seen, scales, strict=True)], partial(_cast, CASTS[form]))
        )
    first = piece[0] // width
    rows = before.rows[first : piece[1] // width], after.rows[first : piece[1] // width]
    rescaled = rows[0] != rows[1]
    row = indices // width
    still = ~rescaled[row]
    counts.append(
        _differing([_divide(w[still], s[row[still]]) for w, s in zip(changed, rows, strict=True)], _int8)
        + _differing(
            [_divide(w.reshape(-1, width)[rescaled], s[rescaled, None]) for w, s in zip(states, rows, strict=True)],
            _int8,
        )
    )
    return np.array(counts, np.int64)


def _differing(states: Iterable[F32], codes: Callable[[F32], Any]) -> int:
    before, after = (codes(state) for state in states)
    return int(np.count_nonzero(before != after))


def _widen(bits: UIntArray, dtype: str) -> F32:
    """The numbers that bits of a dtype in SOURCES encode, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32, copy=False)


def _cast(form: str, values: F32) -> UIntArray:
    bits: UIntArray = np.empty(values.size, UINTS[DTYPES[form][1]])
    loco.cast(values.reshape(-1), loco.FORMATS[form], bits)
    return bits


def _divide(values: F32, scale: Any) -> F32:
    """values / scale, 0 where the scale is 0."""
    quotients: F32 = np.divide(values, scale, out=np.zeros_like(values), where=np.asarray(scale != 0))
    return quotients


def _int8(quotients: F32) -> NDArray[np.int8]:
    return np.clip(np.rint(quotients), -INT8, INT8).astype(np.int8)
