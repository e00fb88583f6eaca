"""The ranks of the benchmark: rank 0 sends, rank 1 receives. `compare` says what is measured."""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import pulse_rl as pulse
from bench.channel.compare import PARTS, Order
from bench.link.orders import answer, orders
from bench.roles import live_weights, masters, step


def main(rank: int, layers: int, address: str) -> None:
    dist.init_process_group("gloo", address, rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    weights = masters(layers, generator) if rank == 0 else live_weights(layers)
    answer({"elements": sum(tensor.numel() for tensor in weights.values())})
    for order in orders(Order):
        send = _dense if order.method == "dense" else _channel
        answer({"versions": send(rank, weights, generator, order)})


def _dense(
    rank: int, weights: dict[str, torch.Tensor], generator: torch.Generator, order: Order
) -> list[dict[str, Any]]:
    found = []
    for _ in range(order.versions):
        if rank == 0:
            step(weights, generator)
        dist.barrier()
        start = time.monotonic()
        sent = {name: tensor.to(torch.bfloat16) if rank == 0 else tensor for name, tensor in weights.items()}
        for tensor in sent.values():
            dist.broadcast(tensor.view(torch.uint8), 0)
        end = time.monotonic()
        nbytes = sum(tensor.nbytes for tensor in sent.values())
        found.append(
            {
                "start": start,
                "end": end,
                "nbytes": nbytes,
                "buckets": len(sent),
                "launches": len(sent),
                "digest": pulse.digest(sent),
            }
        )
    return found


def _channel(
    rank: int, weights: dict[str, torch.Tensor], generator: torch.Generator, order: Order
) -> list[dict[str, Any]]:
    channel = pulse.Channel(None, codec=order.method, cast="bfloat16")  # type: ignore[arg-type]
    found = []
    for version in range(order.versions + 2):
        if rank == 0 and version:
            step(weights, generator)
        dist.barrier()
        start = time.monotonic()
        report = channel.send(weights, version=version) if rank == 0 else channel.receive(weights)
        end = time.monotonic()
        if version < 2:  # all bits, then what compiles and measures
            continue
        _, model = report.cost(order.mbit * 1e6 or 1e15)
        found.append(
            {
                "start": start,
                "end": end,
                "nbytes": report.sent_nbytes,
                "buckets": report.buckets,
                "launches": report.launches,
                "digest": report.digest,
                "density": report.density,
            }
            | {"codec": report.codec}
            | {"model_nbytes": model.nbytes, "model_buckets": model.buckets, "model_s": model.seconds}
            | {part: getattr(report, part) for part in PARTS}
        )
    return found


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
