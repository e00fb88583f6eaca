"""ZeRO-3's partitions as pieces: of DeepSpeed on four ranks, where it is installed, and of parameters like its."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.integrations.deepspeed import shards
from tests.loco.ranks import RANKS, Ranks, good
from tests.weights.held import assemble, flip, held_by_rank


class Net(nn.Module):
    """Tied, uneven and small, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.head = nn.Linear(6, 30, bias=False)
        self.head.weight = self.embed.weight
        self.number = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("scale", torch.rand(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(tokens)))) * self.number  # type: ignore[no-any-return]


# Parameters as DeepSpeed has them

AVAILABLE, NOT_AVAILABLE = SimpleNamespace(name="AVAILABLE"), SimpleNamespace(name="NOT_AVAILABLE")


def partitioned(rank: int, size: int, persist: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose parameters one rank of some has, and all of them."""
    model: Any = Net().bfloat16()
    full = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        n, shape = parameter.numel(), parameter.shape
        run = -(-n // size)
        padded = torch.full((run * size,), 9.0, dtype=parameter.dtype)  # what pads it must not be read
        padded[:n] = parameter.detach().view(-1)
        parameter.ds_tensor = padded[rank * run : (rank + 1) * run].clone()
        parameter.ds_tensor.ds_numel, parameter.ds_tensor.status = run, AVAILABLE
        parameter.ds_shape, parameter.ds_numel, parameter.ds_zero_partition_rank = shape, n, rank
        parameter.ds_persist = n <= persist
        parameter.ds_status = AVAILABLE if parameter.ds_persist else NOT_AVAILABLE
        if not parameter.ds_persist:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
    return model, full


@pytest.mark.parametrize("persist", [0, 10])
@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_partitions_of_all_ranks_are_the_parameters(size: int, persist: int) -> None:
    held = []
    for rank in range(size):
        model, full = partitioned(rank, size, persist)
        found, tied = held_by_rank(shards(model), full=full)
        held.append(found)
        assert tied == {"head.weight": "embed.weight"}
        assert list(shards(model)) == list(full)
    for name in held[0]:
        assert (assemble(held, name) == held[0][name].full).all(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p.ds_tensor, "status", NOT_AVAILABLE), "in memory, found one that is NOT_AVAILABLE"),
        (lambda p: setattr(p.ds_tensor, "ds_quant_scale", 1), "found a quantized one"),
        (lambda p: delattr(p, "ds_shape"), "no attribute 'ds_shape'; expected what DeepSpeed 0.19 keeps"),
    ],
)
def test_what_is_refused(change: Any, message: str) -> None:
    model, _ = partitioned(0, 2)
    change(model.up.weight)
    with pytest.raises(TypeError, match=f"parameter 'up.weight': .*{message}"):
        shards(model)


def test_unpartitioned_parameters_are_whole() -> None:
    model = Net()
    assert shards(model)["up.weight"] is model.up.weight


# DeepSpeed itself


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pytest.importorskip("deepspeed")
    with Ranks() as run:
        yield run


def engine(rank: int, size: int, persist: int) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), DS_ACCELERATOR="cpu")
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it takes minutes to compile
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persist},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def read(group: Any, rank: int, size: int, persist: int, when: str) -> Any:
    zero = engine(rank, size, persist)
    import deepspeed

    if when != "new":
        for _ in range(2):
            zero.backward(zero(torch.arange(4)).sum())
            zero.step()
    if when == "written":
        flip(shards(zero))
    lists = [name for name, tensor in shards(zero).items() if isinstance(tensor, list)]
    with deepspeed.zero.GatheredParameters(list(zero.module.parameters())):
        full = {name: tensor.detach().clone() for name, tensor in zero.module.state_dict(keep_vars=True).items()}
    held, tied = held_by_rank(shards(zero), full=full)
    return held, tied, lists, zero.module.state_dict().keys() == full.keys()


@pytest.mark.parametrize("persist", [0, 50])
@pytest.mark.parametrize("when", ["new", "trained", "written"])
def test_an_engine_of_deepspeed(ranks: Ranks, persist: int, when: str) -> None:
    results = good(ranks(read, RANKS, persist, when))
    held = [result[0] for result in results]
    for name in held[0]:
        assert (assemble(held, name) == held[0][name].full).all(), name
    for _, tied, lists, same_names in results:
        assert tied == {"head.weight": "embed.weight"}
        assert same_names
        # Small parameters are kept whole from the first step on.
        assert ("up.weight" in lists, "embed.weight" in lists) == (persist == 50 and when != "new", False)
