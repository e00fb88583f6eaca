"""One sync: it finds the version, takes live weights there by the route with the fewest bytes, and reports.

Patches come first, each proved before anything is written; where they do not lead to the version, or would take more
bytes than its anchor, it is restored in files. Objects that are missing or damaged are avoided, and the report says
which. What was proved is written at once, or, by `stage`, kept until `Staged.apply` (`landings`). So the weights hold
a version whenever a call returns or raises, but where a write itself failed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeAlias

from pulse_rl.errors import (
    BaseMismatchError,
    FormatError,
    IntegrityError,
    PulseError,
    StoreError,
)
from pulse_rl.history.anchor_share import names_where_ties_differ
from pulse_rl.history.follow import follow
from pulse_rl.history.manifest import Manifest, Scalar, check_same_history
from pulse_rl.history.reading import Reading
from pulse_rl.history.restore import Wanted, add_recovery_hint, restore, scratch
from pulse_rl.history.search import agree_on_chain, check_line
from pulse_rl.history.trail import State, state_of
from pulse_rl.history.versions import no_version
from pulse_rl.observers import tell
from pulse_rl.sync.subscribe.held import HeldWeights
from pulse_rl.sync.subscribe.landings import Keeping, ShareLanding, Writing
from pulse_rl.sync.subscribe.loading import Restored
from pulse_rl.sync.subscribe.proof import Proof, recognise, unequal
from pulse_rl.weights.layout import in_store

Route: TypeAlias = Literal["none", "patches", "anchor"]  # nothing to do; patches only; from an anchor


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: The version that the weights hold now, proved.
        previous: The version that they held before; None if it was not known, or if they had been altered.
        digest: The digest of the version, 16 hex digits.
        route: "none" if there was nothing to do, "patches" if patches were applied to the weights, "anchor" if a full
            checkpoint was loaded.
        patches: How many patches were applied, also to the anchor; a skip patch counts as one.
        changes: Elements that these patches overwrote.
        density: changes / elements of the model.
        full_nbytes: Bytes of the whole model's bits.
        fetched_nbytes: Bytes of the patches and the anchor that were read; of ranks that hold shares, by this one.
        halo_nbytes: Memory that a rank keeps for strips of other ranks' weights: to decode tiles that it holds in part.
        reduction: full_nbytes / fetched_nbytes; infinite if nothing was fetched.
        recovered: What was wrong with the weights or the history, and was repaired or avoided; None if nothing was.
        fetch_s: Seconds spent waiting for the store.
        decode_s: Seconds of decoding patches, summed over threads.
        apply_s: Seconds of writing to the weights.
        prove_s: Seconds of proving, summed over threads.
        total_s: Seconds of the call that returned this report: all of a `sync`; of a version that was staged only
            `apply`, while the fields above count its staging too.
        metadata: What the trainer noted of the version; None for nothing.
    """

    version: int
    previous: int | None
    digest: str
    route: Route
    patches: int
    changes: int
    density: float
    full_nbytes: int
    fetched_nbytes: int
    halo_nbytes: int
    reduction: float
    recovered: str | None
    fetch_s: float
    decode_s: float
    apply_s: float
    prove_s: float
    total_s: float
    metadata: Mapping[str, Scalar] | None


class Sync:
    """One call of a subscriber that takes live weights to a version. Its methods are collective.

    proof: what the weights hold; if it is not known, they are recognised. landing: what becomes of what is proved.
    """

    target: Manifest  # from `run` on, as `route`
    route: Route

    def __init__(self, reading: Reading, live: HeldWeights, proof: Proof, landing: Writing | Keeping) -> None:
        self.reading, self._live, self._proof, self._landing = reading, live, proof, landing
        self.previous = proof.held.version if proof.held else None  # the version that the weights held before

    def run(self, version: int | None) -> Self:
        """Take the weights to a version, or to the newest for None. Raises as `Subscriber.sync`."""
        reading, live, proof = self.reading, self._live, self._proof
        before = proof.held
        try:
            self.target = reading.lead("find the version", partial(self._find, version), Manifest)
            proof.aimed = max(proof.aimed, self.target.sequence)
            tell(reading.history, self.target)
            restored = self._take()
        except PulseError as error:
            before_that = [one for one in (live.altered, *reading.faults.messages) if one and one not in str(error)]
            if before_that:
                error.add_note(f"before that: {'; '.join(before_that)}")
            reading.history.forget()
            raise
        finally:
            proof.remember(live, before)
        self.route = "anchor" if restored else "patches" if reading.effort.patches else "none"
        return self

    def report(self, live: HeldWeights, start: float) -> SyncReport:
        """The report, once the weights hold the version.

        live: the weights that it was written to. start: `time.perf_counter()` when the call began.
        """
        target, effort = self.target, self.reading.effort
        self._proof.reached = target
        return SyncReport(
            version=target.version,
            previous=self.previous,
            digest=target.digest,
            route=self.route,
            patches=effort.patches,
            changes=effort.changes,
            density=effort.changes / target.elements if target.elements else 0.0,
            full_nbytes=target.full_nbytes,
            fetched_nbytes=effort.nbytes,
            halo_nbytes=live.halo_nbytes,
            reduction=target.full_nbytes / effort.nbytes if effort.nbytes else float("inf"),
            recovered="; ".join(filter(None, [self._live.altered, *self.reading.faults.messages])) or None,
            fetch_s=effort.fetch_s,
            decode_s=effort.decode_s,
            apply_s=effort.apply_s,
            prove_s=effort.prove_s,
            total_s=time.perf_counter() - start,
            metadata=target.metadata,
        )

    def _find(self, version: int | None) -> Manifest:
        """The version to go to: of the same history as the last sync, and none that this subscriber is ahead of."""
        history, reached = self.reading.history, self._proof.reached
        target = history.find(version) if version is not None else self._find_newest()
        if reached is None:  # nothing tells which history it should be, but a version swapped in is noticed
            check_line(history, target, self.reading.faults)
        else:
            try:
                check_same_history(target, reached)
            except IntegrityError as error:
                error.add_note("if that is intended, follow it with a new Subscriber")
                raise
        if version is None:
            self._check_not_older(target)
        return target

    def _find_newest(self) -> Manifest:
        history, highest = self.reading.history, self._proof.highest
        with add_recovery_hint():
            head = history.head()
        if head is None and highest is not None:
            raise IntegrityError(
                f"{history.store.url} has gone back: this Subscriber has held version {highest.version}, and it holds "
                "no version any more; if that is intended, follow what comes next with a new Subscriber",
                expected=highest.digest,
            )
        if head is None:
            raise no_version(history.store)
        return head

    def _check_not_older(self, head: Manifest) -> None:
        """Raise IntegrityError if the newest version is none that follows the newest one that was ever held."""
        highest, url = self._proof.highest, self.reading.history.store.url
        if highest is not None and highest != state_of(head) and highest.sequence >= head.sequence:
            # At the same place in the history lies another version: nothing is missing there.
            changed = "holds other versions than before" if highest.sequence == head.sequence else "has gone back"
            raise IntegrityError(
                f"{url} {changed}: this Subscriber has held version {highest.version} (digest {highest.digest}), its "
                f"newest is {head.version} ({head.digest}); if that is intended, follow it with a new Subscriber",
                expected=highest.digest,
                found=head.digest,
            )

    @add_recovery_hint()
    def _take(self) -> bool:
        """Take the weights to the version. Returns whether it had to be restored, as patches did not lead there.

        Raises BaseMismatchError for weights that hold no version, where the proof says that these are not overwritten.
        """
        proof, target = self._proof, self.target
        if proof.held is None:
            self._recognise()
        held = proof.held
        # Tied tensors are counted once, so a proof holds only as long as the same names are tied.
        if held is not None and proof.tied == target.tied:
            if held.sequence < target.sequence:
                self._live.tie(target.tied)
                held = self._patch(held)
            if held == state_of(target):
                return False
        proof.check_overwrite()
        self._restore()
        return True

    def _recognise(self) -> None:
        """Find which version the weights hold, if any."""
        try:
            names = names_where_ties_differ(self.reading, self.target, self._live.agreed.plan.tied)
            self._proof.known = self._live.known = names
        except (FormatError, IntegrityError, StoreError) as error:  # perhaps the weights and the version tie the same
            self.reading.faults.note(str(error))
        self._proof.hold(recognise(self.reading, self._live, self.target), self.target.tied)

    def _patch(self, held: State) -> State | None:
        """Take the weights towards the version by patches, unless a newer anchor is the cheaper beginning.

        Returns how far they led; None if these are not the weights that were proved before.
        """
        reading, target = self.reading, self.target
        chain = agree_on_chain(reading, held, target, target.full_nbytes)
        if chain is None:
            return held
        try:
            return follow(self._landing, held, target, sure=False, chain=chain)
        except BaseMismatchError as error:  # the patch is of other tensors: the weights hold what they held
            reading.faults.note(str(error))
            return self._proof.held
        except IntegrityError as error:  # these are not the bits that were proved: what they hold is not known
            self._proof.hold(None)
            differing = unequal(reading.ranks, self._live, target.tied)
            reading.faults.note(f"{error}; {differing}" if differing else str(error))
            return None

    def _restore(self) -> None:
        """Restore the version in files, and load it."""
        reading, live, target = self.reading, self._live, self.target
        live.tie(target.tied)
        if live.shared:
            self._refuse_ties()
        with ExitStack() as files:
            room = partial(files.enter_context, scratch())
            directory = reading.ranks.do("make room for the version", room, alike=True)
            sides = in_store(target.version, reading.history.store.url)
            share, nbytes = None, live.share.held.nbytes  # of one process that holds all of it
            if live.shared:
                landing = partial(ShareLanding, reading, share=live)
                share, nbytes = Wanted(live.wanted(), live.tensors, landing, sides), live.plan.nbytes
            proved = restore(reading, target, directory, nbytes, share)
            fitting = partial(Restored, target, proved, live, directory, sides)
            self._landing.load(reading.ranks.do("compare the weights", fitting, alike=True), files.pop_all())

    def _refuse_ties(self) -> None:
        """Raise BaseMismatchError where weights that ranks share tie what the version holds as several tensors."""
        names, url = self._live.known or (), self.reading.history.store.url
        for alias, owner in self._live.plan.tied.items():
            if alias in names and alias not in self.target.tied:
                raise BaseMismatchError(
                    f"tensor {alias!r} is tied to {owner!r} in these weights, and version {self.target.version} of "
                    f"{url} holds two tensors: where ranks or shards share the weights, expected two tensors here too, "
                    f"or Publisher(…, tied={{{alias!r}: {owner!r}}}) on the trainer's side"
                )
