"""Skip patches: from the version 4, 16 or 64 commits ago to the newest, so that subscribers far behind catch up fast.

The publisher makes them from its baseline and from what its versions overwrote in it, after the newest version is
committed. The trail of the next version lists them. Reading them is `history.trail`'s part.
"""

from dataclasses import dataclass, field

from pulse_rl.codecs.base import Codec
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import check_digest
from pulse_rl.history.trail import SPANS, State
from pulse_rl.patch import encode
from pulse_rl.patch.encode import Coded, EncodedPatch
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import Older, Overlay
from pulse_rl.patch.since import Since
from pulse_rl.sync.publish.encoding import prove_part
from pulse_rl.weights.layout import Layout

MAX_OVERLAY = 1 / 2  # of the model's bytes; a larger overlay is dropped, and its window is empty until the next begins


@dataclass
class _Window:
    """The versions since a sequence number that the span divides."""

    span: int
    base: State | None = None  # where the window begins; None if what changed since is not known
    overlays: list[Overlay] = field(default_factory=list)  # what was overwritten since, the oldest first

    def restart(self, base: State | None) -> None:
        self.base, self.overlays = base, []

    def nbytes(self) -> int:
        return sum(overlay.nbytes for overlay in self.overlays)

    def overlay(self) -> Overlay:
        """What the base held. Until it is asked for, nothing is merged."""
        if len(self.overlays) > 1:
            first, *later = self.overlays
            self.overlays = [first.and_later(*later)]
        return self.overlays[0]


class Skips:
    """Keeps what each window's base held, and says which skip patches are due."""

    def __init__(self) -> None:
        self._windows = [_Window(span) for span in SPANS]

    def clear(self) -> None:
        """Empty all windows, as what the last version overwrote is not known."""
        for window in self._windows:
            window.restart(None)

    def add(self, before: State, now: State, replaced: Overlay, full_nbytes: int) -> list[tuple[State, Overlay]]:
        """Record a version.

        before, now: the version before, and this one. replaced: what this one overwrote. full_nbytes: of the model.
        Returns the bases of the skip patches to this version that are due, nearest first, with their overlays.
        """
        due: list[tuple[State, Overlay]] = []
        most = full_nbytes * MAX_OVERLAY
        for window in self._windows:
            if before.sequence % window.span == 0:
                window.restart(before)
            if window.base is not None:
                window.overlays.append(replaced)
                if window.nbytes() > most and window.overlay().nbytes > most:
                    window.restart(None)
            if now.sequence % window.span:
                return due
            if window.base is None:
                break
            replaced = window.overlay()
            due.append((window.base, replaced))
            before = window.base
        # The longer windows lack these changes.
        for window in self._windows[len(due) + 1 :]:
            window.restart(None)
        return due


def find_skip(overlay: Overlay, newest: Layout, codec: Codec) -> Coded:
    """Code what changed from an older version to the newest, of what this rank owns.

    overlay: what the older version held, over `newest`.
    """
    since = Since.of(overlay, newest)
    older = overlay.over(newest) if since is None else newest
    (coded,) = encode.find(older, newest, codecs=[codec], tied=newest.tied, scan=since).code()
    return coded


def prove_skip(
    coded: Coded, base: State, target: State, overlay: Overlay, newest: Layout, delta: int, ranks: Ranks
) -> EncodedPatch:
    """The patch, or this rank's part of it, proved. Raises IntegrityError if it does not lead to the target.

    delta: what the digest gains, added up over all ranks.
    """
    what = f"the patch from version {base.version} to {target.version}"
    check_digest(what, target.digest, int(base.digest, 16) + delta)
    older = Older(lambda: overlay, lambda: {name: [bits] for name, bits in overlay.over(newest).items()})
    return prove_part(coded, base, target.version, delta, ranks, newest.derived(each_alone), older)[0]
