"""The two sides of a channel: which rank holds and owns what, among the senders and among the receivers.

Senders hold one model together. Receivers are *engines*, each of which holds one model together: a receiver that holds
everything is an engine alone, others are put together in the order of their ranks. One that lacks whole tensors is of
another model where some receiver has them all and none holds shards. So every engine proves all that it
holds, and the owners of its pieces count each element once. All ranks say what they hold, and come to the same sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pulse_rl.sync.share_plan import Description, SharePlan, make_plan
from pulse_rl.sync.shares import Share, share_by, whole_share
from pulse_rl.weights.layout import Layout


@dataclass(frozen=True)
class ChannelSides:
    """What a rank knows of both sides."""

    rank: int
    sources: tuple[int, ...]  # the ranks that send
    engines: tuple[tuple[int, ...], ...]  # the ranks of each
    side: tuple[int, ...]  # the ranks that hold the weights together with this one
    cut: bool  # whether a receiver holds parts of tensors, or all of them some tensors only
    sent: SharePlan  # who of the senders owns what
    plan: SharePlan  # the same of this rank's side

    @classmethod
    def of(cls, rank: int, sources: Sequence[int], said: Sequence[Description], fingerprint: bytes) -> "ChannelSides":
        """The sides, from what every rank says that it holds. Raises as `make_plan`. fingerprint: of this rank's."""

        def plan_of(ranks: Sequence[int]) -> SharePlan:
            return make_plan([said[one] for one in ranks], fingerprint, ranks)

        receivers = [one for one in range(len(said)) if one not in sources]
        sent = plan_of(sources)
        apart = bool(receivers) and not any(said[one].names >= sent.tensors.keys() for one in receivers)
        cut = apart or any(said[one].sharded for one in receivers)
        engines = engines_of(plan_of(receivers), receivers) if cut else tuple((one,) for one in receivers)
        side = tuple(sources) if rank in sources else next(engine for engine in engines if rank in engine)
        return cls(rank, tuple(sources), engines, side, cut, sent, sent if rank in sources else plan_of(side))

    def share(self, tensors: Layout) -> Share:
        """What this rank holds of its side. tensors: cut as when it was agreed, in memory that may be another."""
        if len(self.side) == 1 and not tensors.sharded:
            return whole_share(tensors)
        return share_by(self.plan, self.side.index(self.rank), tensors)


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
