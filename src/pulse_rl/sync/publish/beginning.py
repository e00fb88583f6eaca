"""What ranks agree on before a version: that they publish the same one, with the same settings, after the same one."""

import msgspec

from pulse_rl.group.collectives import Wording

WORDING = Wording(
    failed="the exchange between publishing ranks failed: a rank or the network is lost, or the ranks did not make the "
    "same calls",
    # A lost first rank may have committed the version: the surviving ranks cannot tell.
    advice="if a rank is lost, make a new process group and a new Publisher on all ranks: it goes on from the newest "
    "version in the store, and none is there in part",
    in_step="when the cause is gone, the same call may be made again on all ranks",
)


class PublishRequest(msgspec.Struct, array_like=True):
    """What one rank was asked to publish, and how."""

    version: int | None
    anchor: bool
    background: bool
    settings: str
    fingerprint: bytes  # of what the rank holds (`layout_fingerprint`); empty of one process alone

    @property
    def asked(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        return {name: getattr(self, name) for name in ("version", "anchor", "background", "settings")}


class Beginning(msgspec.Struct, array_like=True):
    """Where one rank stands. From `sequence` on it is the first rank that knows."""

    known: int | None  # the sequence number of the version that it has committed last
    ready: bool  # whether its baseline holds that version
    sequence: int = 0  # of the next version
    before: int | None = None  # of the version before it; None for the first
    skip_rebuild: bool = False  # whether nothing is rebuilt, as an anchor was asked for
    bandwidth: float | None = None  # bits per second, for the choice of a codec
    token: str = ""  # of this attempt
