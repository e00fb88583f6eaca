"""Which views of live memory have elements in common: interleaved views, as of a fused weight's columns, have none."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.host_bits import array_in

MAX_WORK = 10_000  # steps of NumPy's search for an address that two views share; a few suffice for views of tensors


def pairs(views: Sequence[Bits]) -> Iterator[tuple[int, int]]:
    """The pairs of views, by position, that share memory. Reads no element."""
    order = sorted(
        (number for number, view in enumerate(views) if view.size),
        key=lambda number: (str(views[number].extent[0]), *views[number].extent[1:]),
    )
    before: list[int] = []  # those whose extents may reach further than that of the next one begins
    for number in order:
        device, first, _ = views[number].extent
        before = [one for one in before if views[one].extent[0] == device and views[one].extent[2] > first]
        for one in before:
            if _share(views[one], views[number]):
                yield one, number
        before.append(number)


def _share(one: Bits, other: Bits) -> bool:
    """Whether two views have memory in common; True where that is too hard to find out."""
    first, second = _addresses(one), _addresses(other)
    if first is None or second is None:
        return True
    try:
        return bool(np.shares_memory(first, second, max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _addresses(bits: Bits) -> NDArray[Any] | None:
    if isinstance(bits, HostBits):
        return bits.array
    if isinstance(bits, TorchBits):  # perhaps another device's memory, of which nothing is read
        return array_in((bits.address, True), bits.shape, bits.strides, bits.itemsize)
    return None
