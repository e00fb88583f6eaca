"""Megatron's weights in pieces, by a map that is learned from the converter that writes Hugging Face checkpoints.

    layout = learn(to_hugging_face, dict(model.named_parameters()))
    publisher.publish(layout.shards(dict(model.named_parameters())), version=step)

Megatron keeps query, key and value of each group of heads together, gate and up in one matrix, experts in groups, a
padded vocabulary, and each tensor-parallel rank its part of all that. A converter to Hugging Face's names and layout
only moves elements. `learn` sends the number of each element through it, reads where the numbers come out, and writes
that down as boxes: which box of a published tensor is which strided view of which tensor in memory. It proves them on
random bits, and refuses what is more than a rearrangement. No converter runs when weights are published.

Nothing here knows Megatron: any framework whose layout is a rearrangement of the checkpoint's can be learned so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl import Shard
from pulse_rl.errors import require
from pulse_rl.weights.box_sets import MAX_BOXES
from pulse_rl.weights.boxes import Box, Shape

Converter = Callable[[Any], Mapping[str, Any]]


class BoxView(NamedTuple):
    """A box of a published tensor, and where a tensor of this rank holds it.

    Attributes:
        box: The box.
        name: The name of the tensor in memory.
        start: The flat position in it of the box's first element.
        strides: The distance in it, in elements, of neighbours along each dimension of the box.
    """

    box: Box
    name: str
    start: int
    strides: Shape


@dataclass(frozen=True)
class Learned:
    """Where a rank's tensors lie in the published ones.

    Attributes:
        published: The name of each published tensor, with its dtype and shape as a tensor on the meta device.
        views: The name of each published tensor, with the boxes of it that this rank holds, maybe none.
        tied: The names of published tensors of the same elements as an earlier one, with the name of that.
        expected: The shape of each tensor of this rank.
        unused: The names of this rank's tensors of which no element is published.
    """

    published: Mapping[str, Any]
    views: Mapping[str, tuple[BoxView, ...]]
    tied: Mapping[str, str]
    expected: Mapping[str, Shape]
    unused: tuple[str, ...]

    def shards(self, tensors: Mapping[str, Any]) -> dict[str, list[Shard]]:
        """Give what this rank holds of each published tensor, as views of live memory.

        Args:
            tensors: This rank's tensors by name, as they were given to `learn`.

        Returns:
            Published name → shards, for `Publisher.publish` and `Subscriber.sync`. Names that come from the same
            elements have the same list: they are published as tied.

        Raises:
            ValueError: A tensor is missing, or has another shape than `learn` saw, or is not contiguous.
        """
        for name, shape in self.expected.items():
            if name not in tensors or tuple(tensors[name].shape) != shape or not tensors[name].is_contiguous():
                other = "none" if name not in tensors else f"shape {list(tensors[name].shape)}"
                raise ValueError(f"tensor {name!r}: expected a contiguous one of shape {list(shape)}, found {other}")
        torch = require("torch", "torch")
        found: dict[str, list[Shard]] = {}
        for name, views in self.views.items():
            if name in self.tied:
                found[name] = found[self.tied[name]]
                continue
            whole = self.published[name]
            shape = tuple(whole.shape)
            parts = [Shard(torch.empty(0, dtype=whole.dtype), shape=shape, flat_offset=0)]  # of a rank without any
            for box, source, start, strides in views:
                memory = tensors[source].detach()
                view = memory.as_strided(box.sizes, strides, memory.storage_offset() + start)
                parts.append(Shard(view, shape=shape, offset=box.offset))
            found[name] = parts
        return found


def learn(
    convert: Converter,
    tensors: Mapping[str, Any],
    *,
    ranks: Sequence[Mapping[str, Any]] | None = None,
    rank: int = 0,
    replicated: Collection[str] = (),
) -> Learned:
    """Learn where each element of a rank's tensors lies in the tensors that a converter makes of them.

    The converter is called a few times, with tensors in host memory that hold numbers instead of weights. It takes 20
    to 45 bytes and 0.15 to 0.3 µs for each element that it is given: learn a large model layer by layer.

    Args:
        convert: Takes name → tensor and returns published name → tensor. With `ranks`, it takes a list of such
            mappings, one for each rank, and joins them itself.
        tensors: This rank's tensors: contiguous, of any dtype; only shapes and dtypes are read.
        ranks: For tensors that are cut among ranks: of each rank in order, its tensors by name, as
            `torch.empty_like(tensor, device="meta")`, exchanged by `torch.distributed.all_gather_object`.
        rank: Which of `ranks` this one is.
        replicated: Names of tensors that all ranks that have them hold alike, as norms.

    Returns:
        The map, which is the same for all steps of a run.

    Raises:
        TypeError: The converter returned something other than tensors.
        ValueError: A published tensor is more than a rearrangement of elements, or one into more than 65,536 boxes.
    """
    if ranks is not None and _shapes(ranks[rank]) != _shapes(tensors):
        raise ValueError(f"ranks[{rank}]: expected the shapes of this rank's tensors, found others")
    given = _Given([tensors] if ranks is None else ranks, replicated)
    several = ranks is not None
    sources = _sources(convert, given, several)
    cells = {name: _cells(name, source, given) for name, source in sources.items()}
    published = _prove(convert, given, several, cells)
    here = None if ranks is None else rank
    views = {
        name: tuple(cell.view(given) for cell in each if given.rank_of[cell.tensor] in (None, here) or here is None)
        for name, each in cells.items()
    }
    first: dict[bytes, str] = {}
    owners = {name: first.setdefault(_fingerprint(source), name) for name, source in sources.items()}
    tied = {name: owner for name, owner in owners.items() if owner != name}
    used = {view.name for each in views.values() for view in each}
    return Learned(published, views, tied, _shapes(tensors), tuple(name for name in tensors if name not in used))


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class _Given:
    """The tensors of all ranks; element p of tensor t has the number `first[t]` + p, and no element has 0."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]], replicated: Collection[str]) -> None:
        self.names: list[str] = []
        self.rank_of: list[int | None] = []  # None: all that have it
        self.tensors: list[Any] = []  # their shapes and dtypes
        self._of_ranks: list[dict[str, int]] = []  # each rank's names → which tensor
        known: dict[tuple[int | None, str], int] = {}
        for rank, tensors in enumerate(ranks):
            numbered = {}
            for name, tensor in tensors.items():
                owner = None if name in replicated else rank
                t = numbered[name] = known.setdefault((owner, name), len(self.tensors))
                if t == len(self.tensors):
                    self.names.append(name)
                    self.rank_of.append(owner)
                    self.tensors.append(tensor)
                elif tuple(tensor.shape) != tuple(self.tensors[t].shape):
                    raise ValueError(f"tensor {name!r}: expected one shape on all ranks, as it is in `replicated`")
            self._of_ranks.append(numbered)
        sizes = [math.prod(tensor.shape) for tensor in self.tensors]
        self.first = np.array([1, *(1 + np.cumsum(sizes, dtype=np.int64))], np.int64)

    @property
    def end(self) -> int:
        """The number after the last element's."""
        return int(self.first[-1])

    def numbers(self, t: int) -> Any:
        """The numbers of a tensor's elements."""
        torch = require("torch", "torch")
        return torch.arange(int(self.first[t]), int(self.first[t + 1])).view(tuple(self.tensors[t].shape))

    def convert(self, convert: Converter, several: bool, values: Sequence[Any]) -> dict[str, Any]:
        """What the converter makes of these tensors, which it may change."""
        mappings = [{name: values[t].clone() for name, t in numbered.items()} for numbered in self._of_ranks]
        found = dict(convert(mappings if several else mappings[0]))
        torch = require("torch", "torch")
        for name, tensor in found.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise TypeError(f"converter: expected name → tensor, found {name!r} → {type(tensor).__name__}")
        return found


class _Cell(NamedTuple):
    """A box of a published tensor that is one strided view of one tensor."""

    box: Box
    tensor: int  # which of the given ones
    start: int
    strides: Shape

    def view(self, given: _Given) -> BoxView:
        return BoxView(self.box, given.names[self.tensor], self.start, self.strides)


def _sources(convert: Converter, given: _Given, several: bool) -> dict[str, NDArray[np.int64]]:
    """For each published tensor, the number of the element that each of its elements is."""
    torch = require("torch", "torch")
    numbers = [given.numbers(t) for t in range(len(given.tensors))]
    refused: Exception | None = None
    try:
        found = given.convert(convert, several, numbers)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # it takes weights, no whole numbers
        found, refused = {}, error
    if refused is None and all(tensor.dtype == torch.int64 for tensor in found.values()):
        sources = {name: tensor.numpy() for name, tensor in found.items()}
    else:
        sources = _by_digits(convert, given, several, numbers, refused)
    for name, source in sources.items():
        if source.size and (source.min() < 0 or source.max() >= given.end):
            raise _computed(name)
        if missing := int((source == 0).sum()):
            raise ValueError(
                f"tensor {name!r}: expected elements of the given tensors, found {missing} of none of them"
            )
    return sources


def _computed(name: str) -> ValueError:
    return ValueError(f"tensor {name!r}: expected elements that are moved only, found computed ones")


def _by_digits(
    convert: Converter, given: _Given, several: bool, numbers: Sequence[Any], refused: Exception | None
) -> dict[str, NDArray[np.int64]]:
    """The same without a change of dtype: digit by digit, as many as each dtype holds exactly."""
    torch = require("torch", "torch")
    base = min((_exact(tensor.dtype) for tensor in given.tensors), default=2)
    found: dict[str, NDArray[np.int64]] = {}
    unit = 1
    while unit < given.end:
        digits = [
            (number // unit % base).to(tensor.dtype) for number, tensor in zip(numbers, given.tensors, strict=True)
        ]
        try:
            converted = given.convert(convert, several, digits)
        except Exception as error:
            raise error from refused
        for name, tensor in converted.items():
            digit = tensor.to(torch.float64).numpy()
            if not ((digit >= 0) & (digit < base) & (digit == np.floor(digit))).all():
                raise _computed(name)
            found[name] = found.get(name, np.int64(0)) + unit * digit.astype(np.int64)
        unit *= base
    return found


def _exact(dtype: Any) -> int:
    """Below which whole number a dtype holds all of them."""
    torch = require("torch", "torch")
    if dtype == torch.bool:
        return 2
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else min(int(torch.iinfo(dtype).max), 1 << 52)


def _cells(name: str, source: NDArray[np.int64], given: _Given) -> list[_Cell]:
    """Cut a published tensor where neighbours along a dimension are not at its usual distance in one tensor."""
    if source.size == 0:
        return []
    owner = np.searchsorted(given.first, source, side="right").astype(np.int32) - 1
    strides, edges = [], []
    for d, n in enumerate(source.shape):
        steps, changes = np.diff(source, axis=d), np.diff(owner, axis=d) != 0
        stride = max(0, _usual(steps[~changes]))  # memory cannot be viewed backwards
        cut = ((steps != stride) | changes).any(axis=tuple(e for e in range(source.ndim) if e != d))
        strides.append(stride)
        edges.append([0, *(1 + np.flatnonzero(cut)).tolist(), n])
    boxes = math.prod(len(along) - 1 for along in edges)
    if boxes > MAX_BOXES:
        raise ValueError(
            f"tensor {name!r}: expected a rearrangement into at most {MAX_BOXES} boxes, found {boxes}: elements are "
            "shuffled"
        )
    found = []
    for cell in itertools.product(*(itertools.pairwise(along) for along in edges)):
        offset = tuple(start for start, _ in cell)
        t = int(owner[offset])
        box = Box(offset, tuple(stop - start for start, stop in cell))
        found.append(_Cell(box, t, int(source[offset] - given.first[t]), tuple(strides)))
    return found


def _usual(steps: NDArray[np.int64]) -> int:
    """The most frequent of these distances, by a sample of them."""
    if len(steps) == 0:
        return 0
    values, counts = np.unique(steps[:: max(1, len(steps) >> 16)], return_counts=True)
    return int(values[counts.argmax()])


def _prove(convert: Converter, given: _Given, several: bool, cells: Mapping[str, list[_Cell]]) -> dict[str, Any]:
    """Compare what the converter makes of random bits with the views. Returns the published dtypes and shapes."""
    torch = require("torch", "torch")
    published: dict[str, Any] = {}
    for seed in (1, 2):
        random = torch.Generator().manual_seed(seed)
        values = [_random(tensor, random) for tensor in given.tensors]
        found = given.convert(convert, several, values)
        if found.keys() != cells.keys():
            raise ValueError("converter: expected the same names for all values, found others")
        for name, tensor in found.items():
            published[name] = torch.empty_like(tensor, device="meta")
            for cell in cells[name]:
                source = values[cell.tensor]
                if source.dtype != tensor.dtype:
                    raise ValueError(
                        f"tensor {name!r}: expected elements that are moved only, found {source.dtype} converted to "
                        f"{tensor.dtype}; publish with cast= instead"
                    )
                view = source.as_strided(cell.box.sizes, cell.strides, cell.start)
                box = tensor[tuple(slice(a, a + n) for a, n in zip(*cell.box, strict=True))]
                if not np.array_equal(_bits(view), _bits(box)):
                    raise _computed(name)
    return published


def _random(tensor: Any, random: Any) -> Any:
    """Random bits in place of a tensor; no NaN, whose bits a converter may change by a cast there and back."""
    torch = require("torch", "torch")
    if tensor.dtype == torch.bool:
        return torch.randint(0, 2, tuple(tensor.shape), generator=random).bool()
    nbytes = math.prod(tensor.shape) * tensor.element_size()
    found = torch.randint(0, 256, (nbytes,), generator=random, dtype=torch.uint8).view(tensor.dtype)
    if tensor.dtype.is_floating_point:
        found[found.to(torch.float64).isnan()] = 1
    return found.view(tuple(tensor.shape))


def _bits(tensor: Any) -> NDArray[Any]:
    torch = require("torch", "torch")
    array: NDArray[Any] = tensor.detach().view(getattr(torch, f"uint{8 * tensor.element_size()}")).numpy()
    return array


def _fingerprint(source: NDArray[np.int64]) -> bytes:
    return blake3(np.ascontiguousarray(source).reshape(-1).view(np.uint8).data).digest() + str(source.shape).encode()
