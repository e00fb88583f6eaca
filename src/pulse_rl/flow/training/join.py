"""Joining the other trainers of a policy over the network: a process group, and what keeps the same weights in it."""

import os
import socket
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from pulse_rl.flow.engine import node_address
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.exchange import NetworkRounds
from pulse_rl.flow.training.group import GradientAverage, TrainerGroup
from pulse_rl.flow.training.sharded import ShardedTrainers

# A trainer that dies is noticed at once. This limit is for a silent network. It is longer than a trainer may wait for
# its batches while the others wait for it at the exchange.
TIMEOUT_S = 1800
IDLE_S = 0.02  # between polls for the rendezvous
MEETING = "meeting"  # what rank 0 shares: the address at which it waits for the others


def join(
    recipe: PolicyRecipe, rank: int, calls: PolicyCalls, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainerGroup:
    """The group for a policy's settings; returns when all trainers have joined its process group."""
    if recipe.trainers == 1:
        return TrainerGroup(recipe, model)
    _form_process_group(recipe.trainers, rank, calls)
    if recipe.sharded:
        return ShardedTrainers(recipe, model, optimizer)
    if recipe.trainer_sync == "ddp":
        return GradientAverage(recipe, model)
    return NetworkRounds(recipe, model, optimizer)


def _form_process_group(trainers: int, rank: int, calls: PolicyCalls) -> None:
    """Rank 0 opens a rendezvous on a free port; it shares its address with the others."""
    timeout = timedelta(seconds=TIMEOUT_S)
    host = own_address()
    port = 0
    while rank and not port:
        if meeting := calls.shared(MEETING):
            host, port = meeting[0]
        else:
            time.sleep(IDLE_S)
    # Left to itself, a rendezvous listens at all addresses of the machine.
    listening = None if rank else socket.create_server((host, 0))
    if listening:
        port = listening.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=not rank,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach() if listening else None,
    )
    if rank == 0:
        calls.share(MEETING, 0, [host, port])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trainers, timeout=timeout)


def own_address() -> str:
    """The address where the other trainers reach this one, by Gloo too."""
    host = node_address()
    if interface := _interface(host):  # otherwise Gloo resolves the host name, often to the loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return host


def _interface(address: str) -> str | None:
    """This machine's network interface with the address by which the engine's nodes reach each other."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in (socket.AF_INET, socket.AF_INET6) and one.address == address for one in addresses):
            return str(name)
    return None
