"""What the directory of a run keeps; run with the package that is to write it, as README.md says."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import pulse_rl as pulse
from pulse_rl.flow.data import events
from pulse_rl.flow.data.dataflow import Dataflow
from pulse_rl.flow.training.checkpoints import TrainerCheckpoints
from pulse_rl.flow.training.sharded import shares
from tests.flow.faults import journal_of, make, story
from tests.flow.world import Clock

STEP = 3


def play(kind: str, directory: Path | None) -> Dataflow:
    """A dataflow after the story in which every event happens."""
    clock = Clock()
    flow = make(kind == "deterministic", directory, clock)
    calls, answer = story(flow, clock), None
    with suppress(StopIteration):
        while True:
            answer = calls.send(answer)()
    return flow


def trainer(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A policy's model, its optimizer and its rounds, at exact values that no processor computes in another way."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-10, fused=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    loco = getattr(pulse, kind)(model, optimizer, sync_every=2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # which makes the moments
    state = loco.state_dict() | {"round": 1, "inner_steps": 0}
    moments = [optimizer.state[parameter] for parameter in model.parameters()]
    tables = [
        *(each[name] for name in ("exp_avg", "exp_avg_sq") for each in moments),
        *(tensor for table in (state["momentum"], *state["residual"].values()) for tensor in table.values()),
        *(parameter.data for parameter in model.parameters()),
    ]
    for number, tensor in enumerate(tables):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape) * 2**-number)
    for name, parameter in model.named_parameters():
        state["theta"][name].copy_(parameter.data)  # as after a round
    return model, optimizer, state


def state_of(kind: str) -> dict[str, Any]:
    model, optimizer, peers = trainer(kind)
    return {**shares(model, optimizer), "step": STEP, "peers": peers}


def write(directory: Path) -> None:
    for kind in ("deterministic", "elastic"):
        for part in ("events", "snapshot"):
            (place := directory / f"{kind}-{part}").mkdir(parents=True)
            flow = play(kind, place)
            if part == "snapshot":
                journal_of(flow).compact(events.ENCODER.encode(flow._state._snapshot()))
            journal_of(flow).close()
    for kind in ("PulseLoCo", "DiLoCo"):
        (place := directory / kind).mkdir()
        TrainerCheckpoints(place, 0).write(STEP, state_of(kind))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
