"""A small model that several ranks hold in shares, for tests of sharded publishing and syncing."""

from collections.abc import Mapping

import torch

import pulse_rl as pulse

SHAPES = {
    "rows.0": (30, 50),
    "rows.1": (30, 50),
    "columns": (64, 48),
    "flat": (7, 11, 3),
    "norm": (30,),
    "large": (2048, 640),
}


def model(version: int, seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """The weights of a version: each version changes some elements of the one before."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    weights["counter"] = torch.tensor(seed)
    weights["nothing"] = torch.empty(0, 3)
    for _ in range(version):
        for name in shapes:
            flat = weights[name].view(torch.int16).view(-1)
            chosen = torch.randint(0, flat.numel(), (max(1, flat.numel() // 200),), generator=generator)
            flat[chosen] += 1
        weights["counter"] += 1
    return weights


def shares(weights: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, object]:
    """What one rank holds: rows, columns, flat runs and replicas, unevenly, some ranks nothing of some tensors."""
    held: dict[str, object] = {}
    for name, tensor in weights.items():
        if name == "columns":
            edges = [tensor.shape[1] * i // size for i in range(size + 1)]
            part = tensor[:, edges[rank] : edges[rank + 1]]
            held[name] = pulse.Shard(part, shape=tensor.shape, offset=(0, edges[rank]))
        elif name == "flat":
            edges = [tensor.numel() * i // size for i in range(size + 1)]
            run = tensor.view(-1)[edges[rank] : edges[rank + 1]]
            held[name] = pulse.Shard(run, shape=tensor.shape, flat_offset=edges[rank])
        elif name.startswith(("rows", "large")):
            step = -(-tensor.shape[0] // size)
            start = min(rank * step, tensor.shape[0])
            held[name] = pulse.Shard(tensor[start : start + step], shape=tensor.shape, offset=(start, 0))
        else:
            held[name] = tensor  # a replica
    return held
