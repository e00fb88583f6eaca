"""Changes collected at the cast of masters give the patches that a comparison with a copy gives, byte for byte."""

from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.integrations.masters import MasterChanges
from pulse_rl.patch.encode import encode
from pulse_rl.weights.layout import layout
from tests.channel.world import BUCKET, bits
from tests.loco.ranks import Ranks, good

SHAPES = {"embed": (700, 300), "layers.0.up": (97, 33), "norm": (65,), "scale": (), "wide": (3, 70_001)}


class Trainer:
    """FP32 masters, and the BF16 weights that they are cast into."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.masters = {name: 0.02 * torch.randn(shape, generator=self.random) for name, shape in SHAPES.items()}
        self.weights = {name: master.bfloat16() for name, master in self.masters.items()}
        self.collected = MasterChanges(self.weights)

    def step(self, scale: float = 1e-6) -> None:
        for name, master in self.masters.items():
            master += scale * torch.randn(master.shape, generator=self.random)
            self.cast(name)

    def cast(self, name: str) -> None:
        self.collected.before_cast(self.weights[name], self.masters[name])
        self.weights[name].copy_(self.masters[name])


def patch(old: Any, new: Any, codec: str) -> bytes:
    return encode(old, layout(new), base=1, target=2, codecs=[CODECS[codec]])[0].data


@pytest.mark.parametrize("codec", ["gap", "context"])
@pytest.mark.parametrize("steps", [1, 4])
def test_patches_are_those_of_a_baseline(steps: int, codec: str) -> None:
    trainer = Trainer()
    for _ in range(3):
        baseline = {name: tensor.clone() for name, tensor in trainer.weights.items()}
        for _ in range(steps):
            trainer.step()
        before = trainer.collected.before(layout(trainer.weights))
        made = patch(before, trainer.weights, codec)
        assert made == patch(layout(baseline), trainer.weights, codec)
        assert 0 < pulse.inspect(made).changes < 0.1 * layout(trainer.weights).elements
        trainer.collected.clear()
    assert trainer.collected.nbytes == 0


def test_what_changes_and_changes_back_is_no_change() -> None:
    trainer = Trainer()
    master = trainer.masters["norm"]
    before = master.clone()
    master += 1
    trainer.cast("norm")
    master.copy_(before)
    trainer.cast("norm")
    assert trainer.collected.nbytes == 65 * 6
    made = patch(trainer.collected.before(layout(trainer.weights)), trainer.weights, "gap")
    assert pulse.inspect(made).changes == 0


def test_signs_of_zeros_and_nans_count() -> None:
    trainer = Trainer()
    name, master = "norm", trainer.masters["norm"]
    master[:4] = torch.tensor([0.0, -0.0, torch.nan, 1.0])
    trainer.cast(name)
    trainer.collected.clear()
    baseline = {n: tensor.clone() for n, tensor in trainer.weights.items()}
    master[:4] = torch.tensor([-0.0, 0.0, 2.0, torch.nan])
    trainer.cast(name)
    made = patch(trainer.collected.before(layout(trainer.weights)), trainer.weights, "gap")
    assert made == patch(layout(baseline), trainer.weights, "gap")
    assert pulse.inspect(made).changes == 4


def test_a_flat_buffer_of_several_weights_and_padding() -> None:
    """As optimizers flatten them: masters of a part of a buffer, which begins and ends within weights."""
    random = torch.Generator().manual_seed(0)
    buffer = torch.randn(1000, generator=random).bfloat16()
    weights = {"a": buffer[3:403].view(20, 20), "b": buffer[403:900].view(7, 71)}
    collected = MasterChanges(weights)
    baseline = {name: tensor.clone() for name, tensor in weights.items()}
    for low, high in ((100, 600), (600, 1000), (0, 100)):
        master = buffer[low:high].float() * (1 + 0.01 * torch.rand(high - low, generator=random))
        collected.before_cast(buffer[low:high], master)
        buffer[low:high].copy_(master)
    made = patch(collected.before(layout(weights)), weights, "context")
    assert made == patch(layout(baseline), weights, "context")
    assert pulse.inspect(made).changes > 300


def test_what_is_no_use_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        MasterChanges({"a": torch.zeros(4, 5).t()})
    memory = torch.zeros(30)
    with pytest.raises(ValueError, match="overlap"):
        MasterChanges({"a": memory[:20], "b": memory[10:]})
    collected = MasterChanges({"a": torch.zeros(4, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="expected contiguous weights of 5"):
        collected.before_cast(torch.zeros(4), torch.zeros(5))
    with pytest.raises(TypeError, match="found AdamW"):
        collected.follow(torch.optim.AdamW([torch.zeros(3)]))


def over_a_channel(group: Any, rank: int, size: int) -> Any:
    trainer = Trainer()
    weights = trainer.weights if rank == 0 else {name: torch.zeros_like(t) for name, t in trainer.weights.items()}
    channel = pulse.Channel(group, bucket_nbytes=16 * BUCKET, collected=trainer.collected, validate_every=1)
    reports: list[Any] = []
    for version in range(4):
        if rank:
            try:
                reports.append(channel.receive(weights).sent)
            except pulse.ExchangeError as error:
                reports.append(error.ranks)
            continue
        if version:
            trainer.step()
            trainer.step()
        if version == 2:
            trainer.weights["norm"].view(torch.int16)[3] ^= 1  # not by the optimizer
        try:
            reports.append(channel.send(weights, version=version).sent)
        except pulse.IntegrityError:
            reports.append((0,))
    return reports, bits(weights), channel.version


def test_a_channel_keeps_no_baseline_and_finds_what_was_not_collected(ranks: Ranks) -> None:
    (sent, first, _), (received, second, version) = good(ranks(over_a_channel, 2))
    assert sent == received == ["dense", "sparse", (0,), "dense"]
    assert first == second
    assert version == 3


class OfMegatron:
    """What is read of Float16OptimizerWithFloat16Params. wide: an FP32 weight, which it updates in place."""

    def __init__(self, weights: list[torch.Tensor], wide: torch.Tensor) -> None:
        self.float16_groups = [weights]
        self.fp32_from_float16_groups = [[weight.float() for weight in weights]]
        self.fp32_from_fp32_groups = [[wide]]

    def _get_model_and_main_params_data_float16(self) -> Any:
        return self.float16_groups[0], self.fp32_from_float16_groups[0]

    def _copy_main_params_to_model_params(self) -> None:
        for weight, master in zip(*self._get_model_and_main_params_data_float16(), strict=True):
            weight.copy_(master)

    @property
    def masters(self) -> list[torch.Tensor]:
        return self.fp32_from_float16_groups[0]

    def step(self) -> None:
        for master in self.masters:
            master += 0.01
        for wide in self.fp32_from_fp32_groups[0]:
            wide.view(-1)[::3] += 0.01
        self._copy_main_params_to_model_params()


class Range:
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end


class OfMegatronDistributed(OfMegatron):
    """What is read of DistributedOptimizer: masters of the first half of each parameter, and halves of FP32 ones."""

    def __init__(self, weights: list[torch.Tensor], wide: torch.Tensor) -> None:
        self.model_float16_groups = [weights]
        self.shard_fp32_from_float16_groups = [[w.view(-1)[: w.numel() // 2].float() for w in weights]]
        self.model_fp32_groups = [[wide]]
        self.shard_fp32_groups = self.fp32_from_fp32_groups = [[wide.view(-1)[: wide.numel() // 2]]]

    def _get_model_param_range_map(self, weight: torch.Tensor) -> dict[str, Range]:
        return {"param": Range(0, weight.numel() // 2)}

    def _copy_main_params_to_model_params(self) -> None:
        for weight, master in zip(self.model_float16_groups[0], self.masters, strict=True):
            weight.view(-1)[: weight.numel() // 2].copy_(master)

    @property
    def masters(self) -> list[torch.Tensor]:
        return self.shard_fp32_from_float16_groups[0]


class OfFusedAdam(OfMegatronDistributed):
    """DistributedOptimizer with use_precision_aware_optimizer: FusedAdam holds the masters and writes the weights."""

    def __init__(self, weights: list[torch.Tensor], wide: torch.Tensor) -> None:
        super().__init__(weights, wide)
        self.shard_fp32_from_float16_groups: Any = [[None for _ in weights]]

    def _copy_main_params_to_model_params(self) -> None:
        return

    @property
    def masters(self) -> list[torch.Tensor]:
        return [weight.view(-1)[: weight.numel() // 2] for weight in self.model_float16_groups[0]]


class OfDeepSpeed(OfMegatron):
    """What is read of BF16_Optimizer: one flat partition for each rank."""

    def __init__(self, weights: list[torch.Tensor], buffer: torch.Tensor, group: Any) -> None:
        self.bf16_partitioned_groups = [[buffer]]
        self.fp32_groups_flat_partition = [buffer.float()]
        self.real_dp_process_group = [group]

    def update_lp_params(self) -> None:
        self.bf16_partitioned_groups[0][0].copy_(self.masters[0])

    _copy_main_params_to_model_params = update_lp_params

    @property
    def masters(self) -> list[torch.Tensor]:
        return self.fp32_groups_flat_partition

    def step(self) -> None:
        self.masters[0].add_(0.01)
        self.update_lp_params()


def followed(group: Any, rank: int, size: int, kind: str) -> list[int]:
    """The real ones are heavy to install: these have what is read of them."""
    buffer = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    listed, wide = [buffer[:600].view(30, 20), buffer[600:]], torch.zeros(40, 15)
    weights = {"a": listed[0], "b": listed[1], "wide": wide}
    kinds: dict[str, Any] = {"megatron": OfMegatron, "distributed": OfMegatronDistributed, "fused": OfFusedAdam}
    optimizer = OfDeepSpeed(listed, buffer, group) if kind == "deepspeed" else kinds[kind](listed, wide)
    collected = MasterChanges(weights)
    collected.follow(optimizer)
    baseline = {name: tensor.clone() for name, tensor in weights.items()}
    for _ in range(2):
        optimizer.step()
        made = patch(collected.before(layout(weights)), weights, "gap")
        assert made == patch(layout(baseline), weights, "gap")
    return [tensor.changes for tensor in pulse.inspect(made).tensors]


@pytest.mark.parametrize(
    ("kind", "least", "wide"),
    [("megatron", 250, 200), ("distributed", 120, 100), ("fused", 120, 100), ("deepspeed", 250, 0)],
)
def test_optimizers_that_are_known_are_followed(ranks: Ranks, kind: str, least: int, wide: int) -> None:
    ((first, second, third),) = good(ranks(followed, 1, kind))
    assert first > least
    assert second > least
    assert third == wide
