"""The verbs of a channel: send on the ranks that train, receive on all others, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pulse_rl.codecs.choose import CodecName
from pulse_rl.codecs.choose import check as check_codec
from pulse_rl.observers import tell
from pulse_rl.sync.channel.exchange import Exchange
from pulse_rl.sync.channel.receiver import ChannelReceiver
from pulse_rl.sync.channel.reports import ChannelReport
from pulse_rl.sync.channel.sender import ChannelSender, Collected
from pulse_rl.sync.channel.sending import ChannelSettings
from pulse_rl.sync.channel.wire import Wire
from pulse_rl.sync.turn import ThreadTurn, in_turn
from pulse_rl.units import as_bandwidth
from pulse_rl.weights.casts import cast_name

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

BUCKET_NBYTES = 32 << 20


class Channel:
    """Sends versions of one model's weights over a process group: the changes, proved, without a store.

    Making one is a collective of the group, as are `send` and `receive`: each `send` on the senders meets one `receive`
    on every other rank. A version is written on all receivers or on none: each proves it before any writes. After an
    error, which all ranks raise, weights are as they were, or hold the new version where the error came after all had
    proved it: `version` says which. The next send repairs what is left over. After a rank was lost, `reconnect`.

    Memory: a sender holds the bits that it owns once more (none with `collected`), its part of the changes, and one
    bucket. A receiver holds the coded changes that it needs, up to 32 MB of decoded ones, and one bucket of each kind;
    where it is sent all bits, they are collected in a temporary file.

    Args:
        group: The process group, over Gloo or NCCL; None for torch's default one. Control goes over Gloo connections
            of its own in any case.
        source: The rank in the group that sends, or the ranks that do so together, each the pieces that it holds. All
            others receive.
        codec: "gap", "context", or "auto": whichever has the version at the receivers first, as measured. Where
            receivers share a model it is "gap".
        cast: The dtype that floating-point tensors are sent in, where the trainer holds FP32 masters; None: their own.
        bucket_nbytes: The most bytes that one message has; 32 MiB by default.
        bandwidth: Of the link, for codec="auto": bits per second, or text with a unit. None: as measured by the last
            send of a MB or more.
        validate_every: Compare every bit of the receivers with the senders' after each N-th version; 0: never.
        observe: Send nothing: `send` reports what would be sent. The group may then consist of senders alone.
        statistics: Whether reports describe what payloads consist of, which takes about as long as coding them.
        collected: Changes that are collected while the optimizer casts its masters, instead of a copy of the weights to
            compare with: `pulse_rl.integrations.masters.MasterChanges`.
        timeout: Seconds that a step waits for another rank; None for half an hour.

    Raises:
        ExchangeError: There is no such process group, or a rank is lost.
        ValueError: A setting makes no sense.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        source: int | Sequence[int] = 0,
        codec: CodecName = "auto",
        cast: str | torch.dtype | None = None,
        bucket_nbytes: int = BUCKET_NBYTES,
        bandwidth: float | str | None = None,
        validate_every: int = 0,
        observe: bool = False,
        statistics: bool = False,
        collected: Collected | None = None,
        timeout: float | None = None,
    ) -> None:
        check_codec(codec)
        if not isinstance(bucket_nbytes, int) or bucket_nbytes < 1:
            raise ValueError(f"bucket_nbytes: expected at least 1, a whole number, found {bucket_nbytes!r}")
        if not isinstance(validate_every, int) or validate_every < 0:
            raise ValueError(f"validate_every: expected a number of versions, or 0, found {validate_every!r}")
        self._settings = ChannelSettings((), bucket_nbytes, validate_every, observe)
        self._timeout = timeout
        self._sender = ChannelSender(
            codec,
            None if cast is None else cast_name(cast),
            as_bandwidth(bandwidth),
            collected,
            statistics=statistics or observe,
        )
        self._receiver = ChannelReceiver()
        self._turn = ThreadTurn("Channel", nested=False)
        self._connect(group, source)

    def _connect(self, group: dist.ProcessGroup | None, source: int | Sequence[int]) -> None:
        sources = (source,) if isinstance(source, int) else tuple(source)
        self._wire = Wire(group, self._settings.bucket_nbytes, self._timeout)
        size = self._wire.ranks.size
        if not sources or len(set(sources)) < len(sources) or not all(0 <= rank < size for rank in sources):
            raise ValueError(f"source: expected ranks from 0 to {size - 1}, each once, found {source!r}")
        if len(sources) == size and not self._settings.observe:
            raise ValueError(f"source: expected that some rank of {size} receives, found {source!r}")
        self._settings = msgspec.structs.replace(self._settings, source=tuple(sorted(sources)))
        if self._wire.ranks.rank in sources:
            self._sender.connect(self._wire.ranks.among(self._settings.source))
        self._exchange = Exchange(self._wire, self._settings)

    @property
    def _end(self) -> ChannelSender | ChannelReceiver:
        return self._sender if self._wire.ranks.rank in self._settings.source else self._receiver

    @in_turn
    def reconnect(self, group: dist.ProcessGroup | None = None, *, source: int | Sequence[int] = 0) -> None:
        """Go on in another process group, as after a rank was lost: what this rank holds is kept. A collective of it.

        Args:
            group: The process group; None for torch's default one.
            source: The ranks in it that send.

        Raises:
            ExchangeError: There is no such process group, or a rank is lost.
            ValueError: The ranks make no sense.
        """
        self._connect(group, source)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._wire.ranks.rank

    @property
    def version(self) -> int | None:
        """The version that this rank's weights hold, proved, or that it sent last; None if that is not known."""
        held = self._end.held
        return held.version if held else None

    @in_turn
    def send(self, model: Any, *, version: int) -> ChannelReport:
        """Send a version to all receivers. A collective: every other rank calls `receive`.

        The first send sends all bits, but to receivers that hold them already; later ones the changes. A receiver that
        holds another version, or none that is known, is sent all bits.

        Args:
            model: A torch module, or a mapping of name → tensor, array, DTensor, `Shard` or a list of shards.
            version: A whole number, not smaller than the last one.

        Returns:
            What was sent.

        Raises:
            ExchangeError: Another rank failed or is lost.
            BaseMismatchError: The receivers hold another model, or shards are missing.
            IntegrityError: The proof failed.
            ValueError: The version is smaller than the last one, or the same with other bits.
            TypeError: Something is not a tensor.
        """
        return self._call(self._sender, model, version)

    @in_turn
    def receive(self, model: Any) -> ChannelReport:
        """Bring the weights to the version that is sent, in place. A collective: every sender calls `send`.

        Args:
            model: A torch module, or a mapping of name → live tensor, DTensor, `Shard` or a list of shards. They keep
                their memory. What this rank does not hold is not written, and need not be held by one rank.

        Returns:
            What was received; its `version` is what the weights hold now.

        Raises:
            ExchangeError: Another rank failed or is lost.
            BaseMismatchError: These weights are of another model, or share memory where the sender's do not.
            IntegrityError: The proof failed.
            ValueError: A tensor cannot be written.
            TypeError: Something is not a tensor, or is a copy.
        """
        return self._call(self._receiver, model, None)

    def _call(self, end: ChannelSender | ChannelReceiver, weights: Any, version: int | None) -> ChannelReport:
        with self._wire.ranks.collective():
            report = self._exchange.run(end, weights, version)
        tell(self, report)
        return report
