"""DTensors, torch's sharded tensors, as pieces: FSDP2, tensor and expert parallelism, and any mesh of them.

torch says of a DTensor how each dimension of its mesh shards it, not which elements a rank holds. `ranges_held` finds
them, as ranges of indices along each dimension: a rank may hold several boxes.

FSDP2 on top of tensor parallelism shards what tensor parallelism has left to a rank, and torch writes that down as a
`_StridedShard` of an earlier mesh dimension. Read from left to right, as torch's placements are, it means the same
elements, but for some sizes that do not divide evenly: what `fully_shard` has made then decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pulse_rl.weights.box_sets import MAX_BOXES
from pulse_rl.weights.pieces import Pieces, Shard, counted, join

Ranges = list[tuple[int, int]]  # ranges [start, stop) of indices along one dimension, in the order they lie in memory


class Split(NamedTuple):
    """How one dimension of a mesh shards one dimension of a tensor."""

    parts: int  # ranks along the mesh's dimension
    at: int  # which of them this one is
    factor: int = 1  # 1 for a Shard; a _StridedShard first cuts into so many chunks and shards each


def pieces(tensor: Any, cast: str | None = None) -> Pieces:
    """View what this rank holds of a DTensor.

    tensor: on a mesh of any dimensions, sharded or replicated along each. cast: as for `as_bits`.
    Raises TypeError for a DTensor that holds partial sums, or has placements of another kind.
    """
    local = local_tensor(tensor)
    shape, splits = tuple(tensor.shape), _splits(tensor)
    empty = Shard(local.reshape(-1)[:0], shape=shape, flat_offset=0)  # the dtype, for a rank that holds no element
    if splits is None:
        return join([empty], cast)
    along = [ranges_held(n, splits[d], local.shape[d]) for d, n in enumerate(shape)]
    if math.prod(map(len, along)) > MAX_BOXES:
        raise TypeError(f"expected at most {MAX_BOXES} boxes on a rank, found {tensor.placements}: redistribute it")
    shards = []
    for cell in itertools.product(*(_with_positions(ranges) for ranges in along)):
        view = local[tuple(slice(at, at + stop - start) for at, start, stop in cell)]
        shards.append(Shard(view, shape=shape, offset=[start for _, start, _ in cell]))
    found = join([*shards, empty], cast)
    # torch counts the writes to a DTensor itself, not those to its local tensor.
    parts = [piece._replace(bits=counted(piece.bits, tensor)) for piece in found.pieces]
    # FSDP2 pads what it allocates, so that a rank without elements has memory too.
    return Pieces(found.dtype, shape, parts, local.untyped_storage().data_ptr() or None)


def local_tensor(tensor: Any) -> Any:
    """The tensor that holds what this rank has of a DTensor: the live one, nothing of autograd's."""
    import torch

    with torch.no_grad():
        return tensor.to_local()


def _splits(tensor: Any) -> dict[int, list[Split]] | None:
    """How each dimension of a DTensor is sharded, from left to right; None on a rank that is not in its mesh."""
    from torch.distributed.tensor import Shard as Sharded
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    found: dict[int, list[Split]] = {d: [] for d in range(tensor.ndim)}
    for along, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise TypeError(
                f"expected a DTensor that holds elements, found partial sums ({tensor.placements}): redistribute it "
                "first"
            )
        if placement.is_replicate():
            continue
        if not isinstance(placement, Sharded | _StridedShard):
            raise TypeError(f"expected placements Shard and Replicate, found {placement}: redistribute it first")
        if coordinate is not None:
            factor = int(getattr(placement, "split_factor", 1))
            found[placement.dim].append(Split(mesh.size(along), coordinate[along], factor))
    return found if coordinate is not None else None


def ranges_held(n: int, splits: Sequence[Split], expected: int) -> Ranges:
    """The ranges of n indices that a rank holds after all splits of this dimension, in the order of its memory.

    expected: how many indices it does hold. Raises TypeError if the splits say otherwise.
    """
    readings = [_left_to_right(n, splits)]
    if _made_by_fsdp(splits):
        readings.insert(0, _strided_last(n, splits))
    for ranges in readings:
        if sum(stop - start for start, stop in ranges) == expected:
            return ranges
    raise TypeError(
        f"expected a local tensor of {sum(stop - start for start, stop in readings[0])} indices along a dimension of "
        f"{n} that is sharded by {', '.join(map(str, splits)) or 'nothing'}, found {expected}"
    )


def _left_to_right(n: int, splits: Sequence[Split]) -> Ranges:
    ranges = [(0, n)]
    for parts, at, factor in splits:
        chunks = (_chunk(ranges, factor, i) for i in range(factor))
        ranges = _joined([piece for chunk in chunks for piece in _chunk(chunk, parts, at)])
    return ranges


def _strided_last(n: int, splits: Sequence[Split]) -> Ranges:
    ranges = [(0, n)]
    for parts, at, _ in sorted(splits, key=lambda split: split.factor > 1):
        ranges = _chunk(ranges, parts, at)
    return ranges


def _made_by_fsdp(splits: Sequence[Split]) -> bool:
    """Whether the first split is a strided one, over all that the others have made."""
    return len(splits) > 1 and splits[0].factor == math.prod(split.parts for split in splits[1:])


def _chunk(ranges: Ranges, parts: int, at: int) -> Ranges:
    """What torch.chunk gives part `at` of: all parts of one size, but for the last ones."""
    size = -(-sum(stop - start for start, stop in ranges) // parts)
    found, low, high = [], at * size, (at + 1) * size
    for start, stop in ranges:
        if high > 0 and low < stop - start:
            found.append((start + max(0, low), start + min(stop - start, high)))
        low, high = low - (stop - start), high - (stop - start)
    return found


def _joined(ranges: Ranges) -> Ranges:
    """The same indices, ranges that follow each other as one."""
    found: Ranges = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _with_positions(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Each range with its position in memory before it."""
    ends = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
    return [(at, start, stop) for at, (start, stop) in zip(ends, ranges, strict=False)]
