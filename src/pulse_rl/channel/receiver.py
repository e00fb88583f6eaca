"""What a receiver does in each step of a call: it keeps what arrives, proves it, and then writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pulse_rl.channel.dense import Comparison, SenderTable, SpooledVersion, Tiles
from pulse_rl.channel.meeting import ChannelMeeting, ProvedState, RankFindings, Role
from pulse_rl.channel.sides import Standing
from pulse_rl.channel.sparse import PartReader, prove
from pulse_rl.errors import BaseMismatchError, IntegrityError
from pulse_rl.group.collectives import Bytes
from pulse_rl.patch.apply import Application
from pulse_rl.patch.live import Live, by_name, live_digest
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, Sides, TensorSpec, compare_layouts
from pulse_rl.weights.memory import LiveWeights, Memory

_SIDES = Sides(
    "these weights are not the sender's",
    "the sender",
    "these weights",
    dtype="convert the model by model.to(torch.{expected}), or give the sender's Channel cast='{found}'",
)


class ChannelReceiver:
    """One receiver of a channel."""

    role: Role = "receive"
    sends = 0

    def __init__(self) -> None:
        self.held: ProvedState | None = None  # what the weights are proved to hold; None while they are being written
        self._memory: Memory | None = None  # that was proved to hold it
        self._tables: list[SenderTable] = []
        self._live = Live()
        self._weights: LiveWeights | None = None
        self._readers: list[PartReader] = []
        self._staged: SpooledVersion | None = None
        self._application: Application | None = None
        self._comparison: Comparison | None = None

    def view(self, weights: Any, version: int | None) -> Layout:
        """The weights that are to be written. Other memory, or memory that torch has written to, holds no version."""
        del version
        self.forget()
        live = LiveWeights(weights)
        if self._memory is None or not self._memory.is_still(live):
            self.held = None
        self._weights = live
        for name, bits in live.layout.items():
            if not bits.writable:
                raise ValueError(
                    f"tensor {name!r} is read-only, or its elements share memory (an expanded view): expected weights "
                    "that can be written"
                )
        return live.layout

    def forget(self) -> None:
        """Drop what is staged."""
        self._live, self._readers, self._weights = Live(), [], None
        self._staged = self._application = self._comparison = None

    def learn(self, tables: Sequence[SenderTable], standing: Standing) -> None:
        """Learn what each sender owns, and compare it with what this rank's engine holds."""
        self._tables = list(tables)
        specs = {name: spec for table in self._tables for name, spec in table.specs.items()}
        plan = standing.share.plan
        found = {**plan.tensors, **{alias: plan.tensors[owner] for alias, owner in plan.tied.items()}}
        tied = self._tied()
        expected: dict[str, TensorSpec] = specs | {a: specs[o] for a, o in tied.items() if a in found}
        compare_layouts(expected, found, _SIDES)

    def _tied(self) -> dict[str, str]:
        return {alias: owner for table in self._tables for alias, owner in table.tied.items()}

    def find(self, meeting: ChannelMeeting, standing: Standing, bandwidth: float | None) -> RankFindings:
        """Count the weights if it is not known of the whole engine that it holds one version."""
        del bandwidth  # the senders' matter
        self._live = by_name(standing.share.held, self._tied())
        if len({meeting.held[rank] for rank in standing.side}) == 1 and self.held is not None:
            return RankFindings(engine=standing.side[0])
        try:
            found = self._without_empty(live_digest(self._live), standing)
        except BaseMismatchError:  # tied copies that differ: they hold no version
            return RankFindings(digest="", engine=standing.side[0])
        return RankFindings(digest=digests.to_hex(found), engine=standing.side[0])

    def _without_empty(self, digest: int, standing: Standing) -> int:
        """Of an engine's ranks the first one counts the tensors without elements."""
        if standing.rank == standing.side[0]:
            return digest
        return digest - digests.empty_digest({name: copies[0] for name, copies in self._live.items()})

    def read_part(self, sender: RankFindings, standing: Standing) -> PartReader:
        """What takes the part of the next sender."""
        sharded = standing.share.held.sharded
        self._readers.append(PartReader(self._live, sender.head_nbytes, sender.nbytes, sharded=sharded))
        return self._readers[-1]

    def stage(self, number: int) -> Callable[[Bytes], None]:
        """What takes all bits of a sender. The first call makes room for the whole version."""
        if self._staged is None:
            self._staged = SpooledVersion(self._live)
        return Tiles(self._tables[number].entries, self._staged.put).feed

    def prove(self, base: ProvedState | None, target: ProvedState, standing: Standing) -> str | None:
        """Prove what arrived. Returns what the digest of what this rank owns gains, or of all bits the digest."""
        if self._staged is not None:
            self._staged.check()
            return digests.to_hex(self._without_empty(self._staged.digest(), standing))
        if not self._readers or base is None:
            return None
        parts = [reader.patch() for reader in self._readers]
        for part in parts:
            header = part.header
            found = (header.base, header.base_digest, header.target, header.target_digest)
            if found != (base.version, base.digest, target.version, target.digest):
                raise IntegrityError(
                    f"expected a part from version {base.version} (digest {base.digest}) to {target.version} "
                    f"({target.digest}), found one from {header.base} ({header.base_digest}) to {header.target} "
                    f"({header.target_digest})",
                    expected=target.digest,
                    found=header.target_digest,
                )
        self._application = Application(parts, self._live)
        return digests.to_hex(prove(self._application, int(base.digest, 16), int(target.digest, 16)))

    def distrust(self) -> None:
        """The weights turned out not to hold what they should."""
        self.held = None

    def write(self, target: ProvedState) -> None:
        """Write what was proved. `held` says what the weights hold then, None if that failed."""
        self.held = None
        if self._staged is not None:
            self._staged.write()
        elif self._application is not None:
            self._application.write()
        self._memory = Memory(self._weights) if self._weights is not None else None
        self.held = target

    def compare(self, number: int) -> Tiles:
        """What compares all bits of a sender with the live weights."""
        if self._comparison is None:
            self._comparison = Comparison(self._live)
        return Tiles(self._tables[number].entries, self._comparison.put)

    def check(self, version: int) -> None:
        """Raise IntegrityError if the comparison found another bit."""
        if self._comparison is not None and self._comparison.differing:
            self.held = None
            name, count = next(iter(self._comparison.differing.items()))
            raise IntegrityError(
                f"version {version} differs from the sender's bits in {len(self._comparison.differing)} tensors: "
                f"{name!r} in {count} elements; the next send repairs them",
                name=name,
            )
