"""The rollout workers' side: bring live weights to a version of a history, proved, by the route with the fewest bytes.

Each call views the weights and has the `Proof` look whether they hold what they should; then a `Sync` takes them to the
version. Here are the calls, their heartbeats and what they keep from one to the next; finding and reading the objects
is the history's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pulse_rl.dtypes import torch_name
from pulse_rl.errors import IntegrityError, VersionNotFoundError, one_line, require
from pulse_rl.group.collectives import Wording
from pulse_rl.group.ranks import Ranks, collective
from pulse_rl.history.anchor_share import tensors_of
from pulse_rl.history.heartbeat import MAX_ERROR, Heart, Heartbeat
from pulse_rl.history.history import History
from pulse_rl.history.reading import Reading
from pulse_rl.observers import tell
from pulse_rl.store.base import Store
from pulse_rl.store.patient import PATIENCE_S
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.sync.subscribe.landings import Keeping, Writing
from pulse_rl.sync.subscribe.polling import LONGEST_POLL_S, POLL_S, wait
from pulse_rl.sync.subscribe.proof import Proof
from pulse_rl.sync.subscribe.staging import Staged
from pulse_rl.sync.subscribe.sync import Sync, SyncReport
from pulse_rl.sync.turn import ThreadTurn, in_turn
from pulse_rl.units import check_seconds
from pulse_rl.weights.kept import Kept
from pulse_rl.weights.layout import TensorSpec
from pulse_rl.weights.memory import LiveWeights, Memory

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pulse_rl.log.signing import PublicKey


WORDING = Wording(
    failed="the exchange between subscribing ranks failed: a rank or the network is lost, or the ranks did not make "
    "the same calls",
    advice="if a rank is lost, make a new process group and a new Subscriber on all ranks: its first sync repairs the "
    "weights in place",
    in_step="when the cause is gone, the same call may be made again on all ranks",
)


class Subscriber:
    """Follows one history with one model's live weights.

    One subscriber belongs to one set of weights: it keeps their proved version and digest from sync to sync, and reads
    only what changed. Weights in other memory, or that torch has written to since, are recognised anew by a recount.
    Any number of subscribers may follow one history; they write nothing to it but heartbeats. One is used by one thread
    at a time: a second call meanwhile gets a RuntimeError, and a process that was forked after the first one a
    StoreError.

    Memory: the patch that is applied and the one after it, and a few MB a thread.

    Args:
        store: A Store, or the URL or path of one.
        overwrite: Whether weights that hold no version of the history are overwritten by one. False where they are
            views whose map has to be proved first, as an engine's: then `sync` and `stage` raise BaseMismatchError
            instead, until a digest has shown that this memory holds a version. From then on it is repaired as usual.
        verify_live: Whether to recount every live bit before a sync: True, before each; a number N, before every N-th;
            False, never (then only `verify` does). Weights that something else wrote to are overwritten by the version
            synced to, and the report's `recovered` says so. A recount reads all weights once, those on a device
            through the host.
        public_key: An Ed25519 public key, or the path of its PEM file: a history that it did not sign, or that was
            altered, is refused. Needs the extra `sign`. None: signatures are not looked at. Of ranks the first one's
            counts, which checks for all.
        heartbeat: An id for this subscriber, of at most 64 letters, digits and `. _ -`. After each sync, failed ones
            too, it then writes to the store what it holds and what went wrong, for `pulse-rl status`: in the
            background, at once if that is news, every 15 s otherwise. A heartbeat that cannot be written is a logged
            warning, once for each cause. None: no heartbeat.
        patience: Seconds for which a failure of the store that may pass (a timeout, a connection that is refused or
            lost, an error of the server) is tried again before it is raised. 0: at once. `wait` has its own timeout.
        poll: The first interval of `wait` between two looks, in seconds. It grows to 5 % of the time waited.
        poll_max: The longest such interval, in seconds.
        group: A torch.distributed process group whose ranks hold shares of one model, or replicas of it; "world" for
            all ranks. Then making the Subscriber, `sync`, `stage`, `Staged.apply` and `verify` are collective: every
            rank calls them, with its own weights. Rank 0 finds the version, each rank reads and decodes what its share
            needs, and either all ranks write or none. "world" is looked up in the first call, so a Subscriber may be
            made before `init_process_group`. By default one process alone.
        group_timeout: Seconds that a rank waits for another one before it raises ExchangeError; half an hour by
            default.
        view: The view to follow, as "fp8" of `Publisher(views={"fp8": …})`: its weights have the codes and scales of
            that view. None: the weights as they were published.

    Raises:
        ValueError: A setting makes no sense.
        ExchangeError: The group is not one, or a rank is lost.

    Attributes:
        history: The history that it follows.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        overwrite: bool = True,
        verify_live: bool | int = False,
        public_key: PublicKey | None = None,
        heartbeat: str | None = None,
        patience: float = PATIENCE_S,
        poll: float = POLL_S,
        poll_max: float = LONGEST_POLL_S,
        group: dist.ProcessGroup | Literal["world"] | None = None,
        group_timeout: float | None = None,
        view: str | None = None,
    ) -> None:
        self._ranks = Ranks.of(group, WORDING, group_timeout)

        def make() -> tuple[History, Heart | None]:
            if not isinstance(verify_live, int) or verify_live < 0:
                raise ValueError(f"verify_live: expected True, False or a number of syncs, found {verify_live}")
            check_seconds("poll", poll, zero=False)
            check_seconds("poll_max", poll_max, zero=False)
            history = History(store, public_key=public_key, patience=patience, view=view)
            return history, None if heartbeat is None else Heart(history.store, heartbeat)

        with self._ranks.collective():
            history, self._heart = self._ranks.make("make a subscriber", make)
            self.history = history
            self._poll, self._poll_max = poll, poll_max
            self._kept = Kept()
            self._proof = Proof(self._ranks, int(verify_live), overwrite)
            self._turn = ThreadTurn("Subscriber", nested=False)

    @property
    def version(self) -> int | None:
        """The version that the weights are proved to hold; None before the first sync and after a failed write."""
        held = self._proof.held
        return held.version if held else None

    @property
    def heartbeat(self) -> str | None:
        """The id of its heartbeat; None for no heartbeat."""
        return self._heart.id if self._heart else None

    @property
    def overwrite(self) -> bool:
        """Whether weights that hold no version are overwritten. May be set, once something else has proved them."""
        return self._proof.overwrite

    @overwrite.setter
    def overwrite(self, overwrite: bool) -> None:
        self._proof.overwrite = overwrite

    @property
    def digest(self) -> str | None:
        """The digest of that version, 16 hex digits; None without one."""
        held = self._proof.held
        return held.digest if held else None

    def latest(self) -> int | None:
        """Look up the newest version in the history. With a heartbeat, this says that the subscriber is alive.

        Returns:
            That version; None for an empty history.

        Raises:
            StoreError: The store failed.
            IntegrityError: The newest manifest is damaged, or is not signed by the public key; or the history was begun
                anew, and its newest version has the number of the one that is held, and other weights.
        """
        head, held = self.history.head(polling=True), self._proof.held
        if self._heart is not None and self._ranks.rank == 0 and not self._heart.repeat():
            self._heart.beat(Heartbeat(self._heart.id, None, None, None, None, 0.0, None))
        if head is None:
            return None
        if held is not None and held.version == head.version and held.digest != head.digest:
            # Whoever compares numbers would find nothing new. With any other number the next sync says what is wrong.
            raise IntegrityError(
                f"{self.history.store.url} holds another version {head.version} than before: expected the digest "
                f"{held.digest}, found {head.digest}; if that is intended, follow it with a new Subscriber",
                expected=held.digest,
                found=head.digest,
            )
        return head.version

    def tensors(self) -> dict[str, TensorSpec]:
        """Look up which tensors the newest version has, without downloading it. `allocate` makes memory for them.

        Reads the headers of an anchor's files, a few KB; of a pruned one, the newest patch.

        Returns:
            Name → dtype and shape, sorted by name. Tied tensors appear once, under the first name.

        Raises:
            VersionNotFoundError: The history is empty.
            IntegrityError: It is damaged.
            StoreError: The store failed.
        """
        return tensors_of(self.history, self.history.newest(polling=True))

    def allocate(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Make memory for the newest version: `subscriber.sync(weights := subscriber.allocate())` loads it.

        Args:
            device: Where to make it.

        Returns:
            Name → a tensor of zeros in the published dtype and shape, sorted by name. Further names of a tied tensor
            come last, and are the same object.

        Raises:
            VersionNotFoundError: The history is empty.
            IntegrityError: It is damaged.
            StoreError: The store failed.
            MissingExtraError: torch is not installed.
        """
        torch = require("torch", "torch")
        head = self.history.newest(polling=True)
        made = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, torch_name(spec.dtype)), device=device)
            for name, spec in tensors_of(self.history, head).items()
        }
        return made | {alias: made[name] for alias, name in sorted(head.tied.items())}

    @property
    def ended(self) -> bool:
        """Whether the run has ended: its trainer called `Publisher.end` after the newest version. Asks the store.

        Raises:
            StoreError: The store failed.
            IntegrityError: The newest manifest is damaged, or is not signed by the public key.
        """
        return self.history.ended()

    def wait(self, version: int, timeout: float) -> int:
        """Wait until the history holds this version or a newer one. Does not sync.

        Args:
            version: The version to wait for.
            timeout: Seconds; 0 looks once. A store that is out of reach is asked again until then; a request that it
                accepts and does not answer may take two minutes longer.

        Returns:
            The newest version.

        Raises:
            TimeoutError: The history does not hold the version in time, or the store was out of reach.
            VersionNotFoundError: The run has ended before that version, as `ended` says. Raised after a
                second, or of a run that ends during the wait within 15.
            StoreError: The store failed for a reason that does not pass.
            IntegrityError: As `latest`.
            ValueError: The version is not a whole number, the timeout is not a number, or one of them is negative.
        """
        return wait(self.latest, self.history, version, timeout, (self._poll, self._poll_max))

    @in_turn
    @collective
    def sync(self, weights: Any, *, version: int | None = None) -> SyncReport:
        """Bring the weights to the newest version, or to the one given, in place, by the route with the fewest bytes.

        On a first sync, weights that already hold a version of the history (as after loading an anchor) are recognised
        by their digest, and patched from there.

        What is proved: every element that a patch writes; and all elements by the digest that is kept from version to
        version, for the memory that it was proved of. If these are other weights, or in other memory, or torch has
        written to them since, all bits are recounted first. Writes through NumPy, through `tensor.data` or by another
        process are not noticed: `verify_live` and `verify` find them. A backward pass whose forward pass came before
        the sync raises torch's error.

        After any error the weights hold a version of the history, bit for bit, and `version` says which; if they were
        never synced, they are as they were. Where they were found altered, or a write failed, `version` is None until
        a later sync has repaired them.

        Args:
            weights: A torch module, a state dict or a mapping of name → tensor or array, with the published tensors.
                They keep their memory and device, and tied tensors are written once. A module or mapping that gives
                copies at each access (FSDP1, an .npz file) is refused.
            version: The version to sync to. None: the newest.

        Returns:
            What was done, and what it took.

        Raises:
            VersionNotFoundError: The history is empty, or does not hold that version.
            BaseMismatchError: The tensors are those of another model, or hold no version and `overwrite` is False.
            IntegrityError: The history is damaged, and no other route leads to the version; or it has gone back behind
                a version that this subscriber has held, or is another history than before.
            StoreError: The store failed.
            VersionSkewError: The version is of a newer format than this release knows: upgrade it.
            ValueError: A tensor cannot be written, or the version is negative or not a whole number.
            TypeError: Something is not a tensor, or is a copy.
            RuntimeError: Another thread is using this subscriber.
        """
        with self._failures() as start:
            reading, view = Reading(self.history, self._ranks), partial(LiveWeights, weights, self._kept)
            live = self._proof.begin(view, "sync", version, reading.effort)
            sync = Sync(reading, live, self._proof, Writing(reading, live, self._proof)).run(version)
            return self._report(sync, live, start)

    @in_turn
    @collective
    def stage(self, weights: Any, *, version: int | None = None) -> Staged:
        """Fetch, decode and prove the newest version, or the one given, without touching a weight.

        Run it in a thread while generation goes on: it only reads the weights. Then pause generation, and
        `Staged.apply` writes them in a moment. Nothing but this subscriber may write to the weights in between.

        The route is the one that `sync` would take. Of several patches each is proved against the weights as those
        before it will leave them; where patches do not lead to the version, it is restored in temporary files.

        Args:
            weights: As in `sync`.
            version: The version to stage. None: the newest.

        Returns:
            The staged version. What it holds is freed when it is applied, discarded or obsolete.

        Raises:
            PulseError: As `sync`. The weights are as they were.
            RuntimeError: Another thread is using this subscriber.
        """
        with self._failures(), ExitStack() as undo:
            reading, view = Reading(self.history, self._ranks), partial(LiveWeights, weights, self._kept)
            live = self._proof.begin(view, "stage", version, reading.effort)
            memory, keeping = Memory(live.live, live.live.writes), Keeping(reading, live)
            undo.callback(keeping.discard)
            sync = Sync(reading, live, self._proof, keeping).run(version)
            keeping.settle()
            undo.pop_all()
            return Staged(self._apply, view, memory, self._proof.held, keeping, sync)

    @in_turn
    @collective
    def _apply(self, staged: Staged) -> SyncReport:
        """See `Staged.apply`."""
        before = self._proof.held
        with self._failures() as start, ExitStack() as after:
            after.callback(staged.discard)
            live = self._proof.resume(staged._view, f"apply version {staged.version}")
            keeping, sync = staged._held()
            try:
                keeping.write(Writing(sync.reading, live, self._proof))
                keeping.hand_over_halo(live)
            finally:
                self._proof.remember(live, before)
            return self._report(sync, live, start)

    @in_turn
    @collective
    def verify(self, weights: Any) -> str:
        """Recount the digest of all live weights: one read of every bit.

        Args:
            weights: As in `sync`.

        Returns:
            The digest, 16 hex digits, which is that of `version`.

        Raises:
            IntegrityError: The weights no longer hold `version`: something else wrote to them. Then `version` is None,
                and the next `sync` repairs them.
            VersionNotFoundError: The weights have not been synced yet.
            TypeError: As in `sync`.
            RuntimeError: As in `sync`.
        """
        live = self._proof.view(partial(LiveWeights, weights, self._kept), "verify", None)
        if live.altered is not None:
            raise IntegrityError(live.altered)
        if self._proof.held is None:
            raise VersionNotFoundError("no version to verify: sync the weights first", url=self.history.store.url)
        return self._proof.verify(self._proof.held, live)

    def _beat(self, error: Exception | None, report: SyncReport | None, start: float) -> None:
        """Send the heartbeat after a sync, of ranks the first one's."""
        if self._heart is None or self._ranks.rank:
            return
        held = self._proof.held
        self._heart.beat(
            Heartbeat(
                id=self._heart.id,
                version=held.version if held else None,
                sequence=held.sequence if held else None,
                lag=max(0, self._proof.aimed - held.sequence) if held else None,
                error=one_line(error, MAX_ERROR) if error else None,
                sync_s=time.perf_counter() - start,
                fetched_nbytes=report.fetched_nbytes if report else None,
            )
        )

    @contextmanager
    def _failures(self) -> Iterator[float]:
        """Send a heartbeat if the block fails. Yields `time.perf_counter()` as it begins."""
        start = time.perf_counter()
        try:
            yield start
        except Exception as error:
            self._beat(error, None, start)
            raise

    def _report(self, sync: Sync, live: HeldWeights, start: float) -> SyncReport:
        report = sync.report(live, start)
        self._beat(None, report, start)
        tell(self, report)
        return report
