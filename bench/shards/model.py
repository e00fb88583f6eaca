"""The model of `bench shards`, of which each rank holds a share: FP32 masters, moved as in `bench sync`.

A tensor is drawn in blocks of rows, each from another seed, so a rank draws only the blocks that it holds a part
of. All ranks, however many and whatever they hold, hold shares of the same weights.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

import pulse_rl as pulse
from bench.roles import CHUNK, LEARNING_RATE, MOVE_STD, WEIGHT_STD, shapes
from pulse_rl.weights.boxes import Box, whole

Layout = Literal["rows", "rows and columns"]  # as FSDP2 cuts a model, and as tensor parallelism does

BY_COLUMNS = ("o_proj.weight", "down_proj.weight")  # of tensor parallelism; other matrices are cut by rows


class ModelSize(NamedTuple):
    """How large the model is."""

    layers: int
    width: int
    vocab: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes(self.layers, self.width, self.vocab)

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())


class Held(NamedTuple):
    """What a rank holds of one tensor."""

    number: int  # of the tensor
    shape: tuple[int, ...]
    box: Box
    values: torch.Tensor  # FP32, of the box's sizes


def box_of(name: str, shape: tuple[int, ...], layout: Layout, rank: int, ranks: int) -> Box:
    """What a rank holds of a tensor; one that has no elements where there are more ranks than rows."""
    cut = 0
    if layout == "rows and columns":
        if len(shape) == 1:
            return whole(shape)  # a norm, on all ranks
        cut = 1 if name.endswith(BY_COLUMNS) else 0
    step = -(-shape[cut] // ranks)
    start = min(rank * step, shape[cut])
    offset, sizes = [0] * len(shape), list(shape)
    offset[cut], sizes[cut] = start, min(step, shape[cut] - start)
    return Box(tuple(offset), tuple(sizes))


def _shard(held: Held, values: torch.Tensor) -> torch.Tensor | pulse.Shard:
    if held.box == whole(held.shape):
        return values
    return pulse.Shard(values, shape=held.shape, offset=held.box.offset)


class Model:
    """The share of one rank."""

    def __init__(self, size: ModelSize, layout: Layout, rank: int, ranks: int) -> None:
        self._held: dict[str, Held] = {}
        for number, (name, shape) in enumerate(size.shapes().items()):
            box = box_of(name, shape, layout, rank, ranks)
            self._held[name] = Held(number, shape, box, torch.empty(box.sizes))
        self.restart()

    def restart(self) -> None:
        """Take the weights back to the first version."""
        self._version = 0
        for held in self._held.values():
            for part, drawn in self._drawn(held, WEIGHT_STD):
                part.copy_(drawn)

    def step(self) -> None:
        """Move the weights as an Adam step does."""
        self._version += 1
        for held in self._held.values():
            for part, move in self._drawn(held, MOVE_STD):
                part.sub_(move.clamp_(-1.0, 1.0), alpha=LEARNING_RATE)

    def weights(self) -> dict[str, torch.Tensor | pulse.Shard]:
        """To be published."""
        return {name: _shard(held, held.values) for name, held in self._held.items()}

    def live(self) -> dict[str, torch.Tensor | pulse.Shard]:
        """A copy in BF16, to be synced."""
        return {name: _shard(held, held.values.bfloat16()) for name, held in self._held.items()}

    def _drawn(self, held: Held, std: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of what is held, with normal numbers of its shape for this version."""
        rows, inner = held.shape[0], held.shape[1:]
        step = max(1, CHUNK // (inner[0] if inner else 1))
        generator, first = torch.Generator(), held.box.offset[0]
        columns = tuple(slice(a, a + n) for a, n in zip(held.box.offset[1:], held.box.sizes[1:], strict=True))
        for block, start in enumerate(range(0, rows, step)):
            stop = min(start + step, rows)
            low, high = max(start, first), min(stop, first + held.box.sizes[0])
            if low < high:
                generator.manual_seed((self._version << 20) + (held.number << 8) + block)  # of 32 bits
                drawn = torch.empty(stop - start, *inner).normal_(0.0, std, generator=generator)
                yield held.values[low - first : high - first], drawn[(slice(low - start, high - start), *columns)]
