"""The choice of a codec: by name, or by measurement for "auto".

`auto` encodes the changes at hand with each candidate and takes the one with the least encode + transfer + decode time
over the link, or with the fewest bytes if the link's bandwidth is not known: then the choice depends on the patches
alone, and no process makes another one. A `Chooser`, for a sequence of patches, keeps its measurements and repeats them
now and then, because densities drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pulse_rl import units
from pulse_rl.codecs.base import Codec
from pulse_rl.codecs.context import ContextCodec
from pulse_rl.codecs.gap import GapCodec

CodecName = Literal["auto", "context", "gap"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (ContextCodec(), GapCodec())}
RETRY = 50  # patches after which `auto` tries all candidates again
DRIFT = 2.0  # factor by which the density changes before it does so at once


def check(name: str) -> None:
    """Raise ValueError unless this is the name of a codec to write patches with, or "auto"."""
    if name != "auto" and name not in CODECS:
        raise ValueError(f"codec: expected one of auto, {', '.join(CODECS)}, found {name!r}")


def candidates(name: str) -> list[Codec]:
    """The codec of that name; for "auto" all candidates. Raises ValueError for an unknown name."""
    check(name)
    return [CODECS[candidate] for candidate in (CODECS if name == "auto" else (name,))]


@dataclass(frozen=True)
class Trial:
    """One codec's measurements on one patch, on this machine."""

    codec: str
    nbytes: int
    encode_s: float
    decode_s: float  # proving included

    def seconds(self, bandwidth: float | None) -> float:
        """Seconds from changes here to changes there, over a link of that bandwidth in bits per second."""
        return self.encode_s + (8 * self.nbytes / bandwidth if bandwidth else 0.0) + self.decode_s

    def account(self, bandwidth: float | None) -> str:
        """In words."""
        size = units.nbytes(self.nbytes)
        if bandwidth is None:
            return f"{self.codec} {size}"
        return (
            f"{self.codec} {self.seconds(bandwidth):.3g} s (encode {self.encode_s:.3g}, {size} over the link "
            f"{8 * self.nbytes / bandwidth:.3g}, decode {self.decode_s:.3g})"
        )


def best(trials: Sequence[Trial], bandwidth: float | None) -> Trial:
    """The trial that takes least time over a link of that bandwidth, in bits per second.

    Where the bandwidth is None: the one with the fewest bytes.
    """
    return min(trials, key=lambda trial: trial.seconds(bandwidth) if bandwidth else trial.nbytes)


class Chooser:
    """Chooses the codec for each of a sequence of patches of one model.

    reason: why the last choice was made, for reports.
    """

    def __init__(self, name: str) -> None:
        check(name)
        self._name = name
        self._trials: list[Trial] = []
        self._density: float | None = None  # of the patch that they were made on; before, of the first
        self._since = 0  # patches chosen for since then
        self.reason = f"codec={name!r} was requested"

    @property
    def untried(self) -> bool:
        """Whether nothing has been measured yet."""
        return not self._trials

    def codecs(self, bandwidth: float | None, before: str | None = None) -> list[Codec]:
        """The codecs to encode the next patch with: one, or several to measure.

        before: the codec of the patch before, which another process may have made: it stays where nothing tells more.
        """
        if self._name != "auto" or self._since >= RETRY:
            return candidates(self._name)
        if self._trials:
            return [CODECS[best(self._trials, bandwidth).codec]]
        return [CODECS[before]] if bandwidth is None and before in CODECS else candidates(self._name)

    def choose(self, trials: Sequence[Trial], density: float, bandwidth: float | None) -> Trial:
        """Choose which of the patches just encoded to send. Sets `reason`."""
        self._since += 1
        if len(trials) > 1 or self._density is None:
            self._density, self._since = density, 0
            self._trials = list(trials) if len(trials) > 1 else []
        elif not self._density / DRIFT <= density <= self._density * DRIFT:
            self._since = RETRY
        if self._name != "auto":
            return trials[0]
        if not self._trials:
            self.reason = f"{trials[0].account(None)}, as before: no bandwidth of a link is known"
            return trials[0]
        chosen = best(self._trials, bandwidth)
        others = [trial.account(bandwidth) for trial in self._trials if trial is not chosen]
        why = (
            f"over {units.bandwidth(bandwidth)}"
            if bandwidth
            else "the fewest bytes, as no bandwidth of a link is known"
        )
        self.reason = f"{chosen.account(bandwidth)} against {', '.join(others)}, {why}"
        return next(trial for trial in trials if trial.codec == chosen.codec)
