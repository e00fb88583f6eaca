"""Trainers that hold one model in shares, on four ranks over Gloo, against one that holds all of it."""

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.sharded import ShardedTrainers, load_shares, shared_digest, shares, whole
from pulse_rl.flow.training.versions import PolicyHistory
from pulse_rl.group.collectives import Group
from pulse_rl.weights.digests import digest
from pulse_rl.weights.layout import layout
from tests.loco.ranks import RANKS, Ranks, good

PASSES = 3, 1, 2, 1  # of each rank's batch
STEPS = 3
RECIPE = PolicyRecipe(trainers=RANKS, trainer_sync="fsdp")


class Net(nn.Module):
    """Blocks that are called twice in a pass, as prompts and completions are; sizes that four does not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(tokens) + before
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)), x


def _loss(model: nn.Module, rank: int, step: int, part: int) -> torch.Tensor:
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))
    _, before = model(tokens, torch.zeros(6))
    logits, _ = model(tokens, before.mean(1, keepdim=True))
    return torch.log_softmax(logits, -1).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Sharded:
    """A rank's model, optimizer and trainer group, as a trainer has them."""

    def __init__(self) -> None:
        self.model: Any = Net()
        self.optimizer = _optimizer(self.model)
        self.group = ShardedTrainers(RECIPE, self.model, self.optimizer)

    def step(self, rank: int, step: int) -> float:
        """A training step; the norm of its gradient."""
        for part in range(self.group.passes(PASSES[rank])):
            counts = part < PASSES[rank]
            (_loss(self.model, rank, step, part if counts else 0) * counts).backward()  # type: ignore[no-untyped-call]
        norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def held(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().detach() for parameter in self.model.parameters()]


def _train(group: Any, rank: int, size: int) -> tuple[list[float], list[torch.Tensor], list[torch.Size], str]:
    sharded = Sharded()
    norms = [sharded.step(rank, step) for step in range(STEPS)]
    sizes = [parameter.to_local().shape for parameter in sharded.model.parameters()]
    return norms, sharded.held(), sizes, shared_digest(Group.of(), sharded.model, "bfloat16")


def test_a_step_of_shares_is_that_of_one_trainer_on_all_batches(ranks: Ranks) -> None:
    """Also where ranks need different numbers of passes. In float32 sums of other orders, so up to rounding."""
    net = Net()
    optimizer, norms = _optimizer(net), []
    for step in range(STEPS):
        for rank in range(RANKS):
            for part in range(PASSES[rank]):
                (_loss(net, rank, step, part) / RANKS).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    results = good(ranks(_train, RANKS))
    for found_norms, held, _, _ in results:
        assert torch.allclose(torch.tensor(found_norms), torch.tensor(norms), rtol=1e-4)
        assert all(torch.allclose(found, p, atol=1e-4) for found, p in zip(held, net.parameters(), strict=True))
    assert [sum(rows[0] for rows in column) for column in zip(*(result[2] for result in results), strict=True)] == [
        len(parameter) for parameter in net.parameters()
    ]
    net.load_state_dict(dict(zip([name for name, _ in net.named_parameters()], results[0][1], strict=True)), False)
    assert {result[3] for result in results} == {digest(layout(net, "bfloat16"))}


def _go_on(group: Any, rank: int, size: int) -> tuple[bool, bool]:
    first = Sharded()
    first.step(rank, 0)
    file = BytesIO()
    torch.save(shares(first.model, first.optimizer), file)
    saved = torch.load(BytesIO(file.getvalue()), weights_only=True)
    plain = all(type(tensor) is torch.Tensor for tensor in saved["model"].values())
    second = Sharded()
    load_shares(saved, second.model, second.optimizer)
    norms = first.step(rank, 1), second.step(rank, 1)
    same = all(torch.equal(a, b) for a, b in zip(first.held(), second.held(), strict=True))
    return plain, same and norms[0] == norms[1]


def test_a_trainer_goes_on_from_its_share_to_the_same_bits(ranks: Ranks) -> None:
    assert good(ranks(_go_on, RANKS)) == [(True, True)] * RANKS


def _continue(group: Any, rank: int, size: int, url: str) -> tuple[int, int, bool]:
    sharded = Sharded()
    first = PolicyHistory(RECIPE, url, {}, {}, resumed=False)
    first.resume()
    first.begin(0, sharded.model)
    sharded.step(rank, 0)
    first.publish(1, sharded.model)
    again = PolicyHistory(RECIPE, url, {}, {}, resumed=True)
    again.resume()
    again.begin(1, sharded.model)
    began = again.newest
    sharded.step(rank, 1)
    again.publish(2, sharded.model)
    return began, again.newest, again.digest == again.digest_of(sharded.model)


def test_a_history_that_ends_with_their_weights_goes_on_after_them(ranks: Ranks, tmp_path: Path) -> None:
    assert good(ranks(_continue, RANKS, str(tmp_path))) == [(1, 2, True)] * RANKS
