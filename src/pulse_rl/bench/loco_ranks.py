"""A trainer of `bench loco`: `python -m pulse_rl.bench.loco_ranks SETTINGS`, a process for each rank, over Gloo.

For each seed rank 0 trains the policy supervised and broadcasts it; then every method runs from there, with the same
prompts for the same rank and step, and the same number of samples. Rank 0 prints a line of JSON for each run.
"""

import copy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import pulse_rl as pulse
from pulse_rl.bench import loco_task as task
from pulse_rl.bench.loco import EVALUATE_EVERY, LocoRun, Method, Settings, methods
from pulse_rl.loco.rounds import LocalSteps

PROBLEMS, GROUP = 4, 8  # problems of each rank and inner step, completions of each problem
EVALUATED = 1024  # problems, the same for all runs; each rank evaluates its share
TIMEOUT = timedelta(seconds=600)


class Forgetful(pulse.PulseLoCo):
    """PULSELoCo without error feedback: what is not sent is dropped."""

    def sync(self) -> pulse.LocoReport:
        report = super().sync()
        for values in self._masters.residual.values():
            values.fill(0)
        return report


LOCAL: dict[str, Callable[..., LocalSteps]] = {
    "DiLoCo": pulse.DiLoCo,
    "PULSELoCo": pulse.PulseLoCo,
    "FP16 gate": partial(pulse.PulseLoCo, gate="float16"),
    "without feedback": Forgetful,
}


def average(parameters: list[nn.Parameter]) -> None:
    """Replace gradients by their mean over all ranks, as DistributedDataParallel does."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def evaluate(policy: task.Policy) -> float:
    """The expected reward, when all ranks hold the same weights, as they do right after a round. A collective."""
    solved = task.problems(EVALUATED, torch.Generator().manual_seed(-1))
    found = torch.tensor(task.reward(policy, solved[dist.get_rank() :: dist.get_world_size()]))
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def train(start: task.Policy, method: Method, seed: int, settings: Settings) -> LocoRun:
    """One run from `start`, which is not changed."""
    began = time.perf_counter()
    policy, rank = copy.deepcopy(start), dist.get_rank()
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr * method.faster, betas=(0.9, 0.999), weight_decay=0)
    local = LOCAL[method.name](policy, optimizer, sync_every=method.sync_every) if method.sync_every else None
    rewards = [evaluate(policy)]
    context: Any = local or nullcontext()
    with context:
        for step in range(settings.steps):
            generator = torch.Generator().manual_seed((seed << 32) + (step << 8) + rank)
            solved = task.problems(PROBLEMS, generator)
            task.backward(policy, task.sample(policy, solved, GROUP, generator), GROUP)
            if local is None:
                average(parameters)
            nn.utils.clip_grad_norm_(parameters, task.GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % EVALUATE_EVERY == 0:
                rewards.append(evaluate(policy))
    elements = sum(parameter.numel() for parameter in parameters)
    reports = local.reports if local else []
    return LocoRun(
        method=method,
        seed=seed,
        elements=elements,
        rewards=rewards,
        sent_nbytes=[report.sent_nbytes for report in reports] or [4 * elements] * settings.steps,
        density=[report.density for report in reports] or [1.0] * settings.steps,
        exchange=sorted({report.exchange for report in reports}),
        seconds=time.perf_counter() - began,
    )


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{settings.port}",
        rank=settings.rank,
        world_size=settings.trainers,
        timeout=TIMEOUT,
    )
    for seed in range(settings.seeds):
        generator = torch.Generator().manual_seed(seed)
        start = task.Policy(generator)
        if settings.rank == 0:
            task.pretrain(start, settings.pretrain, generator)
        for parameter in start.parameters():
            dist.broadcast(parameter.data, 0)
        for method in methods(settings.sync_every):
            run = train(start, method, seed, settings)
            if settings.rank == 0:
                print(msgspec.json.encode(run).decode(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
