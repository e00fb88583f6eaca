"""FSDP1's flat parameters as pieces, on four real ranks over Gloo, against the state dict that FSDP1 gathers."""

from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.integrations.fsdp import shards
from pulse_rl.integrations.steps import held
from pulse_rl.weights.layout import layout
from pulse_rl.weights.memory import LiveWeights, Memory
from tests.loco.ranks import RANKS, Ranks, good
from tests.weights.held import assemble, flip, held_by_rank


class Net(nn.Module):
    """Tied, odd and small, a transposed matrix, a dense cube in another order, buffers, and an unwrapped layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 6)
        self.up = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7))
        self.down = nn.Linear(7, 6)
        self.apart = nn.Linear(6, 6)
        self.turned = nn.Parameter(torch.rand(5, 9).t())
        self.cube = nn.Parameter(torch.rand(4, 3, 5).permute(2, 0, 1))
        self.one = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(6, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(5))
        self.register_buffer("cache", torch.rand(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.apart(self.down(self.up(self.embed(tokens))))
        return self.head(hidden + self.turned.sum() + self.cube.sum() + self.one)  # type: ignore[no-any-return]


STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]


def wrapped(strategy: str, use_orig_params: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model: Any = Net()
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
    }
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    model.up = FullyShardedDataParallel(model.up, **options)
    return FullyShardedDataParallel(model, ignored_modules=[model.apart], **options)


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.arange(4)).sum().backward()
    optimizer.step()


def read(group: Any, rank: int, size: int, strategy: str, use_orig_params: bool, when: str) -> Any:
    model = wrapped(strategy, use_orig_params)
    if when != "new":
        train(model)
    if when == "after a forward":
        model(torch.arange(4))
    if when == "written":
        flip(shards(model))
    full = model.state_dict()
    held, tied = held_by_rank(shards(model), full=full)
    assert list(shards(model)) == list(full)
    return held, tied


@pytest.mark.parametrize("when", ["new", "trained", "after a forward", "written"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_of_all_ranks_are_the_state_dict(ranks: Ranks, strategy: str, use_orig_params: bool, when: str) -> None:
    results = good(ranks(read, RANKS, strategy, use_orig_params, when))
    held = [result[0] for result in results]
    assert {"embed.weight", "up.0.weight", "turned", "cube", "scale", "apart.bias"} < held[0].keys()
    for name in held[0]:
        assert (assemble(held, name) == held[0][name].full).all(), name
    assert all(tied == {"head.weight": "embed.weight"} for _, tied in results)
    if strategy == "FULL_SHARD":
        counts = [sum(bits.size for _, bits in rank["embed.weight"].pieces) for rank in held]
        assert sum(counts) == 180  # nobody holds it all


def cast(group: Any, rank: int, size: int) -> Any:
    model = wrapped("FULL_SHARD", False)
    return held_by_rank(shards(model), "bfloat16", model.state_dict())


def test_masters_are_read_as_bfloat16(ranks: Ranks) -> None:
    held = [result[0] for result in good(ranks(cast, RANKS))]
    for name in held[0]:
        assert held[0][name].dtype == "BF16"
        assert (assemble(held, name) == held[0][name].full).all(), name


def remembered(group: Any, rank: int, size: int, use_orig_params: bool) -> None:
    model = wrapped("FULL_SHARD", use_orig_params)
    train(model)
    memory = Memory(LiveWeights(shards(model)))
    assert memory.is_still(LiveWeights(shards(model)))
    train(model)
    assert not memory.is_still(LiveWeights(shards(model)))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_an_optimizer_step_is_noticed(ranks: Ranks, use_orig_params: bool) -> None:
    good(ranks(remembered, RANKS, use_orig_params))


def refused(group: Any, rank: int, size: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    said = []
    model = wrapped("FULL_SHARD", True)
    with pytest.raises(TypeError) as raised:
        shards(Net())
    said.append(str(raised.value))
    with FullyShardedDataParallel.summon_full_params(model), pytest.raises(TypeError) as raised:
        shards(model)
    said.append(str(raised.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(model._handle.flat_param, "_fqns")
        with pytest.raises(TypeError) as raised:
            shards(model)
    said.append(str(raised.value))
    for each in (True, False):
        inside = wrapped("FULL_SHARD", each).module  # as Lightning gives its callbacks
        with pytest.raises(TypeError) as raised:
            held(inside)
        said.append(str(raised.value))
    with pytest.raises(TypeError) as raised:
        held(dict(wrapped("FULL_SHARD", True).module.named_parameters()))
    said.append(str(raised.value))
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    for plain, summoned, other, *inside in good(ranks(refused, RANKS)):
        assert len(inside) == 3
        assert all("the outermost" in said for said in inside)
        assert "expected a FullyShardedDataParallel" in plain
        assert "outside of summon_full_params" in summoned
        assert "expected an attribute _fqns of Parameter" in other
        assert "FSDP2" in other


def test_a_compiled_layer_has_its_own_name(ranks: Ranks) -> None:
    good(ranks(compiled, RANKS))


def compiled(group: Any, rank: int, size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    second: Any = torch.compile(nn.Linear(4, 2))
    model = nn.Sequential(nn.Linear(3, 4), second)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    assert list(layout(shards(wrapped))) == ["0.bias", "0.weight", "1.bias", "1.weight"]
