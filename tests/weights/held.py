"""What each of several ranks holds of some tensors, put together: for the tests of weights in pieces."""

from typing import Any, NamedTuple

import numpy as np
import torch

from pulse_rl.weights.bits import Bits
from pulse_rl.weights.boxes import Box
from pulse_rl.weights.layout import layout
from pulse_rl.weights.memory import live_layout
from pulse_rl.weights.pieces import pieces_of


class Held(NamedTuple):
    """One tensor, as one rank has it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, Any]]  # with their bits
    full: Any  # the bits of all of it, from elsewhere


def bits_of(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    return tensor.view(getattr(torch, f"uint{8 * tensor.element_size()}")).numpy().copy()


def held_pieces(tensor: Bits) -> list[tuple[Box, Any]]:
    return [(box, bits.read(0, bits.size).reshape(box.sizes).copy()) for box, bits, _ in pieces_of(tensor)]


def held_by_rank(weights: Any, cast: str | None = None, full: Any = None) -> tuple[dict[str, Held], dict[str, str]]:
    """What this rank holds of each tensor, and which are tied.

    full: name → the whole tensor; None: as torch gathers it from DTensors.
    """
    if full is None:
        named = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
        full = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in named.items()
        }
    if cast is not None:
        full = {name: tensor.to(getattr(torch, cast)) for name, tensor in full.items()}
    found = layout(weights, cast)
    held = {
        name: Held(tensor.dtype, tensor.shape, held_pieces(tensor), bits_of(full[name]))
        for name, tensor in found.items()
    }
    return held, found.tied


def flip(weights: Any) -> None:
    """Change the lowest bit of every element in live memory, half of them at once and half one by one."""
    for tensor in live_layout(weights).values():
        for _, bits, _ in pieces_of(tensor):
            assert bits.writable
            values, half = bits.read(0, bits.size) ^ 1, bits.size // 2
            bits.write(0, values[:half])
            bits.scatter(0, np.arange(half, bits.size, dtype=np.uint32), values[half:])


def assemble(ranks: list[dict[str, Held]], name: str) -> Any:
    """The tensor from the pieces of all ranks; each element is in one, and the same in all that have it."""
    first = ranks[0][name]
    found = np.zeros(first.shape, first.full.dtype)
    times = np.zeros(first.shape, int)
    for rank in ranks:
        assert (rank[name].dtype, rank[name].shape) == (first.dtype, first.shape)
        for box, bits in rank[name].pieces:
            where = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            again = times[where] > 0
            assert (found[where][again] == bits[again]).all()
            found[where] = bits
            times[where] += 1
    assert times.min(initial=1) > 0
    return found
