"""A new version as a patch against the baseline: found, coded, decoded again and proved, by the codec that is chosen.

Each rank finds and codes what it owns. What the digest gains is added up over the ranks, so each part of the patch
names the digests of the whole weights. A version without a patch is copied. Nothing is written here, neither to the
baseline nor to a store.

Only `find` reads the weights. Between it and `code`, which may run in the background, the base must not change.
"""

import operator
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from pulse_rl.codecs.choose import Chooser, Trial
from pulse_rl.group.ranks import Ranks
from pulse_rl.history.anchor import check_digest
from pulse_rl.history.trail import State
from pulse_rl.logs import logger
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.encode import Coded, EncodedPatch, FoundChanges, find
from pulse_rl.patch.live import Live, each_alone
from pulse_rl.patch.overlay import Older, Overlay, Recorder
from pulse_rl.patch.since import Known
from pulse_rl.sync.publish.baseline import KeptOn, clone
from pulse_rl.sync.publish.successor import check_parts
from pulse_rl.sync.replicas import replica_digests, unequal_replicas
from pulse_rl.sync.shares import Share
from pulse_rl.weights import digests, finite
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.changes import SectionChanges
from pulse_rl.weights.layout import Layout, derived

log = logger(__name__)

_NOT_COLLECTED = "the weights differ from the version before in elements that were not collected"
_NEXT_SENDS_ALL = ": something other than the optimizer's cast has written to them; the next send sends all bits"


class Base(NamedTuple):
    """What changes are found against."""

    tensors: Mapping[str, Bits]  # what this rank owns of it
    state: State
    codec: str | None = None  # of the patch that leads to it, which another process may have made


class Uncoded(NamedTuple):
    """What a patch will hold."""

    base: Base
    version: int  # that the patch leads to
    mine: FoundChanges  # of what this rank owns
    gained: int  # what the digest gains over all ranks
    density: float  # changes of all ranks for each element


class NewVersion(NamedTuple):
    """A version that is found, or copied. Seconds of cast and diff are summed over threads."""

    digest: str
    changes: int  # of all parts together
    nonfinite: int  # how many more elements of all parts are NaN or infinite than before
    spoilt: str  # a tensor in which some have become so; empty for none
    cast_s: float
    copy: Layout | None = None  # of what this rank owns, where there is no patch
    uncoded: Uncoded | None = None
    replaced: Overlay | None = None  # what the patch overwrites in the base; None if that is not kept, or too much


class Encoded(NamedTuple):
    """A patch that is coded and proved."""

    patch: EncodedPatch  # this rank's part
    application: Application  # writes that part into the baseline
    codec_reason: str
    prove_s: float  # of every codec that was tried


class _Found(msgspec.Struct, array_like=True):
    """What one rank found."""

    base: int  # the digest of its baseline, mod 2^64; 0 where it was not counted
    delta: int  # what the digest gains, mod 2^64
    changes: int
    replicas: dict[str, int]  # as `Share.replicas`
    nonfinite: int
    spoilt: str  # as in `Encoded`


class Encoder:
    """Encodes the versions of one model, and remembers what each codec took.

    codec: the name of one, or "auto". Raises ValueError for an unknown name.
    """

    def __init__(self, codec: str, ranks: Ranks) -> None:
        self._chooser = Chooser(codec)
        self._ranks = ranks
        self._auto = codec == "auto"
        self._taken: str | None = None  # the codec of the version before

    def find(
        self,
        base: Base,
        share: Share,
        version: int,
        bandwidth: float | None,
        *,
        keep_nbytes: float = 0,
        hold_nbytes: float = 0,
        count: bool = False,
        known: Sequence[SectionChanges] | None = None,
    ) -> NewVersion:
        """Find the changes since the base. A collective.

        bandwidth: bits per second of the link that the codec is chosen for; None if it is not known. keep_nbytes: up to
        which what the changes overwrite is kept. hold_nbytes: up to which they are held for `code`. count: whether to
        count the base, which may hold other bits. known: of some sections, all elements that may have changed, as they
        are in the base; None if nothing is known. Raises IntegrityError for other bits, and ExchangeError if replicas
        differ.
        """
        ranks, before = self._ranks, int(base.state.digest, 16)
        codecs = self._chooser.codecs(bandwidth, self._taken or base.codec)

        def find_mine() -> tuple[tuple[FoundChanges, Overlay | None], _Found]:
            with Recorder(keep_nbytes) as recorder:
                mine = find(
                    base.tensors,
                    share.own,
                    codecs=codecs,
                    digest_old=count,
                    tied=share.plan.tied,
                    recorder=recorder,
                    scan=None if known is None else Known(base.tensors, share.own, known),
                    hold_nbytes=hold_nbytes,
                )
                replaced = _overlay(recorder, version)
            replicas = replica_digests(share, ranks.rank)
            said = _Found(mine.base, mine.delta, mine.changes, replicas, mine.nonfinite, mine.spoilt)
            return (mine, replaced), said

        def find_all() -> NewVersion:
            (mine, replaced), found = ranks.do_and_share("find changes", find_mine, _Found)
            _require_equal_replicas(ranks, share, found)
            if count:
                check_digest(_NOT_COLLECTED, base.state.digest, sum(one.base for one in found), _NEXT_SENDS_ALL)
            gained, changes = (sum(getattr(one, name) for one in found) for name in ("delta", "changes"))
            return NewVersion(
                digests.to_hex(before + gained),
                changes,
                sum(one.nonfinite for one in found),
                _spoilt(found),
                mine.read_s,
                uncoded=Uncoded(base, version, mine, gained, changes / max(1, share.plan.elements)),
                replaced=replaced,
            )

        new = find_all()
        if len(codecs) > 1 and self._chooser.untried and new.uncoded is not None:
            self._candidates(new.uncoded)  # the first time may compile kernels, which says nothing about a codec
            new = find_all()
        return new

    def code(self, uncoded: Uncoded, bandwidth: float | None) -> Encoded:
        """Code what was found, and prove that the patch leads from the base to the new version. A collective.

        To be called once. bandwidth: as in `find`. Raises IntegrityError if the patch does not lead there.
        """
        candidates = self._candidates(uncoded)
        chosen = self._chooser.choose(list(candidates), uncoded.density, bandwidth)
        if self._auto and chosen.codec != self._taken and self._ranks.rank == 0:
            log.info("version %d: codec %s from here on: %s", uncoded.version, chosen.codec, self._chooser.reason)
        self._taken = chosen.codec
        prove_s = sum(trial.decode_s for trial in candidates)  # decoding and proving
        return Encoded(*candidates[chosen], self._chooser.reason, prove_s)

    def _candidates(self, uncoded: Uncoded) -> dict[Trial, tuple[EncodedPatch, Application]]:
        """The patch by each codec that is worth a try."""
        ranks, (base, version, mine, gained, _) = self._ranks, uncoded

        def prove_mine() -> tuple[list[tuple[EncodedPatch, Application]], list[Trial]]:
            live = derived(base.tensors, each_alone)
            parts, trials = [], []
            for coded in mine.code():
                start = time.perf_counter()
                patch, application = prove_part(coded, base.state, version, gained, ranks, live)
                parts.append((patch, application))
                trials.append(Trial(coded.codec, len(patch.data), coded.encode_s, time.perf_counter() - start))
            return parts, trials

        parts, tried = ranks.do_and_share("prove a patch", prove_mine, list[Trial])
        return dict(zip([_together(trials) for trials in zip(*tried, strict=True)], parts, strict=True))


def prove_part(
    coded: Coded, base: State, version: int, gained: int, ranks: Ranks, live: Live, before: Older | None = None
) -> tuple[EncodedPatch, Application]:
    """This rank's part of a coded patch, proved to lead from the base to a version, and what writes it.

    gained: what the digest gains over all ranks. live, before: as of `Application`. Raises IntegrityError if the patch
    does not lead there.
    """
    digest = int(base.digest, 16)
    patch = coded.finish(
        base=base.version,
        target=version,
        base_digest=digest,
        target_digest=digest + gained,
        part=ranks.rank,
        parts=ranks.size,
    )
    application = Application(patch_format.unpack(patch.data), live, before=before)
    application.prove(digest, partial(operator.add, gained - coded.found.delta))
    return patch, application


def copy_whole(share: Share, ranks: Ranks, kept_on: KeptOn | None) -> NewVersion:
    """A version as a copy of what each rank owns. A collective.

    kept_on: where the copy is kept; None for none, so that the weights stand for it. Raises ExchangeError if replicas
    differ, ValueError as `check_parts`.
    """
    start = time.perf_counter()

    def copy_mine() -> tuple[Layout, _Found]:
        check_parts(share)
        copy = share.own if kept_on is None else clone(share.own, share.own, kept_on)
        counts = finite.count(copy)
        digest, spoilt = digests.state_digest(copy), next(iter(counts), "")
        return copy, _Found(0, digest, 0, replica_digests(share, ranks.rank), sum(counts.values()), spoilt)

    copy, found = ranks.do_and_share("copy the weights", copy_mine, _Found)
    _require_equal_replicas(ranks, share, found)
    digest, nonfinite = digests.to_hex(sum(one.delta for one in found)), sum(one.nonfinite for one in found)
    return NewVersion(digest, 0, nonfinite, _spoilt(found), time.perf_counter() - start, copy)


def _require_equal_replicas(ranks: Ranks, share: Share, found: Sequence[_Found]) -> None:
    error = unequal_replicas(ranks, share, [one.replicas for one in found])
    if error is not None:
        raise error


def _overlay(recorder: Recorder, version: int) -> Overlay | None:
    """What a version overwrites; None where it is too much, or cannot be kept."""
    try:
        return recorder.overlay()
    except OSError as error:
        log.warning("version %d: no skip patches, temporary files failed: %s", version, error)
        return None


def _together(trials: tuple[Trial, ...]) -> Trial:
    """One codec's measurements on all parts: their bytes together, and the time of the slowest rank."""
    nbytes = sum(trial.nbytes for trial in trials)
    encode_s, decode_s = (max(getattr(one, name) for one in trials) for name in ("encode_s", "decode_s"))
    return Trial(trials[0].codec, nbytes, encode_s, decode_s)


def _spoilt(found: Sequence[_Found]) -> str:
    return next((one.spoilt for one in found if one.spoilt), "")
