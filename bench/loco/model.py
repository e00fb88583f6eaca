"""What PULSELoCo sends of a real model: `python -m bench.loco.model MODEL ROUNDS LR [VALUE_DTYPE [SCALE]]`.

Inner steps are supervised: AdamW (0.9, 0.999) under BF16 autocast on the answers of four sums a step, gradient norm
1, from the dithered GGUF. They are real gradients of the real weights, but not those of RL, which are noisier. There is
one trainer, and its payloads are those that it would send to any number of others; only θ would go elsewhere.

The last round is then timed, all in one thread: θ, residual, momentum and live parameters are restored and the round
is repeated, in turns with DiLoCo's, in a group that returns this rank's bytes as those of four ranks. So
encoding, decoding of three payloads, adding up and outer step are those of four trainers, without a network.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import pulse_rl as pulse
from bench.bound import bounds
from bench.loco.run import MODEL_EVERY as SYNC_EVERY
from bench.loco.run import ModelResult
from bench.supervised import loss
from pulse_rl.flow import model, tasks
from pulse_rl.group.collectives import Group, N
from pulse_rl.loco.gate import cast
from pulse_rl.loco.members import FixedMembers
from pulse_rl.weights.bits import Bits, HostBits

PROMPTS = 4  # a step
WORKERS = 4  # as timed
REPEATS = 3
GRADIENT_NORM = 1.0


class Echo(Group):
    """A group of this rank alone: what it sends is what all ranks send."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size)

    def gather_numbers(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        return np.tile(np.array(numbers, np.int64), (self.size, 1))

    def gather_rows(self, values: NDArray[N]) -> NDArray[N]:
        return np.tile(values, (self.size, 1))

    def gather(self, data: bytes, limit: int) -> list[memoryview]:
        return [memoryview(data)] * self.size

    def all_to_all_rows(self, values: NDArray[N]) -> NDArray[N]:
        return values


def position_bits(loco: pulse.PulseLoCo) -> float:
    """The entropy, in bits, of which elements the next round sends, given θ's exponents; one table a segment."""
    sends = loco._trainer.contribution.find()
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for segment, sent in zip(loco._masters.segments, sends, strict=True):
        before = cast(segment.shared, loco.gate).copy()
        after = before.copy()
        after[sent.indices] ^= 1
        held = HostBits("BF16", before), HostBits("BF16", after)
        name = f"{segment.name}:{segment.start}"
        old[name], new[name] = held
    return bounds(old, new)[0].positions


def copied(tree: Any) -> Any:
    """A copy of a state dict and its tensors."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def inner_steps(loaded: model.Loaded, optimizer: torch.optim.Optimizer, task: tasks.ProblemStream, first: int) -> float:
    """Take SYNC_EVERY inner steps, on problems from step `first` on; returns their mean loss."""
    losses = []
    for step in range(first, first + SYNC_EVERY):
        found = loss(loaded, [task.problem(step * PROMPTS + k) for k in range(PROMPTS)])
        found.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return statistics.fmean(losses)


def timed(loco: Any, before: dict[str, Any], net: Any, live: dict[str, torch.Tensor]) -> dict[str, float]:
    """One round from the state `before` and the parameters `live`, without a network: seconds by part."""
    loco.load_state_dict(before)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(live[name])
    report = loco.sync()
    return {part: getattr(report, f"{part}_s") for part in ("gate", "encode", "decode", "outer")}


def measure(name: str, rounds: int, lr: float, value_dtype: Any, scale: float | None) -> ModelResult:
    """Take `rounds` rounds at a learning rate, and time the last one."""
    loaded = model.load(name, seed=0, dither=0 if name == "smollm2" else None)
    net = loaded.model.eval()
    task = tasks.ProblemStream("chain_sum", 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0, fused=True)
    loco = pulse.PulseLoCo(
        net, optimizer, sync_every=SYNC_EVERY, exchange="gather", value_dtype=value_dtype, gate_scale=scale
    )
    losses, bits = [], []
    for number in range(rounds):
        losses.append(inner_steps(loaded, optimizer, task, number * SYNC_EVERY))
        bits.append(position_bits(loco))
        if number == rounds - 1:
            before = copied(loco.state_dict())
            live = {each: parameter.detach().clone() for each, parameter in net.named_parameters()}
        loco.sync()
    reports = loco.reports
    optimizer.state.clear()
    dense = pulse.DiLoCo(net, optimizer, sync_every=SYNC_EVERY)
    for each in (loco, dense):
        each._members = FixedMembers(Echo(WORKERS))
    before["workers"] = WORKERS
    plain = before | {"kind": "DiLoCo", "residual": {}}
    seconds: dict[str, list[dict[str, float]]] = {"pulse": [], "diloco": []}
    for _ in range(REPEATS):
        seconds["pulse"].append(timed(loco, before, net, live))
        seconds["diloco"].append(timed(dense, plain, net, live))
    return ModelResult(
        lr=lr,
        value_dtype=loco.value_dtype,
        gate_scale=loco.gate_scale,
        elements=reports[0].elements,
        losses=losses,
        sent=[report.sent for report in reports[:rounds]],
        sent_nbytes=[report.sent_nbytes for report in reports[:rounds]],
        position_bits=bits,
        seconds={
            name: {part: statistics.median(one[part] for one in found) for part in found[0]}
            for name, found in seconds.items()
        },
    )


def main(name: str, rounds: str, lr: str, value_dtype: str = "log8", scale: str = "") -> None:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", f"file://{directory}/ranks", rank=0, world_size=1)
    found = measure(name, int(rounds), float(lr), value_dtype, float(scale) if scale else None)
    print(msgspec.json.encode(found).decode(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
