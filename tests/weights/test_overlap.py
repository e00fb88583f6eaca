"""Which views of live memory have elements in common, against the addresses of every byte."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from pulse_rl.weights.bits import Bits, TorchBits, as_bits
from pulse_rl.weights.overlap import pairs


def view(memory: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """Some view of a matrix: a part of it, with steps, perhaps turned."""
    rows, columns = (
        slice(int(start), int(stop), int(step))
        for start, stop, step in zip(
            random.integers(0, 6, 2), random.integers(3, 12, 2), random.integers(1, 4, 2), strict=True
        )
    )
    part = memory[rows, columns]
    return part.T if random.random() < 0.5 else part


def touched(tensor: torch.Tensor) -> set[int]:
    """The address of every element."""
    first, steps = tensor.data_ptr(), tensor.stride()
    return {first + tensor.element_size() * (a * steps[0] + b * steps[1]) for a, b in np.ndindex(*tensor.shape)}


@pytest.mark.parametrize("kind", [as_bits, TorchBits])
def test_pairs_are_those_that_share_an_address(kind: Any) -> None:
    random, shared, apart = np.random.default_rng(0), 0, 0
    for _ in range(150):
        memories = [torch.zeros(12, 12, dtype=torch.int16) for _ in range(2)]
        views = [view(memories[int(random.integers(2))], random) for _ in range(5)]
        expected = {pair for pair in combinations(range(5), 2) if touched(views[pair[0]]) & touched(views[pair[1]])}
        bits: list[Bits] = [kind(one) for one in views]
        assert {tuple(sorted(pair)) for pair in pairs(bits)} == expected
        shared, apart = shared + len(expected), apart + 10 - len(expected)
    assert shared > 100
    assert apart > 100


def test_columns_of_a_fused_weight_have_nothing_in_common() -> None:
    fused = torch.empty(4096, 3 * 1024, dtype=torch.bfloat16)
    assert list(pairs([as_bits(part) for part in torch.split(fused, 1024, dim=1)])) == []
    assert list(pairs([as_bits(fused[:, :1025]), as_bits(fused[:, 1024:])])) == [(0, 1)]
