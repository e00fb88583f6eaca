"""The trainers of the benchmark; `rounds` says what is measured."""

import json
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pulse_rl as pulse
from bench.link.orders import answer, orders
from bench.link.store import BUCKET
from bench.roles import WEIGHT_STD, shapes, step
from bench.trainers.rounds import PORT, SYNC_EVERY, TRAINERS, Order

VOCABULARY = 4096  # of the model's embedding: dense methods must end in a time that one can wait for
BUCKET_NBYTES = 25 << 20  # DDP's


class Drift(torch.optim.Optimizer):
    """Moves weights as an Adam step does, without gradients."""

    def __init__(self, parameters: dict[str, torch.Tensor], seed: int) -> None:
        super().__init__(parameters.values(), {})
        self._weights = {name: parameter.detach() for name, parameter in parameters.items()}
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        step(self._weights, self._generator)


class Model(torch.nn.Module):
    """Float32 weights in the shapes of SmolLM2."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes(layers, vocab=VOCABULARY).items():
            values = torch.empty(shape).normal_(0.0, WEIGHT_STD, generator=generator)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(values))


def main(rank: int, layers: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://10.0.1.2:{PORT}", rank=rank, world_size=TRAINERS)
    answer({"elements": sum(parameter.numel() for parameter in Model(layers).parameters())})
    for order in orders(Order):
        model = Model(layers)
        rounds = _ddp(model) if order.method == "ddp" else _rounds(model, rank, order)
        answer({"rounds": rounds})


def _rounds(model: Model, rank: int, order: Order) -> list[dict[str, Any]]:
    optimizer = Drift(dict(model.named_parameters()), seed=rank + 1)
    group: Any = dist.group.WORLD
    if order.method == "pulse, store":
        group = pulse.StoreGroup(f"s3://{BUCKET}/{order.folder}", rank=rank, world_size=TRAINERS, timeout=600)
    kind = pulse.DiLoCo if order.method == "diloco" else pulse.PulseLoCo
    method: AbstractContextManager[Any] = kind(model, optimizer, sync_every=SYNC_EVERY, group=group)
    found = []
    with method as loco:
        for _ in range(order.rounds):
            for _ in range(SYNC_EVERY - 1):
                optimizer.step()
            # The last step of a round exchanges: only this is timed, with the step itself.
            found.append(_timed(optimizer.step))
            report = loco.reports[-1]
            found[-1] |= {"digest": report.digest, "density": report.density}
    return found


def _ddp(model: Model) -> list[dict[str, Any]]:
    gradients = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])

    def average() -> None:
        for start in range(0, len(gradients), BUCKET_NBYTES // 4):
            dist.all_reduce(gradients[start : start + BUCKET_NBYTES // 4])

    found = _timed(average)
    return [found | {"digest": pulse.digest({"gradients": gradients})}]


def _timed(work: Any) -> dict[str, Any]:
    dist.barrier()
    before, start = _sent_nbytes(), time.monotonic()
    work()
    return {"start": start, "end": time.monotonic(), "nbytes": _sent_nbytes() - before}


def _sent_nbytes() -> int:
    """What has left this namespace's device."""
    return next(int(line.split()[9]) for line in Path("/proc/net/dev").read_text().splitlines() if "hub:" in line)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
