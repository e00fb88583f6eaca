"""The trainer's side: publish versions, each as a patch from the one before, and now and then as an anchor too.

What is given is taken in by `intake`; the way of a version from there is in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pulse_rl.codecs.choose import CodecName
from pulse_rl.errors import VersionNotFoundError
from pulse_rl.group.collectives import Wording, default_place
from pulse_rl.group.ranks import Ranks, collective
from pulse_rl.history.history import History
from pulse_rl.history.operate.prune import GRACE_S, Retention
from pulse_rl.observers import tell
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.sync.publish.attempt import Clock
from pulse_rl.sync.publish.baseline import KeptOn
from pulse_rl.sync.publish.delivery import Delivery
from pulse_rl.sync.publish.encoding import Encoder
from pulse_rl.sync.publish.intake import Intake, Request
from pulse_rl.sync.publish.line import Line
from pulse_rl.sync.publish.pipeline import Pipeline
from pulse_rl.sync.publish.position import Position
from pulse_rl.sync.publish.report import PublishReport
from pulse_rl.sync.publish.successor import check_key
from pulse_rl.sync.publish.views import ViewLine
from pulse_rl.sync.turn import ThreadTurn, in_turn
from pulse_rl.units import as_bandwidth
from pulse_rl.weights.devices import require_kernels

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pulse_rl.log.signing import PrivateKey
    from pulse_rl.weights.views.view import View

WORDING = Wording(
    failed="the exchange between publishing ranks failed: a rank or the network is lost, or the ranks did not make the "
    "same calls",
    # A lost first rank may have committed the version: the surviving ranks cannot tell.
    advice="if a rank is lost, make a new process group and a new Publisher on all ranks: it goes on from the newest "
    "version in the store, and none is there in part",
    in_step="when the cause is gone, the same call may be made again on all ranks",
)


class Publisher:
    """Publishes versions of one model's weights to one history.

    A history has one publisher at a time. On a history that has versions already, the first `publish` rebuilds the
    newest of them, proves it and continues from there; where it cannot be rebuilt, `publish(…, anchor=True)` continues
    without it. A publisher that another one has overtaken gets a StoreError and publishes nothing. A second thread that
    calls one of its methods meanwhile gets a RuntimeError, and a forked process a StoreError.

    Memory: the published bits once (the baseline), one patch (one of each codec where "auto" tries them), decoded
    changes of up to 32 MB for each, and scratch of up to 8 MB a thread (14 MB for 8-byte elements). With
    `background=True` also the changes until they are coded: 8 bytes each (of 2-byte elements), up to a quarter of the
    model's bytes; where there are more, they are coded before `publish` returns. What the last version and the last 4,
    16 and 64 overwrote lies in temporary files, each of at most half the model's bytes.

    Args:
        store: A Store, or the URL or path of one.
        anchor_every: Publish a full checkpoint (an anchor) every N-th version; the first always has one.
        codec: "context", "gap", or "auto": whichever has the version at the workers first. "auto" tries each on the
            changes themselves and weighs bytes against work by `bandwidth`.
        bandwidth: Bandwidth of the slowest link between this trainer and a worker, for codec="auto": bits per second,
            or text with a unit, as "200Mbit" or "25MB". None: as measured while this process put the last anchor, which
            a directory cannot show; where nothing is measured, the history's codec stays, or the one with the fewest
            bytes is taken.
        cast: The dtype that floating-point tensors are published in: torch.bfloat16, or "bfloat16", where the trainer
            holds FP32 masters. None publishes them as they are.
        baseline: Where the published bits are kept to which the next version is compared. "host": in host memory;
            weights on a CUDA device are read through it. "device": of each tensor on a CUDA device, there, so that
            changes are found on it. "pinned": of these, in pinned host memory, which the device reads as it finds
            changes. Both need the extra `gpu`.
        sign_with: An Ed25519 private key, or the path of its PEM file, that signs every manifest; needs the extra
            `sign`. None: manifests are not signed, and a history that is signed is not continued.
        retain: Keep at least this many of the newest versions, and delete older ones. None keeps all.
        keep_every: Keep every N-th anchor permanently. None: older anchors are deleted with the other versions.
        grace: A version that was among the newest `retain` less than this many seconds ago is not deleted yet, so that
            a worker in the middle of a long download can finish it; an hour by default.
        patience: Seconds for which a failure of the store that may pass (a timeout, a connection that is refused or
            lost, an error of the server) is tried again before it is raised. 0: at once.
        group: A torch.distributed process group whose ranks hold shares of the weights, or replicas of them; "world"
            for all ranks. Then making the Publisher, `publish`, `resume`, `flush`, `end` and `close` are collective:
            all ranks call them, with the same arguments. Each rank finds, codes and puts the changes of what it owns,
            and one manifest commits them all, or none. Rank 0's `metadata`, `assets`, `retain` and `bandwidth` count.
            "world" is looked up in the first call, so a Publisher may be made before `init_process_group`. None: one
            process, which holds all of the weights.
        group_timeout: Seconds that a rank waits for another one before it raises ExchangeError; half an hour by
            default. The slowest rank's work on one step counts, as the upload of its part.
        tied: Copies of tensors that are to be published once, as {"lm_head.weight": "model.embed_tokens.weight"}: a
            further name → the name that stands for it. Frameworks that gather whole tensors give such copies of tied
            ones. Each `publish` compares them, and raises where they differ; a name that is absent counts as tied.
            Tensors that are the same memory are tied without it.
        views: The same versions in other precisions, as {"fp8": pulse.Fp8()}. Each view has patches and anchors of its
            own, for `Subscriber(view="fp8")`, and is committed with its version or not at all. It is quantised from
            the published bfloat16 after the weights may be modified again. Memory: its codes and scales twice. Of a
            group, what each rank publishes has to consist of whole blocks.

    Raises:
        ValueError: A setting makes no sense.
        MissingExtraError: baseline="device" or "pinned" without kernels for CUDA devices.
        ExchangeError: The group is not one, or a rank is lost.

    Attributes:
        history: The history that it publishes to.
        has_group: Whether all ranks call its methods together, as it was made with a group.
    """

    history: History  # set by a function within, which type checkers of users do not look into

    def __init__(
        self,
        store: Store | str | Path,
        *,
        anchor_every: int = 50,
        codec: CodecName = "auto",
        bandwidth: float | str | None = None,
        cast: str | torch.dtype | None = None,
        baseline: KeptOn = "host",
        sign_with: PrivateKey | None = None,
        retain: int | None = None,
        keep_every: int | None = None,
        grace: float = GRACE_S,
        patience: float = PATIENCE_S,
        group: dist.ProcessGroup | Literal["world"] | None = None,
        group_timeout: float | None = None,
        tied: Mapping[str, str] | None = None,
        views: Mapping[str, View] | None = None,
    ) -> None:
        self._ranks = Ranks.of(group, WORDING, group_timeout)
        self.has_group = group is not None

        def make() -> None:
            if not isinstance(anchor_every, int) or anchor_every < 1:
                raise ValueError(f"anchor_every: expected at least 1, a whole number, found {anchor_every!r}")
            if retain is None and keep_every is not None:
                raise ValueError("keep_every: expected together with retain, which says how many versions are kept")
            if baseline not in get_args(KeptOn):
                raise ValueError(f"baseline: expected 'host', 'pinned' or 'device', found {baseline!r}")
            if baseline != "host":
                require_kernels()
            if not isinstance(views, Mapping | None):
                raise ValueError(f"views: expected a mapping, as {{'fp8': pulse.Fp8()}}, found {views!r}")
            self.bandwidth = bandwidth
            self.history = History(store, sign_with=sign_with, patience=patience)
            retention = Retention(retain, keep_every, grace) if retain is not None else None
            settings, warn = f"codec={codec}, anchor_every={anchor_every}", group is None and default_place() is None
            settings += f", views={dict(sorted(views.items()))}" if views else ""
            self._intake = Intake(self._ranks, cast, tied, settings, warn=warn)
            self._delivery = Delivery(self.history, retention, self._ranks)
            self._position = Position(self._delivery, self._ranks, baseline)
            line = Line(self._ranks, self._position, Encoder(codec, self._ranks), self._delivery, anchor_every)
            made = [
                ViewLine(name, fp8, self._ranks, self.history.of(name), codec, anchor_every)
                for name, fp8 in sorted((views or {}).items())
            ]
            self._pipeline = Pipeline(self._ranks, line, made, partial(tell, self))

        with self._ranks.collective():
            self._ranks.make("make a publisher", make)
            self._turn = ThreadTurn("Publisher", nested=True)

    @property
    def bandwidth(self) -> float | None:
        """Bits per second of the slowest link to a worker, for codec="auto"; may be set at any time, as in `Publisher`.

        Raises:
            ValueError: When set to anything but a number above 0, text with a unit, or None.
        """
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, value: float | str | None) -> None:
        self._bandwidth = as_bandwidth(value)

    @property
    def version(self) -> int | None:
        """The newest version that this publisher has committed or resumed from; None before the first."""
        committed = self._delivery.committed
        return committed.version if committed else None

    @property
    def digest(self) -> str | None:
        """The digest of that version, 16 hex digits; None before the first."""
        committed = self._delivery.committed
        return committed.digest if committed else None

    @in_turn
    @collective
    def resume(self) -> int | None:
        """Continue from the newest version of a history that has versions already; `publish` does so by itself.

        The version is rebuilt in temporary files, proved, and copied into memory as the baseline. Ranks of a group do
        that in the next `publish`, which tells them what they hold.

        Returns:
            That version, after which `publish` without a version numbers the next one; None for an empty history.

        Raises:
            IntegrityError: The history is damaged, so that its newest version cannot be rebuilt; then
                `publish(…, anchor=True)` continues without it.
            VersionSkewError: A newer pulse-rl has published to it: upgrade this one.
            StoreError: The store failed, or another publisher has committed since.
            ValueError: The history is signed, and this publisher has no key.
        """
        self._ranks.do("publish the version in flight", self.flush)
        head = self._pipeline.begin(anchor=False, share=None, bandwidth=None).head
        return head.version if head else None

    @in_turn
    @collective
    def publish(
        self,
        weights: Any,
        *,
        version: int | None = None,
        anchor: bool = False,
        background: bool = False,
        cast: str | torch.dtype | None = None,
        assets: Mapping[str, bytes] | None = None,
        metadata: Mapping[str, str | int | float | bool | None] | None = None,
        like: Any = None,
    ) -> PublishReport:
        """Publish the weights as a new version. When this returns, subscribers can have it.

        After an error the history is as it was and `publish` can be called again. The one exception: where the store
        fails at the commit and at the check after it too, the StoreError says that the version may be there; `resume`
        returns the newest one. What fails after the commit is no error; the report's `warning` says it.

        Args:
            weights: A torch module (its parameters and persistent buffers), a state dict, or any mapping of name →
                tensor or array. Not modified, and not to be modified during the call. Or an iterator of (name, tensor),
                as trainers gather them: it is read to its end, one tensor at a time, into a temporary file of the
                published bits, so no second model is in memory. Each tensor has to come, also an unchanged one. Of a
                group every rank gives an iterator, which may be empty where another rank's has the tensors.
            version: A whole number greater than every version of the history. None: the newest one + 1, or 0 for the
                first.
            anchor: Publish a full checkpoint too, whatever `anchor_every` says. Where this publisher has no baseline
                yet, it rebuilds none then, so that a damaged history can be continued: the version has an anchor only.
            background: Return as soon as the changes are found: the weights may be modified then, and a thread codes,
                proves, puts and commits the version. What fails there, as where another publisher has committed, is
                logged, and raised by the next `publish`, `resume`, `flush` or `close`. One version is in flight at a
                time: the next call waits for it. Of a first version the weights are copied.
            cast: As in `Publisher`, for this version. None: as given there.
            assets: Small files to put with an anchor (a tokenizer), name → bytes. A Transformers model's config.json is
                added by itself.
            metadata: What to note of the version, as {"reward": 0.7}: text, numbers, booleans and None by name, at most
                4 KB of JSON. `inspect` and `SyncReport` have it. A float that JSON does not have, as NaN, becomes text.

            like: A Transformers model or config, whose config.json an anchor of a mapping or iterator gets.

        Returns:
            What was published, and what it took.

        Raises:
            ValueError: There are no tensors, the version is not newer, an asset's name is not possible, a tensor has a
                name that readers refuse, the metadata is too large, or the history is signed and this publisher does
                not have its key.
            TypeError: The weights or an asset are of a type that cannot be published.
            BaseMismatchError: The tensors are not those of the version before.
            IntegrityError: The weights changed while they were read, the history is damaged, or a tensor differs from
                the one that it equals by `tied`.
            VersionSkewError: A newer pulse-rl has published to the history: upgrade this one.
            StoreError: The store failed, or another publisher has committed.
            RuntimeError: Another thread is at work with this publisher.
        """
        clock = Clock(self._ranks)
        request = Request(weights, version, anchor, background, cast, assets, metadata, like)
        with ExitStack() as files:
            if isinstance(weights, Iterator):
                request = self._intake.spool(request, files)
            given = self._intake.take(request, self._prepare)
            start = self._pipeline.begin(anchor, given.share, self._bandwidth, look=not background)
            attempt = self._pipeline.find(start, given, request, clock)
        return self._pipeline.deliver(attempt, background=background)

    def _prepare(self) -> None:
        """What precedes every publish."""
        if self._ranks.size > 1:
            self.flush()  # the ranks are at one thing at a time
        if self._ranks.rank == 0:
            self.history.store.check_create()

    @in_turn
    def flush(self) -> PublishReport | None:
        """Wait until the version in flight is committed.

        Returns:
            Its full report; None if no version is in flight.

        Raises:
            IntegrityError: As `publish`. The version is not published, and the next one starts from the one before.
            StoreError: Likewise.
        """
        return self._pipeline.flush()

    @in_turn
    @collective
    def end(self) -> None:
        """Mark the run as ended: its newest version is the last one. `Subscriber.ended` and `pulse-rl status` show it.

        A version that is published afterwards makes the mark void.

        Raises:
            VersionNotFoundError: The history holds no version.
            IntegrityError: As `flush`.
            StoreError: Likewise; or another publisher has committed.
            ValueError: The history is signed, and this publisher has no key.
        """
        self._ranks.do("mark the end", self._mark_end)

    def _mark_end(self) -> None:
        """Wait for the version in flight, and on the first rank mark the newest as the last one."""
        self.flush()
        if self._ranks.rank:
            return
        head = self.history.head()
        self._position.check_end(head)
        if head is None:
            url = self.history.store.url
            raise VersionNotFoundError(f"{url} holds no version yet, so none can be the last one", url=url)
        check_key(self.history, head)
        self._delivery.marked = True
        self.history.mark_end(head)

    @in_turn
    def close(self) -> None:
        """Wait until the version in flight is committed. The publisher can be used again afterwards.

        Raises:
            IntegrityError: As `flush`.
            StoreError: Likewise.
        """
        try:
            self.flush()
        finally:
            self._pipeline.await_pool()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
