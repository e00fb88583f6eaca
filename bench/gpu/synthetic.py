"""Weights of the shapes of a transformer, filled with noise, and a step that changes a given share of their bits.

A weight changes if a step reaches the next bfloat16, which is likelier the smaller the weight is: as under Adam, whose
steps are of about one length. Which steps get there is drawn at random, each in proportion to its length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CHUNK = 1 << 26  # elements that are drawn at once


class State(NamedTuple):
    """All weights of one version, in one memory."""

    flat: torch.Tensor  # (elements,) int16, the bits
    tensors: list[torch.Tensor]  # views of it, in the shapes of the model


def shapes_of(elements: int) -> list[tuple[int, ...]]:
    """Of a decoder of about this many weights: 32 layers 4,096 wide for 7 billion, fewer or narrower for less."""
    width = 4096 if elements >= 1 << 30 else max(16, 1 << max(0, int(math.log2(max(1, elements // 200)) // 2)))
    inner, vocabulary = width * 11 // 4, width * 8
    layer = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner), (width,), (width,)]
    of_layer = sum(math.prod(shape) for shape in layer)
    layers = max(1, (elements - 2 * vocabulary * width) // of_layer)
    return [(vocabulary, width), *(shape for _ in range(layers) for shape in layer), (vocabulary, width)]


def alike(tensors: int, elements: int, *stack: int) -> list[tuple[int, ...]]:
    """So many tensors of one shape, of about this many weights in all: square matrices, or stacks of them."""
    rows = max(1, math.isqrt(elements // tensors // math.prod(stack)))
    return [(*stack, rows, rows)] * tensors


def state_like(shapes: list[tuple[int, ...]], device: str) -> State:
    """Memory for a version; every tensor begins at an address that 256 divides."""
    starts, at = [], 0
    for shape in shapes:
        starts.append(at)
        at += -(-math.prod(shape) // 128) * 128
    flat = torch.zeros(at, dtype=torch.int16, device=device)
    return State(flat, [flat[a : a + math.prod(shape)].view(shape) for a, shape in zip(starts, shapes, strict=True)])


def fill(state: State, seed: int) -> None:
    """Normal weights, of standard deviation 0.02."""
    random = torch.Generator(state.flat.device).manual_seed(seed)
    for a in range(0, len(state.flat), CHUNK):
        part = state.flat[a : a + CHUNK]
        drawn = torch.randn(len(part), generator=random, device=part.device)
        part.copy_((drawn * 0.02).bfloat16().view(torch.int16))


def _reaches(bits: torch.Tensor, step: float) -> torch.Tensor:
    """The probability that a step of this length leads to the next bfloat16."""
    exponent = ((bits.int() >> 7) & 0xFF).float()
    return (step / torch.exp2(exponent - 134.0)).clamp(
        max=1.0
    )  # a bfloat16's neighbour is 2^-7 of its power of two away


def step_for(state: State, share: float) -> float:
    """The length of step that changes this share of the weights."""
    sample = state.flat[: 1 << 20]
    low, high = 1e-12, 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        if float(_reaches(sample, middle).mean()) < share:
            low = middle
        else:
            high = middle
    return low


def changed(old: State, new: State, share: float, seed: int) -> None:
    """Make the second version one step after the first."""
    random = torch.Generator(old.flat.device).manual_seed(seed)
    step = step_for(old, share)
    for a in range(0, len(old.flat), CHUNK):
        part = old.flat[a : a + CHUNK]
        drawn = torch.rand(len(part), generator=random, device=part.device)
        moves = drawn < _reaches(part, step)
        up = torch.rand(len(part), generator=random, device=part.device) < 0.5
        moved = torch.where(up, part + 1, part - 1)
        # The lowest and the highest magnitude have no neighbour of their sign.
        stays = ~moves | ((moved ^ part) < 0) | ((moved & 0x7F80) == 0x7F80)
        new.flat[a : a + CHUNK].copy_(torch.where(stays, part, moved))
