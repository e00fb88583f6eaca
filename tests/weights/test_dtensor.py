"""DTensors as pieces, on four real ranks over Gloo: all pieces of all ranks against the whole tensor, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pulse_rl.weights.dtensor import Split, ranges_held
from pulse_rl.weights.layout import layout
from pulse_rl.weights.memory import LiveWeights, Memory, live_layout, live_tensors
from pulse_rl.weights.pieces import pieces_of
from tests.loco.ranks import RANKS, Ranks, good
from tests.weights.held import Held, assemble, bits_of, flip, held_by_rank, held_pieces

# Weights, each made alike on every rank


def _mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])


def _spread(tensor: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Net(nn.Module):
    """Tied, uneven and small: 7 and 3 rows do not divide by 4 or 2, and a rank holds nothing of 3 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 3)
        self.out = nn.Linear(3, 6)
        self.head = nn.Linear(6, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.down(self.up(self.embed(tokens)))))  # type: ignore[no-any-return]


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model.up, mesh=_mesh(RANKS))
    return fully_shard(model, mesh=_mesh(RANKS))


def fsdp_in_bfloat16_after_a_forward() -> Any:
    """Without a backward pass torch keeps the gathered parameters: the state dict shards them again."""
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(Net().bfloat16(), mesh=_mesh(RANKS))
    model(torch.arange(4))
    return model


def fsdp_along_columns() -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Linear(4, 3, bias=False))
    return fully_shard(model, mesh=_mesh(RANKS), shard_placement_fn=lambda parameter: Shard(1))


def hsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Net(), mesh=_mesh(2, 2))


def _tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    vocabulary = RowwiseParallel(input_layouts=Replicate())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": vocabulary}
    return parallelize_module(model, mesh, plan)


def tensor_parallel() -> Any:
    return _tensor_parallel(Net(), _mesh(RANKS))


def fsdp_and_tensor_parallel() -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(2, 2)
    model = _tensor_parallel(Net(), mesh["b"])
    return fully_shard(model, mesh=mesh["a"])


def hsdp_and_tensor_parallel() -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(1, 2, 2)
    model = _tensor_parallel(Net(), mesh["c"])
    return fully_shard(model, mesh=mesh["a", "b"])


class Experts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(_normal(experts, 6, 4))
        self.down = nn.Parameter(_normal(experts, 4, 6))
        self.router = nn.Linear(4, experts, bias=False)


def _expert_parallel(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard

    for name in ("up", "down"):
        setattr(model, name, nn.Parameter(_spread(getattr(model, name).detach(), mesh, Shard(0))))
    return model


def expert_parallel() -> Any:
    return _expert_parallel(Experts(6), _mesh(RANKS))


def fsdp_and_expert_parallel() -> Any:
    """Along the experts, and along the rows of each expert."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = _mesh(2, 2)
    both = nn.ModuleList([_expert_parallel(Experts(experts), mesh["b"]) for experts in (5, 8)])
    fully_shard(both[0], mesh=mesh["a"])
    place: Any = lambda parameter: Shard(1) if parameter.dim() == 3 else Shard(0)  # noqa: E731
    fully_shard(both[1], mesh=mesh["a"], shard_placement_fn=place)
    return both


def placements() -> Any:
    """On meshes of one and two dimensions: every way to shard a matrix, several boxes on a rank, and no box."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    line, square = _mesh(RANKS), _mesh(2, 2)
    kinds = [Replicate(), Shard(0), Shard(1)]
    found = {
        f"{i}{j}{n}": _spread(_normal(n, 6), square, a, b)
        for i, a in enumerate(kinds)
        for j, b in enumerate(kinds)
        for n in (1, 7)
    }
    strided = [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)]
    return {
        **found,
        "vector": _spread(torch.arange(9, dtype=torch.int64), line, Shard(0)),
        "number": _spread(torch.tensor(2.5), line, Replicate()),
        "empty": _spread(torch.zeros(0, 3), line, Shard(0)),
        "cube": _spread(_normal(3, 5, 7).bfloat16(), square, Shard(2), Shard(1)),
        "strided": _spread(_normal(14, 2), line, strided[0]),
        "strided twice": _spread(_normal(13, 9), square, *strided),
        "transposed": DTensor.from_local(_normal(6, 4).t(), line, [Shard(0)], run_check=False),
    }


CASES = [
    fsdp,
    fsdp_in_bfloat16_after_a_forward,
    fsdp_along_columns,
    hsdp,
    tensor_parallel,
    fsdp_and_tensor_parallel,
    hsdp_and_tensor_parallel,
    expert_parallel,
    fsdp_and_expert_parallel,
    placements,
]
TIED = [fsdp, fsdp_in_bfloat16_after_a_forward, hsdp]


# On each rank


def read(group: Any, rank: int, size: int, make: Callable[[], Any], cast: str | None = None) -> Any:
    return held_by_rank(make(), cast)


def read_state(group: Any, rank: int, size: int, make: Callable[[], Any]) -> Any:
    """As a mapping: its tensors are other objects in the same memory."""
    return held_by_rank(make().state_dict())


def write(group: Any, rank: int, size: int, make: Callable[[], Any]) -> Any:
    """Change every element by writing to live pieces, in part element by element."""
    weights = make()
    first, _ = held_by_rank(weights)
    flip(weights)
    return first, held_by_rank(weights)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_pieces_of_all_ranks_are_the_whole_tensor(ranks: Ranks, case: Any) -> None:
    results = good(ranks(read, RANKS, case))
    held, tied = [result[0] for result in results], [result[1] for result in results]
    for name in held[0]:
        assert (assemble(held, name) == held[0][name].full).all(), name
    assert all(other == tied[0] for other in tied)
    # Tensor parallelism gives the embedding a parameter of its own.
    assert tied[0] == ({"head.weight": "embed.weight"} if case in TIED else {})


def test_a_rank_that_holds_nothing_knows_dtype_and_shape(ranks: Ranks) -> None:
    held = [result[0] for result in good(ranks(read, RANKS, fsdp))]
    assert (held[3]["down.weight"].dtype, held[3]["down.weight"].shape) == ("F32", (3, 7))
    assert held[3]["down.weight"].pieces == held[3]["down.bias"].pieces == []


def test_ranks_may_hold_several_boxes(ranks: Ranks) -> None:
    held = [result[0] for result in good(ranks(read, RANKS, placements))]
    assert max(len(rank["strided"].pieces) for rank in held) == 3
    assert max(len(rank["strided twice"].pieces) for rank in held) == 6


@pytest.mark.parametrize("case", [fsdp, fsdp_in_bfloat16_after_a_forward, fsdp_and_tensor_parallel])
def test_state_dicts_are_the_same_memory(ranks: Ranks, case: Any) -> None:
    """Tied tensors are recognised on a rank that holds nothing of them, too."""
    for by_module, by_mapping in zip(good(ranks(read, RANKS, case)), good(ranks(read_state, RANKS, case)), strict=True):
        assert by_module[1] == by_mapping[1]
        assert by_module[0].keys() == by_mapping[0].keys()


def only_floats(case: Callable[[], Any]) -> dict[str, Any]:
    made = case()
    named = made.state_dict() if isinstance(made, nn.Module) else made
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("case", [fsdp, fsdp_and_tensor_parallel, placements])
def test_masters_are_read_as_bfloat16(ranks: Ranks, case: Any) -> None:
    held = [result[0] for result in good(ranks(read, RANKS, partial(only_floats, case), "bfloat16"))]
    for name, tensor in held[0].items():
        assert tensor.dtype == "BF16"
        assert (assemble(held, name) == tensor.full).all(), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_writes_to_pieces_arrive_in_the_model(ranks: Ranks, case: Any) -> None:
    results = good(ranks(write, RANKS, case))
    for name in results[0][0]:
        before, after = ([result[i] for result in results] for i in (0, 1))
        full = assemble(after, name)
        assert (full == after[0][name].full).all(), name
        assert ((full ^ before[0][name].full) & 1).all()


def refused(group: Any, rank: int, size: int) -> Any:
    """What the errors say of a DTensor with partial sums, and of one in more boxes than anyone wants."""
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    line, said = _mesh(RANKS), []
    sums = DTensor.from_local(torch.ones(3), line, [Partial()])
    rows = RANKS * 70_000
    boxes = DTensor.from_local(
        torch.ones(rows // RANKS), line, [_StridedShard(0, split_factor=70_000)], run_check=False
    )
    for tensor in (sums, boxes):
        with pytest.raises(TypeError, match="tensor 'w': ") as raised:
            layout({"w": tensor})
        said.append(str(raised.value))
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    for sums, boxes in good(ranks(refused, RANKS)):
        assert "partial sums" in sums
        assert "at most 65536 boxes" in boxes


def in_a_part_of_the_ranks(group: Any, rank: int, size: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = DeviceMesh("cpu", [0, 1])
    tensors = {
        "matrix": (_normal(5, 3), Shard(0)),
        "number": (torch.tensor(1.5), Replicate()),
    }
    found = layout({name: _spread(tensor, mesh, placement) for name, (tensor, placement) in tensors.items()})
    return {
        name: Held(tensor.dtype, tensor.shape, held_pieces(tensor), bits_of(tensors[name][0]))
        for name, tensor in found.items()
    }


def test_a_mesh_of_some_of_the_ranks(ranks: Ranks) -> None:
    held = good(ranks(in_a_part_of_the_ranks, RANKS))
    for name in ("matrix", "number"):
        assert (assemble(held, name) == held[0][name].full).all()
        assert held[2][name].pieces == held[3][name].pieces == []


# Live memory


def remembered(group: Any, rank: int, size: int) -> None:
    """A record of memory notices every write that torch counts, and other memory."""
    model = fsdp_and_tensor_parallel()
    weights = live_tensors(model)
    memory = Memory(LiveWeights(weights))
    assert memory.is_still(LiveWeights(model))
    assert memory.is_still(LiveWeights(model.state_dict()))  # other objects, the same memory
    with torch.no_grad():
        model.up.weight.add_(1)
    assert not memory.is_still(LiveWeights(model))
    memory.count_writes(LiveWeights(weights))
    assert memory.is_still(LiveWeights(model))
    with torch.no_grad():
        model.embed.weight.to_local().add_(1)
    assert not memory.is_still(LiveWeights(model))
    memory = Memory(LiveWeights(weights))
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert not memory.is_still(LiveWeights(model))


def test_memory_of_sharded_parameters(ranks: Ranks) -> None:
    good(ranks(remembered, RANKS))


def written_between_forward_and_backward(group: Any, rank: int, size: int) -> str:
    model = _tensor_parallel(nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 3)}), _mesh(RANKS))
    loss = model["down"](model["up"](torch.ones(2, 6))).sum()  # type: ignore[index]
    for _, bits, _ in pieces_of(live_layout(model)["down.weight"]):
        bits.write(0, bits.read(0, bits.size) ^ 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return ""


def test_writes_to_pieces_are_noticed_by_autograd(ranks: Ranks) -> None:
    good(ranks(written_between_forward_and_backward, RANKS))


# Ranges, against torch.chunk


def chunked(indices: list[int], splits: list[Split]) -> list[int]:
    """The indices left after splits that are done one after another, by torch itself."""
    for parts, at, factor in splits:
        chunks = [[int(i) for i in chunk] for chunk in torch.tensor(indices).chunk(factor)] if indices else []
        left = [torch.tensor(chunk).chunk(parts) for chunk in chunks if chunk]
        indices = [int(i) for pieces in left if at < len(pieces) for i in pieces[at]]
    return indices


def flat(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@pytest.mark.parametrize("outer", [1, 2, 3, 4])
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_ranges_of_all_sizes(outer: int, inner: int) -> None:
    """What fully_shard makes on top of tensor parallelism, what torch makes of its placements, and a strided one."""
    for n in range(30):
        for a in range(outer):
            for b in range(inner):
                made = chunked(list(range(n)), [Split(inner, b), Split(outer, a)])
                fsdp = [Split(outer, a, inner), Split(inner, b)]
                assert flat(ranges_held(n, fsdp, len(made))) == made
                nested = [Split(outer, a), Split(inner, b)]
                expected = chunked(list(range(n)), nested)
                assert flat(ranges_held(n, nested, len(expected))) == expected
            strided = [Split(outer, a, inner)]
            expected = chunked(list(range(n)), strided)
            assert flat(ranges_held(n, strided, len(expected))) == expected
            with pytest.raises(TypeError, match="expected a local tensor of"):
                ranges_held(n, strided, len(expected) + 1)
