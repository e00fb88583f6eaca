"""The digest: the fingerprint of a whole state of weights, kept up to date at O(changes).

    digest(state) = Σ over tensors, Σ over elements i:  mix(seed + i·C1 + bits_i·C2)   mod 2^64

`seed` comes from the tensor's name, dtype and shape; `i` is the flat row-major index in the full tensor; an
empty tensor adds mix(seed). Because it is a sum, the changed elements alone update it, and ranks that hold shards of
one tensor can each sum their own elements and add the sums. It detects corruption and drift, not an adversary: payload
hashes do that. `docs/format.md` gives the constants and test vectors.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.parallel import ordered_map, sliced
from pulse_rl.weights.bits import Bits, HostBits, TorchBits
from pulse_rl.weights.boxes import Positions, Shape, rows_in, tiles, whole
from pulse_rl.weights.devices import HOST, Device
from pulse_rl.weights.layout import HasLayout, layout
from pulse_rl.weights.pieces import Piece, Pieces
from pulse_rl.weights.segments import SEGMENT, segments

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The 64-bit finalizer of murmur3: a bijection of 64-bit integers."""
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return x ^ (x >> 33)


@lru_cache(maxsize=1 << 16)  # asked for at each step of each patch; mixtures of experts have over 2^14 tensors
def seed(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The tensor's seed: the first 8 bytes, little-endian, of BLAKE3("dtype\\0d0,d1,…\\0name") in UTF-8."""
    text = f"{dtype}\0{','.join(map(str, shape))}\0{name}"
    return int.from_bytes(blake3(text.encode()).digest(8), "little")


def part(seed: int, at: Positions, bits: UIntArray) -> int:
    """The sum of the terms of some elements. bits: (k,), in the order of the positions."""
    if len(at.starts) == 1:
        return cpu.digest_range(seed, int(at.starts[0]), bits)
    return cpu.digest_rows(seed, at.starts, at.run, bits)


def delta(seed: int, at: Positions, indices: NDArray[np.uint32], before: UIntArray, after: UIntArray) -> int:
    """What the digest gains, mod 2^64, if elements change from before to after, (k,) each.

    indices: (k,), in the order of the positions.
    """
    if len(at.starts) == 1:
        return cpu.digest_delta(seed, int(at.starts[0]), indices, before, after)
    places = np.empty(len(indices), np.int64)
    cpu.positions(at.starts, at.run, indices, places)
    return cpu.digest_delta(seed, 0, places, before, after)


def state_digest(tensors: Mapping[str, Bits]) -> int:
    """The digest of a whole state as an integer; segments in parallel.

    Of sharded tensors, what this process adds to it, each piece as often as it says: the sum over all processes is the
    digest where all copies of an element are equal, but for tensors without elements, which each of them counts.
    """
    return (empty_digest(tensors) + sum(ordered_map(lambda term: term(), _terms(tensors)))) & MASK


def share_digest(
    held: Mapping[str, Bits], tensors: Mapping[str, HasLayout], tied: Container[str], *, first: bool
) -> int:
    """What a rank adds to the digest of weights that several hold. Tensors without elements are the first rank's.

    held: what it holds. tensors: those of all ranks, by every name. tied: the further names.
    """
    total = state_digest({name: bits for name, bits in held.items() if bits.size})
    if first:
        total += empty_digest({name: spec for name, spec in tensors.items() if name not in tied})
    return total & MASK


def empty_digest(tensors: Mapping[str, HasLayout]) -> int:
    """The terms of the tensors without elements."""
    empty = {name: tuple(t.shape) for name, t in tensors.items() if not whole(tuple(t.shape)).size}
    return sum(mix(seed(name, tensors[name].dtype, shape)) for name, shape in empty.items()) & MASK


def _terms(tensors: Mapping[str, Bits]) -> Iterator[Callable[[], int]]:
    there = _OnDevices()
    for name, bits in tensors.items():
        root = seed(name, bits.dtype, bits.shape)
        if not isinstance(bits, Pieces):
            for a, b in () if there.takes(root, Piece(whole(bits.shape), bits), bits.shape) else segments(bits.size):
                yield partial(_of_range, root, bits, a, b)
            continue
        for piece in bits.pieces:
            box, held, times = piece
            if not times or there.takes(root, piece, bits.shape):
                continue
            for tile in tiles(bits.shape, box):
                view = held.view(tile.box.slices(box))
                at = tile.box.positions(bits.shape)
                yield partial(_of_view, root, at, view, times)
    yield from there.terms()


class _OnDevices:
    """Pieces whose elements a device's kernels reach: many of one device and width are summed up in a call.

    Of pieces in host memory the small ones: larger ones are divided among threads.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[Device, int, int], list[tuple[int, ...]]] = {}  # by device, width and times

    def takes(self, root: int, piece: Piece, shape: Shape) -> bool:
        """Take a piece of a tensor, if it is such a one."""
        box, bits, times = piece
        if not isinstance(bits, HostBits | TorchBits) or bits.device is None or bits.stored_itemsize != bits.itemsize:
            return False
        rows = rows_in(box, shape, box)
        if rows is None or not bits.contiguous or not 0 < bits.size < (SEGMENT if bits.device is HOST else cpu.WHOLE):
            return False
        (start, stride, run), (_, apart, _) = rows
        column = bits.address, apart, start, stride, run, root, bits.size
        self._pieces.setdefault((bits.device, bits.itemsize, times), []).append(column)
        return True

    def terms(self) -> Iterator[Callable[[], int]]:
        for (device, itemsize, times), columns in self._pieces.items():
            addresses, apart, starts, strides, runs, roots, sizes = zip(*columns, strict=True)
            spots = cpu.Spots(
                addresses=np.array(addresses, np.uint64),
                apart=np.array(apart, np.int64),
                starts=np.array(starts, np.int64),
                strides=np.array(strides, np.int64),
                runs=np.array(runs, np.int64),
                seeds=np.array(roots, np.uint64),
                times=np.ones(len(columns), np.int64),
            )
            elements = np.array(sizes, np.int64)
            for some in sliced(elements, SEGMENT) if device is HOST else [slice(None)]:
                yield partial(_on_device, device, spots.of(some), elements[some], itemsize, times)


def _on_device(device: Device, spots: cpu.Spots, sizes: NDArray[np.int64], itemsize: int, times: int) -> int:
    return times * device.digest(spots, sizes, itemsize)


def _of_range(root: int, bits: Bits, start: int, stop: int) -> int:
    return cpu.digest_range(root, start, bits.read(start, stop))


def _of_view(root: int, at: Positions, view: Bits, times: int) -> int:
    return times * part(root, at, view.read(0, view.size))


def to_hex(value: int) -> str:
    """16 lower-case hexadecimal digits."""
    return f"{value & MASK:016x}"


def digest(weights: Any) -> str:
    """Compute the fingerprint of all bits of the weights, as 16 hexadecimal digits.

    Two digests are equal exactly when names, dtypes, shapes and bits are equal (but for a chance of about 2^−64).
    Every element is read once: memory-bound up to a few GB/s per core.

    Args:
        weights: A torch module, or a mapping of name → tensor or array. Tied tensors count once, under the first name.

    Returns:
        The digest, such as "0123456789abcdef".

    Raises:
        TypeError: Something is not a tensor or an array, or has a dtype that is not supported.
    """
    return to_hex(state_digest(layout(weights)))
