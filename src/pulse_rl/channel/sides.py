"""The two sides of a channel: which rank holds and owns what, among the senders and among the receivers.

Senders hold one model together. Receivers are *engines*, each of which holds one model together: a receiver that holds
everything is an engine alone, others are put together in the order of their ranks. So every engine proves all that it
holds, and the owners of its pieces count each element once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from pulse_rl.channel.wire import Wire
from pulse_rl.sync.group.shares import MAX_NBYTES, Share, SharePlan, share_of
from pulse_rl.weights.boxes import Box, Shape
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.pieces import pieces_of


class _Side:
    """Some ranks of a wire, as those who share a model. All ranks of the wire make its collectives."""

    def __init__(self, wire: Wire, members: Sequence[int]) -> None:
        self._wire, self._members = wire, members
        self.rank, self.size = members.index(wire.rank), len(members)
        self.calls = 0

    def gather(self, data: bytes, limit: int) -> list[bytes]:
        self.calls += 1
        found = self._wire.gather(data, limit)
        return [found[rank] for rank in self._members]


@dataclass(frozen=True)
class Standing:
    """What a rank knows of its side."""

    rank: int  # of this process
    side: tuple[int, ...]  # the ranks that hold the weights together with it
    share: Share
    everyone: SharePlan | None = None  # of all receivers; None where each of them holds everything, and for a sender

    def replicas(self) -> dict[str, int]:
        """As `Share.replicas`, by the ranks of the wire instead of their places in the side."""
        found = self.share.replicas(self.side.index(self.rank))
        return {
            ",".join(str(self.side[int(place)]) for place in holders.split(",")): digest
            for holders, digest in found.items()
        }

    def replica_digests(self, holders: str) -> dict[str, int]:
        """As `Share.replica_digests`. holders: ranks of the wire."""
        places = ",".join(str(self.side.index(int(rank))) for rank in holders.split(","))
        return self.share.replica_digests(self.side.index(self.rank), places)


def print_of(tensors: Layout) -> bytes:
    """A fingerprint of what a rank holds: equal as long as its share need not be agreed anew."""
    rows: list[tuple[str, str, Shape, list[Box]]] = [
        (name, bits.dtype, tuple(bits.shape), [piece.box for piece in pieces_of(bits)])
        for name, bits in tensors.items()
    ]
    return blake3(msgspec.json.encode((rows, sorted(tensors.tied.items())))).digest(16)


def agree(
    wire: Wire,
    tensors: Layout,
    sources: Sequence[int],
    sharded: Sequence[bool],
    known: Standing | None,
) -> Standing | None:
    """Agree who owns what on each side. A collective.

    tensors: what this rank holds. sharded: of each rank, whether it holds parts of tensors. known: of the last time,
    None on all ranks if any of them holds something else since. None is returned on a failure, which the wire raises.
    """
    receivers = [rank for rank in range(wire.size) if rank not in sources]
    cut = any(sharded[rank] for rank in receivers)
    if not cut and len(sources) == 1 and not sharded[sources[0]]:
        calls = 0
    else:
        calls = 1 if known else 4 if cut else 2
    made: list[_Side] = []

    def share(members: Sequence[int], plan: SharePlan | None = None) -> Share:
        made.append(_Side(wire, members))
        return share_of(made[-1], tensors, plan, numbers=members)

    def find() -> Standing:
        plan = known.share.plan if known else None
        if wire.rank in sources:
            return Standing(wire.rank, tuple(sources), share(sources, plan))
        if not cut:
            return Standing(wire.rank, (wire.rank,), share([wire.rank]))
        everyone = known.everyone if known else share(receivers).plan
        assert everyone is not None  # some receiver is sharded, now as in the last call
        mine = next(engine for engine in engines_of(everyone, receivers) if wire.rank in engine)
        return Standing(wire.rank, mine, share(mine, plan), everyone)

    found = wire.attempt(find)
    for _ in range(calls - sum(one.calls for one in made)):
        wire.gather(b"", MAX_NBYTES)
    return found


def engines_of(plan: SharePlan, receivers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Put receivers together into engines, each of which holds everything.

    plan: of all receivers, by their place among them. Those that are left over belong to the last engine.
    """
    parts = [part for found in plan.parts.values() for part in found]
    held: dict[int, set[int]] = {place: set() for place in range(len(receivers))}
    for number, part in enumerate(parts):
        for place in part.holders:
            held[place].add(number)
    engines: list[list[int]] = []
    missing: set[int] = set()
    for place, rank in enumerate(receivers):
        if not missing:
            missing = set(range(len(parts)))
            engines.append([])
        engines[-1].append(rank)
        missing -= held[place]
    if missing and len(engines) > 1:
        engines[-2] += engines.pop()
    return tuple(map(tuple, engines))
