"""How a trainer stays with the others: alone, in rounds (PULSELoCo, DiLoCo), or by every gradient (DDP).

A round is `config.round_steps` steps of every trainer, each on batches of its own, and ends in a version:

    pulse, diloco   the trainers step on their own; the last step of a round exchanges and takes the outer step
    ddp             every step averages the gradients first, so the trainers never differ

After a round all hold the same weights, which is proved by their digests, so rank 0 can publish for all. Within one,
a trainer's live weights are up to `round_steps − 1` steps of its own away from the newest version: that is
what the importance ratio is for, whose denominator is the version that made the token, however the live weights
came about. What is assumed is that clipping bounds this drift as it bounds staleness.
"""

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from pulse_rl.errors import IntegrityError
from pulse_rl.loco import exchange
from pulse_rl.loco.group import Group
from pulse_rl.loco.optimizer import DiLoCo, PulseLoCo
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.engine import node_address
from pulse_rl.weights.digests import digest
from pulse_rl.weights.layout import layout

# A trainer that dies is seen at once. This is for a network that only falls silent, and longer than a trainer may
# wait for its batches while the others stand at the exchange.
TIMEOUT_S = 1800
IDLE_S = 0.02  # between looks for the meeting point
RECORD_LIMIT = 1 << 20  # bytes of one trainer's account of a round


class Alone:
    """A trainer without others; what there is to do with them does nothing here."""

    rank = 0

    def __enter__(self) -> Self:
        """Join the others. A collective, like every method but `state_dict` and `load_state_dict`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave them."""

    def average(self) -> None:
        """Called when the gradients of a step are there, before they are clipped and used."""

    def close(self, record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """After a round's last step: the records of all trainers, in rank order, and what is told of the exchange.

        Raises IntegrityError if the trainers do not hold the same weights.
        """
        return [record], {}

    def agree(self, number: int) -> int:
        """Rank 0's number, once all have called it."""
        return number

    def state_dict(self) -> dict[str, Any]:
        """What must be kept between two rounds, beside the model and the optimizer."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up again, before the others are joined."""


class _Team(Alone):
    """Trainers in a process group."""

    def __init__(self, config: RunConfig, rank: int, model: torch.nn.Module) -> None:
        self.rank = rank
        self._mode = config.trainer_sync
        self._group = Group()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._elements = sum(parameter.numel() for parameter in self._parameters.values())
        self._round_steps = config.round_steps

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # else the others may be gone
            dist.destroy_process_group()

    def close(self, record: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        mine = json.dumps({"record": record, "exchange": self._exchanged()}).encode()
        told = [json.loads(bytes(data)) for data in self._group.gather(mine, RECORD_LIMIT)]
        exchanged = [one["exchange"] for one in told]
        digests = [one["digest"] for one in exchanged]
        if len(set(digests)) > 1:
            raise IntegrityError(
                f"expected the same weights on all trainers, found the digests {', '.join(digests)}, by rank: go on "
                "from the last checkpoint"
            )
        sync = {
            "mode": self._mode,
            "sent_nbytes": [one["sent_nbytes"] for one in exchanged],  # of each trainer
            "dense_nbytes": 4 * self._elements,  # DiLoCo's, of one trainer
            "ddp_nbytes": 4 * self._elements * self._round_steps,
            "density": sum(one["density"] for one in exchanged) / len(exchanged),
            "exchange_s": max(one["seconds"] for one in exchanged),
            "digests": digests,  # of each trainer's float32 weights
        }
        return [one["record"] for one in told], {"trainer_sync": sync}

    def agree(self, number: int) -> int:
        return int(self._group.gather_numbers([number])[0, 0])

    def _exchanged(self) -> dict[str, Any]:
        """What this trainer exchanged in the round: sent_nbytes, density, seconds, digest of the weights after it."""
        raise NotImplementedError


class Rounds(_Team):
    """PULSELoCo or DiLoCo: the inner optimizer's last step of a round ends in the exchange."""

    def __init__(self, config: RunConfig, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(config, rank, model)
        kind = PulseLoCo if config.trainer_sync == "pulse" else DiLoCo
        self._loco = kind(model, optimizer, sync_every=config.round_steps)

    def __enter__(self) -> Self:
        self._loco.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loco.__exit__(*exception)
        super().__exit__(*exception)

    def state_dict(self) -> dict[str, Any]:
        # Between rounds θ is what the parameters are, so the file holds both once.
        return self._loco.state_dict() | {"theta": {name: p.detach() for name, p in self._parameters.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loco.load_state_dict(state)

    def _exchanged(self) -> dict[str, Any]:
        report = self._loco.reports.pop()
        return {
            "sent_nbytes": report.sent_nbytes,
            "density": report.density,
            "seconds": report.total_s,
            "digest": report.digest,
        }


class Averaging(_Team):
    """DDP: the mean gradient of all trainers in every step, summed in rank order as the other ways sum."""

    def __init__(self, config: RunConfig, rank: int, model: torch.nn.Module) -> None:
        super().__init__(config, rank, model)
        self._sent, self._seconds = 0, 0.0

    def average(self) -> None:
        work = exchange.Work()
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mean = exchange.dense(self._group, parameter.grad.reshape(-1).numpy(), work)
            parameter.grad.copy_(torch.from_numpy(mean).view(parameter.shape))
        self._sent += 4 * self._elements
        self._seconds += sum(work.seconds.values())

    def _exchanged(self) -> dict[str, Any]:
        sent, self._sent = self._sent, 0
        seconds, self._seconds = self._seconds, 0.0
        return {"sent_nbytes": sent, "density": 1.0, "seconds": seconds, "digest": digest(layout(self._parameters))}


def join(
    config: RunConfig, rank: int, buffer: DataBuffer, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Alone:
    """The way of this run, and the process group that it needs; returns when all trainers are there."""
    if config.trainers == 1:
        return Alone()
    _form_group(config.trainers, rank, buffer)
    if config.trainer_sync == "ddp":
        return Averaging(config, rank, model)
    return Rounds(config, rank, model, optimizer)


def _form_group(trainers: int, rank: int, buffer: DataBuffer) -> None:
    """Rank 0 opens a meeting point on a port that is free, and the others learn of it by the buffer's board."""
    timeout = timedelta(seconds=TIMEOUT_S)
    host = node_address()
    if interface := _interface(host):  # else Gloo goes by what the host name resolves to, often the loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    port = 0
    while rank and not port:
        if meeting := buffer.board().get("trainer", {}).get("meeting"):
            host, port = meeting
        else:
            time.sleep(IDLE_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=not rank, wait_for_workers=False, timeout=timeout
    )
    if rank == 0:
        buffer.report("trainer", {"meeting": [host, store.port]})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trainers, timeout=timeout)


def _interface(address: str) -> str | None:
    """The network interface of this machine that has the address by which the engine's nodes reach each other."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in (socket.AF_INET, socket.AF_INET6) and one.address == address for one in addresses):
            return str(name)
    return None
