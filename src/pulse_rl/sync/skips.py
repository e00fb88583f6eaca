"""Skip patches: from the version 4, 16 or 64 commits ago to the newest, so that a worker that slept catches up fast.

The publisher makes them from what it knows: its baseline, and what its publishes overwrote in it. They are made after
the version is committed, in no one's way; the trail of the next version tells of them.
"""

from dataclasses import dataclass

from pulse_rl.codecs.base import Codec
from pulse_rl.errors import IntegrityError
from pulse_rl.history.trail import SPANS, State
from pulse_rl.patch import encode
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.overlay import Overlay
from pulse_rl.weights.layout import Layout

LARGEST = (
    1 / 2
)  # of the model's bytes: an overlay beyond that is given up, and the span with it, until the next one begins


@dataclass
class _Window:
    """The versions since a multiple of a span."""

    span: int
    base: State | None = None  # None while there is none to patch from
    overlay: Overlay | None = None  # of the base; None before the first version after it

    def restart(self, base: State | None) -> None:
        self.base, self.overlay = base, None


class Skips:
    """Which skip patches are due, and what their bases held."""

    def __init__(self) -> None:
        self._windows = [_Window(span) for span in SPANS]

    def clear(self) -> None:
        """Begin anew: what the last publish overwrote is not known."""
        for window in self._windows:
            window.restart(None)

    def add(self, before: State, now: State, replaced: Overlay, full_nbytes: int) -> list[tuple[State, Overlay]]:
        """Take in that one version followed another, and what that overwrote.

        Returns the bases of the skip patches that are due to the new version, the nearest first, with their overlays.
        """
        due: list[tuple[State, Overlay]] = []
        for window in self._windows:
            if before.sequence % window.span == 0:
                window.restart(before)
            if window.base is not None:
                window.overlay = window.overlay.and_later(replaced) if window.overlay else replaced
                if window.overlay.nbytes > full_nbytes * LARGEST:
                    window.restart(None)
            if now.sequence % window.span:
                return due
            if window.base is None or window.overlay is None:
                break
            due.append((window.base, window.overlay))
            before, replaced = window.base, window.overlay
        # What the windows beyond hold lacks this one's changes.
        for window in self._windows[len(due) + 1 :]:
            window.restart(None)
        return due


def skip_patch(base: State, overlay: Overlay, newest: Layout, target: State, codec: Codec) -> encode.EncodedPatch:
    """The patch from an older version to the newest, proved. Raises IntegrityError if it does not lead there."""
    older = overlay.over(newest)
    (coded,) = encode.encode(
        older,
        newest,
        base=base.version,
        target=target.version,
        codecs=[codec],
        base_digest=int(base.digest, 16),
        tied=newest.tied,
    )
    if coded.header.target_digest != target.digest:
        raise IntegrityError(
            f"the patch from version {base.version} should lead to digest {target.digest}, it leads to "
            f"{coded.header.target_digest}"
        )
    application = Application(patch_format.unpack(coded.data), {name: [bits] for name, bits in older.items()})
    application.prove(int(base.digest, 16))
    return coded
