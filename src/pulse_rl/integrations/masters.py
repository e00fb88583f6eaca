"""Changes collected where an optimizer casts its FP32 masters into the model's weights, so that no copy is kept.

    collected = MasterChanges(model)
    collected.follow(optimizer)                                # DeepSpeed's BF16 optimizer, or one of Megatron-core
    channel = pulse.Channel(group, collected=collected)

Any other optimizer calls `before_cast(weight, master)` right before it copies a master into its weight. The weights
still hold their old bits then: what the cast is about to change is compared as bits, so the sign of a zero and the
payload of a NaN count. Of an element that changes several times the first old bits stay, so changes are those since the
last send, whatever the number of optimizer steps in between. Kept are 4 bytes and the old element for each.

Megatron's optimizers update some weights in place: FP32 ones, and all where FusedAdam holds the masters. Of these
`follow` keeps a copy to compare with.

Something else that writes to the weights is not seen here. `Channel` finds it all the same, as it counts the digest of
the old bits at each send, and then sends all bits.

Attributes of optimizers are read as DeepSpeed 0.19 and Megatron-core 0.16 have them; neither need be imported here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pulse_rl.dtypes import UINTS, UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.patch.laid_over import laid_over
from pulse_rl.patch.live import each_alone, overlapping
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box, Shape, tiles
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.pieces import pieces_of
from pulse_rl.weights.segments import segments

if TYPE_CHECKING:
    import torch

# A weight, and the master that is cast into it: None, or the same memory, where it is updated in place.
Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


class _Region:
    """The memory of one piece of a tensor, and what changed in it."""

    def __init__(self, name: str, shape: Shape, box: Box, bits: Bits) -> None:
        self.name, self.shape, self.box = name, shape, box
        self.device, self.start, self.stop = bits.extent
        self.itemsize, self._bits = bits.itemsize, bits
        self.copy: UIntArray | None = None  # of what no cast writes to
        self.clear()

    def keep(self) -> None:
        """Keep a copy, as this memory is updated in place."""
        self.copy = self._bits.read(0, self._bits.size).copy()

    def look(self) -> None:
        """Find what was updated in place."""
        if self.copy is not None:
            indices = np.flatnonzero(self._bits.read(0, self._bits.size) != self.copy).astype(np.uint32)
            self.add(indices, self.copy[indices])

    def clear(self) -> None:
        if self.copy is not None:
            self.keep()
        self.old = Changes(np.empty(0, np.uint32), np.empty(0, UINTS[self.itemsize]))

    def add(self, indices: NDArray[np.uint32], values: UIntArray) -> None:
        """Add elements that change, with their old bits; of those that are known the older bits stay."""
        known, more = np.array([0, len(self.old.indices)]), np.array([0, len(indices)])
        _, *found = cpu.unions(known, *self.old, more, indices, values)
        self.old = Changes(*(each.copy() for each in found))

    def positions(self) -> NDArray[np.int64]:
        """Where these elements lie in the tensor: flat, ascending."""
        at = self.box.positions(self.shape)
        rows, columns = np.divmod(self.old.indices.astype(np.int64), at.run)
        return at.starts[rows] + columns


class MasterChanges:
    """The changes of a model's weights since the last send, collected while an optimizer casts its masters into them.

    Where several ranks share the masters (ZeRO, a distributed optimizer), a rank sees only the casts of the masters
    that it holds: give it and `Channel.send` the pieces that these are cast into, as `pulse.Shard`, and let all these
    ranks send.

    Args:
        weights: A torch module, or a mapping of name → tensor, DTensor, `Shard` or a list of shards: what is sent, in
            contiguous memory that stays where it is.

    Raises:
        ValueError: A tensor is not contiguous, or tensors overlap in memory.
        TypeError: Something is not a tensor.
    """

    def __init__(self, weights: Any) -> None:
        found = layout(weights)
        if overlapping(each_alone(found)):
            raise ValueError("tensors overlap in memory: expected weights that do not")
        regions = []
        for name, tensor in found.items():
            for box, bits, _ in pieces_of(tensor):
                if not bits.contiguous:
                    raise ValueError(f"tensor {name!r}: expected contiguous memory, found other strides")
                if box.size:
                    regions.append(_Region(name, tuple(tensor.shape), box, bits))
        self._regions: dict[object, list[_Region]] = {}  # by device, in the order of memory
        for region in sorted(regions, key=lambda region: region.start):
            self._regions.setdefault(region.device, []).append(region)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept."""
        regions = [region for found in self._regions.values() for region in found]
        copies = sum(region.copy.nbytes for region in regions if region.copy is not None)
        return copies + sum(region.old.indices.nbytes + region.old.values.nbytes for region in regions)

    def before_cast(self, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Collect what a cast is about to change. Call it right before `weight.copy_(master)`.

        Args:
            weight: A tensor in the memory of the weights: a parameter, a part of one, or a buffer that holds several;
                what in it is no weight, as padding, is passed over.
            master: What is about to be copied into it, of as many elements.

        Raises:
            ValueError: The sizes differ, or the weight is not contiguous.
        """
        weight, master = weight.detach(), master.detach()
        if weight.numel() != master.numel() or not weight.is_contiguous():
            raise ValueError(
                f"before_cast: expected contiguous weights of {master.numel()} elements as the masters, found "
                f"{weight.numel()} with strides {weight.stride()}"
            )
        weight, master = weight.view(-1), master.reshape(-1)
        regions = self._regions.get(_device(weight), [])
        starts = [region.start for region in regions]
        itemsize = weight.element_size()
        for start, stop in segments(weight.numel()):
            indices, values = _changing(weight[start:stop], master[start:stop])
            low = weight.data_ptr() + start * itemsize
            place = max(0, bisect_right(starts, low) - 1)
            for region in regions[place:]:
                if region.start >= low + (stop - start) * itemsize:
                    break
                shift = (region.start - low) // itemsize  # may be negative: the region began before
                first, last = np.searchsorted(indices, [shift, shift + (region.stop - region.start) // itemsize])
                if first < last:
                    region.add((indices[first:last] - shift).astype(np.uint32), values[first:last])

    def follow(self, optimizer: Any) -> None:
        """Call `before_cast` before each cast of an optimizer that is known; keep a copy of what it updates in place.

        Args:
            optimizer: DeepSpeed's `BF16_Optimizer`, or Megatron-core's `Float16OptimizerWithFloat16Params` or
                `DistributedOptimizer`; of a chained optimizer each one in it.

        Raises:
            TypeError: It is another one.
        """
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            for marks, method, pairs in _KNOWN:
                if all(hasattr(one, mark) for mark in (*marks, method)):
                    self._wrap(one, method, pairs)
                    break
            else:
                raise TypeError(
                    "expected DeepSpeed's BF16_Optimizer or an optimizer of Megatron-core that holds FP32 masters, "
                    f"found {type(one).__name__}: call before_cast(weight, master) before it casts"
                )

    def _wrap(self, optimizer: Any, name: str, pairs: Callable[[Any], Iterator[Pair]]) -> None:
        method = getattr(optimizer, name)
        for weight, master in pairs(optimizer):
            if master is None or master.data_ptr() == weight.data_ptr():
                start, stop = weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size()
                for region in self._regions.get(_device(weight), []):
                    if region.start < stop and start < region.stop:
                        region.keep()

        @wraps(method)
        def cast(*arguments: Any, **options: Any) -> Any:
            for weight, master in pairs(optimizer):
                if master is not None:
                    self.before_cast(weight, master)
            return method(*arguments, **options)

        setattr(optimizer, name, cast)

    def before(self, own: Layout) -> Mapping[str, Bits]:
        """Give the weights as they were when `clear` was last called, to be read only.

        Args:
            own: The same weights, or parts of them.

        Returns:
            Name → its old bits: a view of the weights, which must not change while it is in use.
        """
        by_name: dict[str, list[_Region]] = {}
        for region in (region for found in self._regions.values() for region in found):
            region.look()
            if len(region.old.indices):
                by_name.setdefault(region.name, []).append(region)
        return {name: laid_over(tensor, _by_tile(tensor, by_name.get(name, []))) for name, tensor in own.items()}

    def clear(self) -> None:
        """Begin anew: what the weights hold now is what the next changes start from."""
        for regions in self._regions.values():
            for region in regions:
                region.clear()


def _device(tensor: torch.Tensor) -> str:
    """As `Bits.extent` calls it."""
    return "host" if tensor.device.type == "cpu" else str(tensor.device)


def _by_tile(tensor: Bits, regions: Iterable[_Region]) -> dict[Box, Changes]:
    """The old bits of the elements that changed, for each tile of a tensor that has any."""
    parts = [(region.positions(), region.old.values) for region in regions]
    if not parts:
        return {}
    flat, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(flat, kind="stable")  # several pieces may interleave
    flat, values = flat[order], values[order]
    found: dict[Box, Changes] = {}
    shape = tuple(tensor.shape)
    for piece in pieces_of(tensor):
        for tile in tiles(shape, piece.box):
            at = tile.box.positions(shape)
            low, high = np.searchsorted(flat, at.starts), np.searchsorted(flat, at.starts + at.run)
            counts = high - low
            if not counts.any():
                continue
            rows = np.repeat(np.arange(len(counts)), counts)
            chosen = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + low[rows]
            indices = rows * at.run + flat[chosen] - at.starts[rows]
            found[tile.box] = Changes(indices.astype(np.uint32), values[chosen])
    return found


def _changing(weight: torch.Tensor, master: torch.Tensor) -> tuple[NDArray[np.int64], UIntArray]:
    """The elements of a weight, (n,), whose bits a cast of the master changes: their indices and old bits, (k,) each.

    NaN counts as changing, as torch gives it other bits on each kind of processor.
    """
    import torch

    integer = getattr(torch, f"int{8 * weight.element_size()}")
    new = master.to(weight.device, weight.dtype)
    changing = new.view(integer) != weight.view(integer)
    if weight.is_floating_point():
        changing |= new.isnan()
    indices = changing.nonzero().view(-1)
    values: UIntArray = weight.view(integer)[indices].cpu().numpy().view(UINTS[weight.element_size()])
    return indices.cpu().numpy(), values


def _deepspeed(optimizer: Any) -> Iterator[Pair]:
    """Of DeepSpeed's BF16_Optimizer: its partition of each group."""
    import torch.distributed as dist

    groups = zip(
        optimizer.bf16_partitioned_groups,
        optimizer.fp32_groups_flat_partition,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for partitions, master, group in groups:
        yield partitions[dist.get_rank(group)], master


def _megatron(optimizer: Any) -> Iterator[Pair]:
    """Of Megatron-core's Float16OptimizerWithFloat16Params: whole parameters."""
    yield from zip(*optimizer._get_model_and_main_params_data_float16(), strict=True)
    for weight in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield weight, None


def _megatron_distributed(optimizer: Any) -> Iterator[Pair]:
    """Of Megatron-core's DistributedOptimizer: this rank's range of each parameter."""
    kinds = (
        (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
        (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
    )
    for masters, weights in kinds:
        for master_group, weight_group in zip(masters, weights, strict=True):
            for master, weight in zip(master_group, weight_group, strict=True):
                part = optimizer._get_model_param_range_map(weight)["param"]
                yield weight.detach().view(-1)[part.start : part.end], master


# What an optimizer has, the method that casts, and what it casts.
_KNOWN: tuple[tuple[tuple[str, ...], str, Callable[[Any], Iterator[Pair]]], ...] = (
    (("bf16_partitioned_groups", "fp32_groups_flat_partition"), "update_lp_params", _deepspeed),
    (
        ("shard_fp32_from_float16_groups", "model_float16_groups"),
        "_copy_main_params_to_model_params",
        _megatron_distributed,
    ),
    (("fp32_from_float16_groups", "float16_groups"), "_copy_main_params_to_model_params", _megatron),
)
