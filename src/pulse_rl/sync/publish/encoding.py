"""A new version as a patch against the baseline: encoded, decoded again and proved, by the codec that is chosen.

Each rank encodes what it owns. What the digest gains is added up over the ranks, so each part of the patch names the
digests of the whole weights. A version without a patch is copied. Nothing is written here, neither to the baseline nor
to a store.
"""

import time
from functools import partial
from typing import NamedTuple

import msgspec

from pulse_rl.codecs.choose import Chooser, Trial
from pulse_rl.group.ranks import Ranks
from pulse_rl.logs import logger
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.encode import Coded, EncodedPatch, find
from pulse_rl.patch.live import each_alone
from pulse_rl.patch.overlay import Overlay, Recorder
from pulse_rl.sync.publish.baseline import Baseline, KeptOn
from pulse_rl.sync.publish.skips import MAX_OVERLAY
from pulse_rl.sync.publish.successor import check_parts
from pulse_rl.sync.shares import Share, unequal_replicas
from pulse_rl.weights import digests, finite
from pulse_rl.weights.layout import Layout

log = logger(__name__)


class Encoded(NamedTuple):
    """A new version before it is delivered. Seconds of cast and diff are summed over threads."""

    digest: str
    patch: EncodedPatch | None  # this rank's part; None for a version that has an anchor only
    changes: int  # of all parts together
    nbytes: int  # of all parts together
    replaced: Overlay | None  # what this rank's part overwrites in the baseline; None if it is new, or too much to keep
    codec_reason: str | None
    cast_s: float
    diff_s: float
    prove_s: float
    nonfinite: int  # elements that are NaN or infinite, of all parts together
    spoilt: str  # a tensor in which some have become so; empty for none


class _Found(msgspec.Struct, array_like=True):
    """What one rank found."""

    delta: int  # what the digest gains, mod 2^64
    changes: int
    replicas: dict[str, int]  # as `Share.replicas`
    nonfinite: int  # how many more elements are NaN or infinite than before
    spoilt: str  # a tensor in which some have become so; empty for none


class Encoder:
    """Encodes the versions of one model, and remembers what each codec took.

    codec: the name of one, or "auto". Raises ValueError for an unknown name.
    """

    def __init__(self, codec: str, ranks: Ranks) -> None:
        self._chooser = Chooser(codec)
        self._ranks = ranks
        self._auto = codec == "auto"
        self._taken: str | None = None  # the codec of the version before
        self._replaced: Overlay | None = None  # by the patch that is made

    def encode(
        self, baseline: Baseline, share: Share, version: int, bandwidth: float | None
    ) -> tuple[Application, Encoded]:
        """Encode the changes since the baseline, and prove that the patch leads from it to the new version.

        baseline: of what this rank owns. bandwidth: bits per second of the link that the codec is chosen for; None if
        it is not known. A collective. Returns the proved patch, or part, ready to be written into the baseline. Raises
        IntegrityError if the tensors change while they are read, and ExchangeError if replicas differ.
        """
        candidates = self._candidates(baseline, share, version, bandwidth)
        if len(candidates) > 1 and self._chooser.untried:
            # The first time may have compiled kernels, which says nothing about a codec.
            candidates = self._candidates(baseline, share, version, bandwidth)
        density = self._changes / max(1, share.plan.elements)
        chosen = self._chooser.choose(list(candidates), density, bandwidth)
        application, patch = candidates[chosen]
        if self._auto and chosen.codec != self._taken and self._ranks.rank == 0:
            log.info("version %d: codec %s from here on: %s", version, chosen.codec, self._chooser.reason)
        self._taken = chosen.codec
        prove_s = sum(trial.decode_s for trial in candidates)  # decoding and proving
        replaced, self._replaced = self._replaced, None
        return application, Encoded(
            patch.header.target_digest,
            patch,
            self._changes,
            chosen.nbytes,
            replaced,
            self._chooser.reason,
            patch.read_s,
            patch.diff_s,
            prove_s,
            max(0, self._nonfinite),
            self._spoilt,
        )

    def _candidates(
        self, baseline: Baseline, share: Share, version: int, bandwidth: float | None
    ) -> dict[Trial, tuple[Application, EncodedPatch]]:
        """The patch by each codec that is worth a try, proved."""
        patch = baseline.manifest.patch
        codecs = self._chooser.codecs(bandwidth, self._taken or (patch.codec if patch else None))

        def find_mine() -> tuple[list[Coded], _Found]:
            with Recorder(baseline.tensors.held_nbytes * MAX_OVERLAY) as recorder:
                coded = find(baseline.tensors, share.own, codecs=codecs, tied=share.plan.tied, recorder=recorder)
                self._replaced = _overlay(recorder, version)
            replicas = share.replicas(self._ranks.rank)
            first = coded[0]
            return coded, _Found(first.delta, first.changes, replicas, first.nonfinite, first.spoilt)

        coded, found = self._ranks.do_and_share("find changes", find_mine, _Found)
        _check_replicas(self._ranks, share, found)
        self._changes = sum(one.changes for one in found)
        self._nonfinite = baseline.manifest.nonfinite + sum(one.nonfinite for one in found)
        self._spoilt = _spoilt(found)
        total = sum(one.delta for one in found)

        def prove_mine() -> tuple[list[tuple[Trial, Application, EncodedPatch]], list[Trial]]:
            made = [self._prove(baseline, one, version, total) for one in coded]
            return made, [trial for trial, _, _ in made]

        made, proved = self._ranks.do_and_share("prove a patch", prove_mine, list[Trial])
        trials = [_together(mine) for mine in zip(*proved, strict=True)]
        return {trial: (application, patch) for trial, (_, application, patch) in zip(trials, made, strict=True)}

    def _prove(
        self, baseline: Baseline, coded: Coded, version: int, total: int
    ) -> tuple[Trial, Application, EncodedPatch]:
        """Put this rank's part together, and prove it on the baseline. total: what the digest gains over all ranks."""
        start, before = time.perf_counter(), int(baseline.manifest.digest, 16)
        patch = coded.finish(
            base=baseline.manifest.version,
            target=version,
            base_digest=before,
            target_digest=before + total,
            part=self._ranks.rank,
            parts=self._ranks.size,
        )
        application = Application(patch_format.unpack(patch.data), baseline.tensors.derived(each_alone))
        application.prove(before, lambda mine: mine + total - coded.delta)
        trial = Trial(coded.codec, len(patch.data), coded.encode_s, time.perf_counter() - start)
        return trial, application, patch


def _check_replicas(ranks: Ranks, share: Share, found: list[_Found]) -> None:
    error = unequal_replicas(ranks, [one.replicas for one in found], partial(share.replica_digests, ranks.rank))
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


def copy_whole(share: Share, ranks: Ranks, kept_on: KeptOn) -> tuple[Layout, Encoded]:
    """A copy of what this rank owns, and the digest of the whole, for a version that has an anchor only. A collective.

    kept_on: where the copy is kept. Raises ExchangeError if replicas differ, ValueError as `check_parts`.
    """
    start = time.perf_counter()

    def copy_mine() -> tuple[Layout, _Found]:
        check_parts(share)
        copy = share.own.clone(None if kept_on == "host" else share.own, pinned=kept_on == "pinned")
        counts = finite.count(copy)
        spoilt = next(iter(counts), "")
        replicas = share.replicas(ranks.rank)
        return copy, _Found(digests.state_digest(copy), 0, replicas, sum(counts.values()), spoilt)

    copy, found = ranks.do_and_share("copy the weights", copy_mine, _Found)
    _check_replicas(ranks, share, found)
    digest = digests.to_hex(sum(one.delta for one in found))
    nonfinite, seconds = sum(one.nonfinite for one in found), time.perf_counter() - start
    return copy, Encoded(digest, None, 0, 0, None, None, seconds, 0.0, 0.0, nonfinite, _spoilt(found))


def _spoilt(found: list[_Found]) -> str:
    return next((one.spoilt for one in found if one.spoilt), "")
