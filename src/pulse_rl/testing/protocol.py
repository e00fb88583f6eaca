"""What the author of a receiver writes: an adapter, and what it makes; and what a check raises.

`Adapter` and `Receiver` are needed. `CanStage`, `CanDisturb` and `CanRestart` are what some receivers have in addition:
the suite looks whether a receiver has the method, and skips what needs it otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable
from unittest import SkipTest

if TYPE_CHECKING:
    import torch

    from pulse_rl.testing.source import Source


class Unsupported(SkipTest):
    """What a receiver does not take, and says so: raised by `Adapter.make`, it skips the check.

    For what users are refused too, such as a dtype that an engine does not have.
    """


class ConformanceError(AssertionError):
    """A receiver did what a receiver must not do.

    Attributes:
        tensor: The tensor that holds other bits than it should; None where it is not about one.
        version: The version whose bits were expected; None where it is not about one.
    """

    def __init__(self, message: str, *, tensor: str | None = None, version: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.version = version


class Held(NamedTuple):
    """What one rank of a receiver reports, and what it holds.

    Attributes:
        version: The version that it reports; None where it reports none.
        weights: Its live weights at this moment: published name → torch tensor, NumPy array, `pulse.Shard` or a list of
            shards. A copy will do. Names that are tied to another one may be left out.
    """

    version: int | None
    weights: Mapping[str, Any]


class Receiver(Protocol):
    """One receiver: weights that follow one history."""

    def sync(self, version: int | None = None) -> int:
        """Bring the weights to a version.

        Args:
            version: The version. None: the newest.

        Returns:
            The version that is reported to be reached.

        Raises:
            Exception: Any, where it was not reached.
        """

    def held(self) -> Sequence[Held]:
        """Look at what is reported and held, without changing it.

        Returns:
            Of each rank, in their order. A receiver of one process has one.
        """

    def close(self) -> None:
        """Free what it uses. It is not used any more."""


class Adapter(Protocol):
    """Makes receivers of one kind, for one check after another."""

    @property
    def name(self) -> str:
        """The kind, for reports."""

    @property
    def reads(self) -> Literal["store", "url", "weights"]:
        """How a receiver comes to a version.

        "store": through `Source.store`, which the suite lets fail, and which can be pickled for another process. "url":
        it opens `Source.url` itself, so that no call can be made to fail. "weights": the adapter brings it
        `Source.weights` in another way, as over a process group.
        """

    @property
    def remote(self) -> bool:
        """Whether its receivers live in processes, which `CanRestart.restart` starts anew.

        Otherwise the adapter is pickled, and the suite makes its receiver in a child process to kill it.
        """

    def make(self, weights: Mapping[str, torch.Tensor], source: Source) -> Receiver:
        """Make a receiver that has synced nothing yet.

        Args:
            weights: Tensors with the published names, dtypes and shapes, and the bits that the receiver begins with.
                Some are not contiguous, 0-dim or empty, some share memory, tied ones are one tensor or copies. A
                receiver that writes to memory which it is given takes these. Any other makes its own weights from them,
                in its own layout.
            source: The history that it is to follow.

        Returns:
            The receiver.

        Raises:
            Unsupported: Receivers of this kind do not take such weights, and say so.
        """


class StagedVersion(Protocol):
    """A version that a receiver has staged."""

    @property
    def version(self) -> int:
        """The version."""

    def apply(self) -> float:
        """Write it to the weights.

        Returns:
            The seconds that the receiver reports for it, during which generation pauses.

        Raises:
            Exception: Any, where it was not written.
        """

    def discard(self) -> None:
        """Drop it. The weights are as they are."""


@runtime_checkable
class CanStage(Protocol):
    """A receiver that fetches and proves a version before the pause."""

    def stage(self, version: int | None = None) -> StagedVersion:
        """Fetch, decode and prove a version, without touching a weight.

        Args:
            version: The version. None: the newest.

        Returns:
            The staged version.

        Raises:
            Exception: Any, where it was not staged.
        """


@runtime_checkable
class CanDisturb(Protocol):
    """A receiver whose weights can be written to by something else, in a way that it claims to notice."""

    def disturb(self) -> None:
        """Change bits of the live weights behind the receiver's back, as a fault of the engine would."""


@runtime_checkable
class CanRestart(Protocol):
    """A receiver in processes that outlive a kill: those that are left are ended, and it begins anew."""

    def restart(self) -> None:
        """End all processes of the receiver, in whatever state they are, and start them again.

        Memory that a restart keeps is as the killed processes left it; any other holds arbitrary bits.
        """
