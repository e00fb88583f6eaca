"""Adapters of our receivers whose ranks are processes: the sharded Subscriber, and the Channel."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing

import pulse_rl as pulse
from pulse_rl.testing import Held, Source
from tests.forked import forking, picklable
from tests.loco.ranks import start
from tests.store.servers import free_port
from tests.testing.adapters import Following

PATIENCE_S = 60  # until a rank counts as one that hangs
TIMEOUT_S = 20.0  # of the ranks' group

Weights = Mapping[str, torch.Tensor]


def _serve(rank: int, size: int, at: int, pipe: Connection) -> None:
    """Call what arrives, with a dictionary that is kept from call to call."""
    start(rank, size, at, TIMEOUT_S)
    kept: dict[str, Any] = {}
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the parent has ended
            os._exit(0)
        try:
            pipe.send(function(kept, rank, size, *arguments))
        except BaseException as error:  # noqa: BLE001 - raised by the parent
            pipe.send(picklable(error))


class Pool:
    """Processes in a Gloo group, which several receivers use one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def begin(self) -> None:
        """Start the processes, unless they run."""
        if all(process.is_alive() for process in self._processes) and self._processes:
            return
        self.end()
        context, at = forking(), free_port()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, at, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def call(self, function: Callable[..., Any], *arguments: Any, each: Sequence[Any] = ()) -> list[Any]:
        """Call a function on all ranks. each: one more argument for each of them. Raises the first error."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, (*arguments, *each[rank : rank + 1])))
        found: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_S), f"rank {rank} hangs"
            try:
                found.append(pipe.recv())
            except (EOFError, ConnectionError):
                found.append(RuntimeError(f"rank {rank} is gone"))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found


def shared(weights: Weights) -> Weights:
    """The same tensors, whose memory all processes share that they are sent to."""
    for tensor in weights.values():
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return weights


def share(weights: Weights, rank: int, size: int) -> dict[str, Any]:
    """What one rank holds: rows, columns, flat runs and replicas; some ranks nothing of some tensors."""
    held: dict[str, Any] = {}
    replicas: dict[int, torch.Tensor] = {}
    for name, tensor in weights.items():
        along = 1 if tensor.ndim == 2 and ".down." in name else 0
        if not tensor.numel() or not tensor.ndim or ".norm." in name:
            own = tensor if rank == 0 else replicas.setdefault(id(tensor), tensor.clone())
            held[name] = own
        elif tensor.ndim == 3 and tensor.is_contiguous():
            edges = [tensor.numel() * i // size for i in range(size + 1)]
            run = tensor.view(-1)[edges[rank] : edges[rank + 1]]
            held[name] = pulse.Shard(run, shape=tensor.shape, flat_offset=edges[rank])
        else:
            edges = [-(-tensor.shape[along] * i // size) for i in range(size + 1)]
            part = tensor.narrow(along, edges[rank], edges[rank + 1] - edges[rank])
            offset = [edges[rank] if dim == along else 0 for dim in range(tensor.ndim)]
            held[name] = pulse.Shard(part, shape=tensor.shape, offset=offset)
    return held


# What the ranks do.


def _follow(kept: dict[str, Any], rank: int, size: int, weights: Weights, source: Source) -> None:
    held = share(weights, rank, size)
    subscriber = pulse.Subscriber(source.store, patience=0, group=dist.group.WORLD, group_timeout=TIMEOUT_S)
    kept["receiver"], kept["weights"] = Following(subscriber, held), held


def _receive(kept: dict[str, Any], rank: int, size: int, weights: Weights) -> None:
    kept["receiver"], kept["weights"] = pulse.Channel(timeout=TIMEOUT_S), weights


def _transfer(kept: dict[str, Any], rank: int, size: int, version: int, weights: Weights) -> int:
    channel = kept["receiver"]
    report = channel.send(weights, version=version) if rank == 0 else channel.receive(kept["weights"])
    return int(report.version)


def _sync(kept: dict[str, Any], rank: int, size: int, version: int | None) -> int:
    return int(kept["receiver"].sync(version))


def _stage(kept: dict[str, Any], rank: int, size: int, version: int | None) -> int:
    kept["staged"] = kept["receiver"].stage(version)
    return int(kept["staged"].version)


def _apply(kept: dict[str, Any], rank: int, size: int) -> float:
    return float(kept["staged"].apply())


def _discard(kept: dict[str, Any], rank: int, size: int) -> None:
    kept["staged"].discard()


def _disturb(kept: dict[str, Any], rank: int, size: int) -> None:
    if rank == size - 1:
        held = next(one for one in kept["weights"].values() if isinstance(one, torch.Tensor | pulse.Shard))
        tensor = held.tensor if isinstance(held, pulse.Shard) else held
        with torch.no_grad():
            tensor.zero_()


def _held(kept: dict[str, Any], rank: int, size: int) -> tuple[int | None, dict[str, torch.Tensor]]:
    """The version, and the replicas of this rank: the parent shares all other memory."""
    receiver = kept["receiver"]
    version = receiver.held()[0].version if isinstance(receiver, Following) else receiver.version
    replicas = {name: one.clone() for name, one in kept["weights"].items() if isinstance(one, torch.Tensor)}
    return version, replicas


class Sharded:
    """Subscribers whose ranks hold shares of the weights."""

    def __init__(self, pool: Pool, weights: Weights, source: Source) -> None:
        self._pool, self._weights, self._source = pool, shared(weights), source
        self._begin()

    def _begin(self) -> None:
        self._pool.begin()
        self._pool.call(_follow, self._weights, self._source)

    def sync(self, version: int | None = None) -> int:
        return int(self._pool.call(_sync, version)[0])

    def stage(self, version: int | None = None) -> ShardedStaged:
        return ShardedStaged(self._pool, self._pool.call(_stage, version)[0])

    def held(self) -> Sequence[Held]:
        found = self._pool.call(_held)
        size = self._pool.size
        return [
            Held(version, share(self._weights, rank, size) | replicas) for rank, (version, replicas) in enumerate(found)
        ]

    def disturb(self) -> None:
        self._pool.call(_disturb)

    def restart(self) -> None:
        self._pool.end()
        self._begin()

    def close(self) -> None:
        pass


class ShardedStaged:
    """A version that all ranks have staged."""

    def __init__(self, pool: Pool, version: int) -> None:
        self._pool, self.version = pool, version

    def apply(self) -> float:
        return float(max(self._pool.call(_apply)))

    def discard(self) -> None:
        self._pool.call(_discard)


class ShardedSubscribers:
    """`pulse.Subscriber(group=…)`, of two ranks."""

    name = "Subscriber(group=…)"
    reads: Literal["store"] = "store"
    remote = True

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def make(self, weights: Weights, source: Source) -> Sharded:
        return Sharded(self._pool, weights, source)


class Receiving:
    """The receiving rank of a channel; the sending one has the versions from the suite."""

    def __init__(self, pool: Pool, weights: Weights, source: Source) -> None:
        self._pool, self._weights, self._source = pool, shared(weights), source
        pool.begin()
        pool.call(_receive, self._weights)

    def sync(self, version: int | None = None) -> int:
        wanted = self._source.newest if version is None else version
        return int(self._pool.call(_transfer, wanted, each=[self._source.weights(wanted), None])[1])

    def held(self) -> Sequence[Held]:
        return [Held(self._pool.call(_held)[1][0], self._weights)]

    def disturb(self) -> None:
        self._pool.call(_disturb)

    def close(self) -> None:
        pass


class Channels:
    """`pulse.Channel`, of a sender and a receiver."""

    name = "Channel"
    reads: Literal["weights"] = "weights"
    remote = True

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def make(self, weights: Weights, source: Source) -> Receiving:
        return Receiving(self._pool, weights, source)
