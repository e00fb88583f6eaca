"""How the weights of a receiver lie in memory: contiguous, strided or fused with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

import torch

from pulse_rl.testing.models import PublishedModel, State, put
from pulse_rl.testing.protocol import ConformanceError

Place: TypeAlias = Literal["plain", "strided", "fused"]
_FILL = 0xA5  # of memory beside the weights, which nobody may write to


class Guard(NamedTuple):
    """Memory beside the weights: bytes, of any strides."""

    beside: str
    memory: torch.Tensor

    def check(self) -> None:
        """Raise ConformanceError if it was written to."""
        if bool((self.memory != _FILL).any()):
            raise ConformanceError(f"memory {self.beside} was written to, which is not one of the published tensors")


def make_weights(
    model: PublishedModel, state: State, place: Place, *, tied_apart: bool
) -> tuple[dict[str, torch.Tensor], list[Guard]]:
    """Weights that hold a state, and the memory beside them.

    tied_apart: whether tied names are tensors with memory of their own.
    """
    shapes = {name: (getattr(torch, dtype), shape) for name, (dtype, shape) in model.tensors.items()}
    guards: list[Guard] = []
    made: dict[str, torch.Tensor] = {}
    if place == "fused":
        for _, group in groupby(sorted(shapes, key=lambda name: _key(shapes[name])), lambda name: _key(shapes[name])):
            made |= _fused({name: shapes[name] for name in group}, guards)
    else:
        for name, (dtype, shape) in shapes.items():
            if place == "strided":
                made[name] = _strided(name, dtype, shape, guards)
            else:
                made[name] = torch.empty(shape, dtype=dtype)
    for name, bits in state.items():
        put(made[name], bits)
    for alias, owner in model.tied.items():
        made[alias] = made[owner].clone() if tied_apart else made[owner]
    return made, guards


def _strided(name: str, dtype: torch.dtype, shape: tuple[int, ...], guards: list[Guard]) -> torch.Tensor:
    """Dimensions in reverse order, and a gap of one element after each."""
    nbytes = dtype.itemsize
    buffer = torch.full((math.prod(shape) * 2 * nbytes,), _FILL, dtype=torch.uint8)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    every = buffer.view(dtype).reshape(*reversed(shape), 2)
    guards.append(Guard(f"between the elements of {name!r}", buffer.reshape(-1, 2, nbytes)[:, 1]))
    return every[..., 0].permute(*reversed(range(len(shape))))


def _key(spec: tuple[torch.dtype, tuple[int, ...]]) -> tuple[str, int, tuple[int, ...]]:
    dtype, shape = spec
    return str(dtype), len(shape), shape[1:]


def _fused(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], guards: list[Guard]) -> dict[str, torch.Tensor]:
    """Tensors of one dtype and of equal rows in one matrix: below each other, with rows that belong to none.

    Where they have as many rows as columns, beside each other instead, so that their rows are not contiguous.
    """
    made: dict[str, torch.Tensor] = {}
    dtype, first = next(iter(shapes.values()))
    names = ", ".join(map(repr, shapes))
    if not first:
        return {name: torch.empty((), dtype=dtype) for name in shapes}
    beside = len(first) == 2 and len({shape for _, shape in shapes.values()}) == 1 and len(shapes) > 1
    rows = sum(shape[0] for _, shape in shapes.values())
    row = math.prod(first[1:])
    if beside:
        height = first[0]
        buffer = torch.full((height, (len(shapes) * row + 2) * dtype.itemsize), _FILL, dtype=torch.uint8)
        for number, name in enumerate(shapes):
            made[name] = buffer.view(dtype)[:, number * row : (number + 1) * row]
        guards.append(Guard(f"beside {names}", buffer[:, -2 * dtype.itemsize :]))
        return made
    buffer = torch.full(((rows + 2) * row * dtype.itemsize,), _FILL, dtype=torch.uint8)
    matrix, at = buffer.view(dtype).reshape(rows + 2, *first[1:]), 1
    for name, (_, shape) in shapes.items():
        made[name] = matrix[at : at + shape[0]]
        at += shape[0]
    guards += [
        Guard(f"before {names}", buffer[: row * dtype.itemsize]),
        Guard(f"after {names}", buffer[at * row * dtype.itemsize :]),
    ]
    return made
