"""What the tests of channels share: a model of every kind of tensor, changes that all ranks make alike, and bits."""

from typing import Any

import torch

import pulse_rl as pulse

BUCKET = 1 << 12  # bytes: small enough that everything takes several


def made() -> dict[str, torch.Tensor]:
    """A model of every kind of tensor, BF16 but for some."""
    random = torch.Generator().manual_seed(0)
    tied = (0.02 * torch.randn(64, 40, generator=random)).bfloat16()
    return {
        "embed": tied,
        "head": tied,
        "layers.0.up": (0.02 * torch.randn(96, 40, generator=random)).bfloat16(),
        "layers.1.up": (0.02 * torch.randn(96, 40, generator=random)).bfloat16(),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "ids": torch.arange(7),
        "wide": torch.randn(33, generator=random),
        "strided": (0.02 * torch.randn(30, 20, generator=random)).bfloat16().t(),
    }


def zeros() -> dict[str, torch.Tensor]:
    """The same tensors, other bits."""
    found = {name: torch.zeros_like(tensor) for name, tensor in made().items()}
    found["head"] = found["embed"]
    return found


def step(weights: dict[str, torch.Tensor], number: int, share: float = 0.05) -> None:
    """Change some elements of all BF16 tensors, alike on every rank that does it."""
    random = torch.Generator().manual_seed(1000 + number)
    for name, tensor in weights.items():
        if tensor.dtype == torch.bfloat16 and name != "head":
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < share] ^= 1


def after(*steps: int) -> dict[str, torch.Tensor]:
    """The model after these steps."""
    weights = made()
    for number in steps:
        step(weights, number)
    return weights


def bits(tensors: Any) -> dict[str, bytes]:
    return {
        name: tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
        if tensor.numel()
    }


def call(channel: pulse.Channel, rank: int, weights: Any, version: int) -> Any:
    """Send or receive. Returns the report, or the error."""
    try:
        return channel.send(weights, version=version) if rank == 0 else channel.receive(weights)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
