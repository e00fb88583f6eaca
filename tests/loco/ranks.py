"""What the tests of trainers share: four real ranks over Gloo, a small model, and inner steps that can be repeated."""

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.forked import Forked, picklable
from tests.store.servers import free_port

RANKS = 4
LR = 3e-4


def start(rank: int, size: int, at: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{at}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def serve(rank: int, pipe: Connection, size: int, at: int, timeout_s: float) -> None:
    """Call what arrives: a function, how many ranks take part, and its arguments. Send its result, or its error."""
    os.environ["PULSE_THREADS"] = "2"
    start(rank, size, at, timeout_s)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, size + 1)}
    while True:
        function, some, arguments = pipe.recv()
        try:
            pipe.send(function(groups[some], rank, some, *arguments))
        except BaseException as error:  # noqa: BLE001
            pipe.send(picklable(error))


class Ranks:
    """Processes in one Gloo group. Call with a function, a number of ranks and arguments.

    Returns what the function returned on each rank, or the error that it raised there.
    """

    def __init__(self, size: int = RANKS, timeout_s: float = 60) -> None:
        self.processes = Forked(serve, size, size, free_port(), timeout_s)

    def __call__(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        pipes = self.processes.pipes[:size]
        for pipe in pipes:
            pipe.send((function, size, arguments))
        for pipe in pipes:
            assert pipe.poll(180), "a rank hangs"
        return [pipe.recv() for pipe in pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()


def good(results: list[Any]) -> list[Any]:
    """The results, none of which is an error."""
    errors = [f"{type(result).__name__}: {result}" for result in results if isinstance(result, BaseException)]
    assert not errors, errors
    return results


class Model(torch.nn.Module):
    """Parameters of every kind that occurs: large and small, 0-dim, empty, tied, strided and frozen."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.02 * torch.randn(shape, generator=random))

        self.a = normal(200, 33)
        self.b = normal(77)
        self.tied = self.a
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.strided = torch.nn.Parameter(normal(30, 20).detach().t())
        self.frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model).values(), lr=LR)


def inner_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """A step whose gradients depend on the rank and the step alone."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in trainable(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=random)
    optimizer.step()


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def seen(tensor: torch.Tensor, cast: torch.dtype) -> torch.Tensor:
    """The bits of a cast: −0 and +0 differ."""
    return tensor.to(cast).view(torch.uint8 if cast.itemsize == 1 else torch.int16)
