"""Adapters of our receivers whose ranks are processes: the sharded Subscriber, and the Channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

import pulse_rl as pulse
from pulse_rl.testing import Held, Source
from tests.loco.ranks import Ranks
from tests.testing.adapters import Following

TIMEOUT_S = 20.0  # of the ranks' group

Weights = Mapping[str, torch.Tensor]

KEPT: dict[str, Any] = {}  # of each rank's process, from call to call


class Pool:
    """Processes in a Gloo group, which several receivers use one after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: Ranks | None = None

    def begin(self) -> None:
        """Start the processes, unless they run."""
        if self._ranks is None or not all(process.is_alive() for process in self._ranks.processes.processes):
            self.end()
            self._ranks = Ranks(self.size, TIMEOUT_S)

    def end(self) -> None:
        if self._ranks is not None:
            self._ranks.processes.end()
            self._ranks = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on all ranks. Raises the first error."""
        assert self._ranks is not None
        for one in (found := self._ranks(function, self.size, *arguments)):
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


def _follow(group: Any, rank: int, size: int, weights: Weights, source: Source) -> None:
    held = share(weights, rank, size)
    subscriber = pulse.Subscriber(source.store, patience=0, group=dist.group.WORLD, group_timeout=TIMEOUT_S)
    KEPT["receiver"], KEPT["weights"] = Following(subscriber, held), held


def _receive(group: Any, rank: int, size: int, weights: Weights) -> None:
    KEPT["receiver"], KEPT["weights"] = pulse.Channel(timeout=TIMEOUT_S), weights


def _transfer(group: Any, rank: int, size: int, version: int, weights: Weights) -> int:
    channel = KEPT["receiver"]
    report = channel.send(weights, version=version) if rank == 0 else channel.receive(KEPT["weights"])
    return int(report.version)


def _sync(group: Any, rank: int, size: int, version: int | None) -> int:
    return int(KEPT["receiver"].sync(version))


def _stage(group: Any, rank: int, size: int, version: int | None) -> int:
    KEPT["staged"] = KEPT["receiver"].stage(version)
    return int(KEPT["staged"].version)


def _apply(group: Any, rank: int, size: int) -> float:
    return float(KEPT["staged"].apply())


def _discard(group: Any, rank: int, size: int) -> None:
    KEPT["staged"].discard()


def _disturb(group: Any, rank: int, size: int) -> None:
    if rank == size - 1:
        held = next(one for one in KEPT["weights"].values() if isinstance(one, torch.Tensor | pulse.Shard))
        tensor = held.tensor if isinstance(held, pulse.Shard) else held
        with torch.no_grad():
            tensor.zero_()


def _held(group: Any, rank: int, size: int) -> tuple[int | None, dict[str, torch.Tensor]]:
    """The version, and the replicas of this rank: the parent shares all other memory."""
    receiver = KEPT["receiver"]
    version = receiver.held()[0].version if isinstance(receiver, Following) else receiver.version
    replicas = {name: one.clone() for name, one in KEPT["weights"].items() if isinstance(one, torch.Tensor)}
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
        return int(self._pool.call(_transfer, wanted, self._source.weights(wanted))[1])

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
