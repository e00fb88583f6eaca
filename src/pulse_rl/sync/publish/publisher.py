"""The trainer's side: publish versions, each as a patch from the one before, and now and then as an anchor too.

A version takes six steps: encode the changes against the baseline; prove that the patch leads from the baseline to the
new version; move the baseline; put the objects; commit the manifest; put skip patches and prune, where they are due.
From the move on nothing reads the trainer's weights, so the rest can go on in the background.

Three fields hold the state, two of them in `position`:

    state      committed          baseline       _in_flight
    empty      None               None           None             nothing is known of the history
    ready      version n          of version n   None
    in flight  version n or None  None           the version that the background puts, with its baseline
    broken     version n          None           None             what the baseline's memory holds is not known

Each verb leads from state to state:

    state      publish                                    resume                     flush, close
    empty      resume; then as ready, or publish          rebuild the newest         nothing
               an anchor as the first version → ready     version → ready
    ready      encode, move, put, commit → ready;         check that the history     nothing
               on failure undo the move → ready,          still ends at version n
               or broken if that is not possible
    in flight  encode; flush; then as ready               flush; then as ready       wait → ready; on failure
                                                                                     undo the move → ready or broken
    broken     as empty                                   as empty                   nothing

With anchor=True, empty and broken publish an anchor and rebuild nothing. Two rules make every line safe to interrupt:
`baseline` is of `committed` or None; and what changes the baseline's memory takes it out of the field first, and puts
it back when it is known what the memory holds. So an interruption leaves the publisher broken at worst.

Ranks of a group take each step together: what can fail is done in a step of `Ranks`, so that it fails on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pulse_rl import units
from pulse_rl.codecs.choose import CodecName
from pulse_rl.errors import VersionNotFoundError
from pulse_rl.group.agreement import require_same
from pulse_rl.group.collectives import default_place
from pulse_rl.group.ranks import Ranks, collective
from pulse_rl.history.anchor import check_assets, model_config
from pulse_rl.history.history import History, holds
from pulse_rl.history.manifest import Manifest, Scalar
from pulse_rl.history.operate.prune import GRACE_S, Retention
from pulse_rl.history.restore import no_room
from pulse_rl.logs import logger
from pulse_rl.observers import tell
from pulse_rl.patch import format as patch_format
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.sync.publish.baseline import Baseline, KeptOn, Move
from pulse_rl.sync.publish.beginning import WORDING, Beginning, PublishRequest
from pulse_rl.sync.publish.delivery import Delivered, Delivery, Upcoming
from pulse_rl.sync.publish.encoding import Encoded, Encoder, copy_whole
from pulse_rl.sync.publish.position import Position
from pulse_rl.sync.publish.report import Clock, PublishReport, nonfinite_warning, publish_report
from pulse_rl.sync.publish.successor import (
    check_key,
    check_metadata,
    check_readable,
    check_successor,
    check_tensors,
    check_ties,
    new_manifest,
    next_version,
    without_copies,
)
from pulse_rl.sync.shares import Share, SharePlan, layout_fingerprint, share_of
from pulse_rl.sync.turn import ThreadTurn, in_turn
from pulse_rl.weights import streamed
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.casts import cast_name
from pulse_rl.weights.devices import require_kernels
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import Layout
from pulse_rl.weights.names import refuse_adapters, warn_of_prefix

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pulse_rl.log.signing import PrivateKey

log = logger(__name__)

_ALONE = (
    "rank %d of %d publishes by itself: its Publisher was made without a group, before init_process_group was called "
    "(until then torch.distributed.group.WORLD is None): give group='world' on all ranks, or publish on rank 0 alone"
)


class Publisher:
    """Publishes versions of one model's weights to one history.

    A history has one publisher at a time. On a history that has versions already, the first `publish` rebuilds the
    newest of them, proves it and continues from there; where it cannot be rebuilt, `publish(…, anchor=True)` continues
    without it. A publisher that another one has overtaken gets a StoreError and publishes nothing. A second thread that
    calls one of its methods meanwhile gets a RuntimeError, and a forked process a StoreError.

    Memory: the published bits once (the baseline), one patch (one of each codec where "auto" tries them), decoded
    changes of up to 32 MB for each, and scratch of up to 8 MB a thread (14 MB for 8-byte elements). What the last
    version and the last 4, 16 and 64 overwrote lies in temporary files, each of at most half the model's bytes.

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

    Raises:
        ValueError: A setting makes no sense.
        MissingExtraError: baseline="device" or "pinned" without kernels for CUDA devices.
        ExchangeError: The group is not one, or a rank is lost.

    Attributes:
        history: The history that it publishes to.
        has_group: Whether all ranks call its methods together, as it was made with a group.
    """

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
    ) -> None:
        self._ranks = Ranks.of(group, WORDING, group_timeout)
        self.has_group = group is not None
        self._unaware = group is None and default_place() is None  # as WORLD is None before there is a process group

        def make() -> tuple[History, Encoder, Delivery, str | None]:
            if not isinstance(anchor_every, int) or anchor_every < 1:
                raise ValueError(f"anchor_every: expected at least 1, a whole number, found {anchor_every!r}")
            if retain is None and keep_every is not None:
                raise ValueError("keep_every: expected together with retain, which says how many versions are kept")
            if baseline not in get_args(KeptOn):
                raise ValueError(f"baseline: expected 'host', 'pinned' or 'device', found {baseline!r}")
            if baseline != "host":
                require_kernels()
            self.bandwidth = bandwidth
            history = History(store, sign_with=sign_with, patience=patience)
            retention = Retention(retain, keep_every, grace) if retain is not None else None
            kind = cast_name(cast) if cast is not None else None
            self._tied = check_ties(tied)
            return history, Encoder(codec, self._ranks), Delivery(history, retention, self._ranks), kind

        with self._ranks.collective():
            history, self._encoder, self._delivery, self._cast = self._ranks.make("make a publisher", make)
            self.history = history
            self._anchor_every, self._codec, self._kept_on = anchor_every, codec, baseline
            self._kept = Kept()
            self._plan: SharePlan | None = None  # who owns what, as it was agreed last
            self._turn = ThreadTurn("Publisher", nested=True)
            # The state: see the module's docstring.
            self._position = Position(self.history, self._ranks, baseline)
            self._in_flight: _InFlight | None = None
            self._pool: ThreadPoolExecutor | None = None  # of the newest version that was put in the background

    @property
    def bandwidth(self) -> float | None:
        """Bits per second of the slowest link to a worker, for codec="auto"; may be set at any time, as in `Publisher`.

        Raises:
            ValueError: When set to anything but a number above 0, text with a unit, or None.
        """
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, value: float | str | None) -> None:
        bits = value
        if isinstance(bits, str):
            bits = units.parse_bandwidth(bits, "bandwidth")
        if bits is not None and not (isinstance(bits, int | float) and bits > 0):
            raise ValueError(f"bandwidth: expected more than 0 bits per second, found {value!r}")
        self._bandwidth = bits

    @property
    def version(self) -> int | None:
        """The newest version that this publisher has committed or resumed from; None before the first."""
        committed = self._position.committed
        return committed.version if committed else None

    @property
    def digest(self) -> str | None:
        """The digest of that version, 16 hex digits; None before the first."""
        committed = self._position.committed
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
        _, head, _ = self._begin(anchor=False, share=None)
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
            background: Return as soon as the patch is made and proved; a thread puts and commits the version, and the
                weights may be modified. What fails there is logged, and raised by the next `publish`, `resume`, `flush`
                or `close`. One version is in flight at a time: the next one is encoded meanwhile, then waits for it.
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
                name that readers refuse, the metadata is too large, or the history is signed and this publisher has no
                key.
            TypeError: The weights or an asset are of a type that cannot be published.
            BaseMismatchError: The tensors are not those of the version before.
            IntegrityError: The weights changed while they were read, the history is damaged, or a tensor differs from
                the one that it equals by `tied`.
            VersionSkewError: A newer pulse-rl has published to the history: upgrade this one.
            StoreError: The store failed, or another publisher has committed.
            RuntimeError: Another thread is at work with this publisher.
        """
        clock = Clock(self._ranks)
        if isinstance(weights, Iterator):
            options = {"version": version, "anchor": anchor, "background": background, "cast": cast, "like": like}
            with TemporaryDirectory(prefix="pulse-rl-") as directory:
                kept = self._keep(weights, cast, Path(directory))
                report = self.publish(kept, assets=assets, metadata=metadata, **options)
            return replace(report, total_s=clock.seconds)

        def check() -> tuple[_Checked, PublishRequest]:
            if self._ranks.size > 1:
                self.flush()  # the ranks are at one thing at a time
            if version is not None:
                patch_format.check_version("version", version)
            noted = check_metadata(metadata)
            if self._ranks.rank == 0:
                self.history.store.check_create()
            if self._unaware and (place := default_place()) is not None and place.rank:
                self._unaware = False
                log.warning(_ALONE, place.rank, place.size)
            kind = self._cast if cast is None else cast_name(cast)
            files = dict(assets or {})
            check_assets(files)
            refuse_adapters(weights)
            for name, data in model_config(weights if like is None else like, kind).items():
                files.setdefault(name, data)
            tensors = self._kept.layout(weights, kind)
            settings = f"codec={self._codec}, cast={kind}, anchor_every={self._anchor_every}"
            settings += f", tied={self._tied}" if self._tied else ""
            mine = layout_fingerprint(tensors, self._plan) if self._ranks.size > 1 else b""
            return _Checked(tensors, files, noted), PublishRequest(version, anchor, background, settings, mine)

        checked, requests = self._ranks.do_and_share("check the weights", check, PublishRequest)
        require_same("publish", [request.asked for request in requests], "nothing was published")
        prints = [request.fingerprint for request in requests] if self._ranks.size > 1 else None
        share = share_of(self._ranks, checked.tensors, self._plan, prints)
        self._plan = share.plan
        check_tensors(share.plan)
        share = without_copies(self._ranks, share, self._tied)
        head_is_fresh = self._in_flight is None
        beginning, head, base = self._begin(anchor, share)
        if head is not None:
            share = share.called(None if base is None else base.plan.all_names(), head.tied)
        sequence, plan = beginning.sequence, share.plan
        number = next_version(head, sequence) if version is None else version
        if base is None:
            check_readable(plan)
        if head is not None:
            check_successor(head, base, plan, number, self.history.store.url)
        else:
            warn_of_prefix(plan.tensors)
        make_manifest = partial(
            new_manifest,
            sequence,
            number,
            tensors=plan,
            head=head,
            publisher=self._position.token,
            metadata=checked.metadata,
        )
        if head is None or base is None:
            own, encoded = copy_whole(share, self._ranks, self._kept_on)
            manifest = make_manifest(digest=encoded.digest, anchor=True, nonfinite=encoded.nonfinite)
            move = Move(Baseline(own, manifest, plan), None, None)
        else:
            application, encoded = self._encoder.encode(base, share, number, beginning.bandwidth)
            self.flush()  # the version before must be committed before this one builds on it
            anchor = anchor or sequence - head.anchor_sequence >= self._anchor_every
            manifest = make_manifest(digest=encoded.digest, anchor=anchor, nonfinite=encoded.nonfinite)
            move = self._position.move(application, encoded.replaced, manifest)
        if self._ranks.rank == 0 and manifest.nonfinite != (head.nonfinite if head else 0):
            found_odd = nonfinite_warning(manifest, encoded.spoilt) or "all weights are finite again"
            log.warning("version %d: %s", number, found_odd)
        upcoming = Upcoming(move, encoded.patch, checked.files, plan, beginning.token)
        if background:
            return self._deliver_in_background(upcoming, head_is_fresh, encoded, clock)
        try:
            delivered = self._deliver(upcoming, head_is_fresh)
        except BaseException:
            self._settle(upcoming)
            raise
        return self._conclude(upcoming, encoded, delivered, clock)

    def _keep(self, stream: Iterator[Any], cast: str | torch.dtype | None, directory: Path) -> Mapping[str, Bits]:
        """Keep the bits of a stream in a file. A collective."""

        def read() -> Mapping[str, Bits]:
            try:
                return streamed.keep(stream, self._cast if cast is None else cast_name(cast), directory / "bits")
            except OSError as error:
                raise no_room(error) from error

        return self._ranks.do("read the weights", read)

    @in_turn
    def flush(self) -> PublishReport | None:
        """Wait until the version in flight is committed.

        Returns:
            Its full report; None if no version is in flight.

        Raises:
            IntegrityError: As `publish`. The version is not published, and the next one starts from the one before.
            StoreError: Likewise.
        """
        flight = self._in_flight
        if flight is None:
            return None
        error = flight.future.exception()  # waits; if that is interrupted, the version stays in flight
        self._in_flight = None
        if error is not None:
            self._settle(flight.upcoming)
            raise error
        return self._conclude(flight.upcoming, flight.encoded, flight.future.result(), flight.clock)

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
            self._await_pool()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, anchor: bool, share: Share | None) -> tuple[Beginning, Manifest | None, Baseline | None]:
        """Where the next version goes, the version before it, and the baseline that it is encoded against.

        share: what this rank holds; None to find out where the history ends.
        """
        bandwidth = self._bandwidth or self._delivery.measured_bandwidth
        if self._in_flight is not None:  # alone: ranks of a group wait for a version in flight
            upcoming = self._in_flight.upcoming
            return self._position.after(upcoming.manifest, bandwidth), upcoming.manifest, upcoming.move.baseline
        if self._position.baseline is None:
            self._await_pool()
        return self._position.begin(anchor, share, bandwidth, self._delivery.resume)

    def _settle(self, upcoming: Upcoming) -> None:
        """Bring the state in line after a delivery that raised: the version stands, or the move is undone."""
        committed = self._delivery.committed
        if committed is not None and committed.sequence == upcoming.manifest.sequence:
            self._position.record(upcoming.move.baseline, committed)
        else:
            self._position.baseline = upcoming.move.undo()

    def _conclude(self, upcoming: Upcoming, encoded: Encoded, delivered: Delivered, clock: Clock) -> PublishReport:
        """Record that a version is committed, and report it."""
        self._position.record(upcoming.move.baseline, delivered.manifest)
        report = publish_report(delivered.manifest, encoded, delivered, clock)
        tell(self, report)
        return report

    def _deliver(self, upcoming: Upcoming, head_is_fresh: bool) -> Delivered:
        """Put and commit a version. head_is_fresh: whether this call has looked where the history ends.

        If not, as a version was in flight, the history may have been rolled back: then no patch can start from its end.
        """
        base = upcoming.move.base
        if base is not None and not head_is_fresh and self._ranks.size == 1 and not holds(self.history.store, base):
            raise self._position.changed(base, self.history.end()[1])
        return self._delivery.deliver(upcoming)

    def _deliver_in_background(
        self, upcoming: Upcoming, head_is_fresh: bool, encoded: Encoded, clock: Clock
    ) -> PublishReport:
        def deliver() -> Delivered:
            try:
                with self._ranks.collective():
                    return self._deliver(upcoming, head_is_fresh)
            except Exception as error:
                # Perhaps nobody asks for the result any more.
                log.error("version %d could not be published: %s", upcoming.manifest.version, error)
                raise

        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pulse-publish")
        future = self._pool.submit(deliver)
        self._in_flight = _InFlight(future, upcoming, encoded, clock)
        self._pool.shutdown(wait=False)  # its thread ends with this version
        return publish_report(upcoming.manifest, encoded, None, clock)

    def _await_pool(self) -> None:
        """Wait for a version that is put although it is not in flight, as the call that began it was interrupted."""
        if self._pool is not None:
            self._pool.shutdown()


class _Checked(NamedTuple):
    """What is to be published, as one rank has it."""

    tensors: Layout
    files: dict[str, bytes]  # to put with an anchor
    metadata: dict[str, Scalar] | None


class _InFlight(NamedTuple):
    """A version that is put in the background."""

    future: Future[Delivered]
    upcoming: Upcoming
    encoded: Encoded
    clock: Clock
