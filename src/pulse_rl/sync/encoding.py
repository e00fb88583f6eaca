"""A new version as a patch against the baseline: encoded, decoded again and proved, by the codec that is chosen.

A version without a patch is copied whole. Nothing is written here, neither to the baseline nor to a store.
"""

import time
from typing import NamedTuple

from pulse_rl.codecs.choose import Chooser, Trial
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.encode import EncodedPatch
from pulse_rl.patch.encode import encode as encode_patch
from pulse_rl.patch.live import resolve
from pulse_rl.sync.baseline import Baseline
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout


class Encoded(NamedTuple):
    """A new version before it is delivered. Seconds of cast and diff are summed over threads."""

    digest: str
    patch: EncodedPatch | None  # None for a version that has an anchor only
    codec_reason: str | None
    cast_s: float
    diff_s: float
    prove_s: float


class Encoder:
    """Encodes the versions of one model, and remembers what each codec took.

    codec: the name of one, or "auto". Raises ValueError for an unknown name.
    """

    def __init__(self, codec: str) -> None:
        self._chooser = Chooser(codec)

    def encode(
        self, baseline: Baseline, tensors: Layout, version: int, bandwidth: float | None
    ) -> tuple[Application, Encoded]:
        """Encode the changes since the baseline, and prove that the patch leads from it to the new version.

        bandwidth: bits per second of the link that the codec is chosen for; None if it is not known. Returns the proved
        patch, ready to be written into the baseline. Raises IntegrityError if the tensors change while they are read.
        """
        candidates = self._candidates(baseline, tensors, version, bandwidth)
        if len(candidates) > 1 and self._chooser.untried:
            # The first time may have compiled kernels, which says nothing about a codec.
            candidates = self._candidates(baseline, tensors, version, bandwidth)
        patch = next(iter(candidates.values()))[1]
        density = patch.header.changes / max(1, tensors.elements)
        application, patch = candidates[self._chooser.choose(list(candidates), density, bandwidth)]
        prove_s = sum(trial.decode_s for trial in candidates)  # decoding and proving
        return application, Encoded(
            patch.header.target_digest, patch, self._chooser.reason, patch.read_s, patch.diff_s, prove_s
        )

    def _candidates(
        self, baseline: Baseline, tensors: Layout, version: int, bandwidth: float | None
    ) -> dict[Trial, tuple[Application, EncodedPatch]]:
        """The patch by each codec that is worth a try, proved."""
        base_digest = int(baseline.manifest.digest, 16)
        patches = encode_patch(
            baseline.tensors,
            tensors,
            base=baseline.manifest.version,
            target=version,
            codecs=self._chooser.codecs(bandwidth),
            base_digest=base_digest,
            tied=tensors.tied,
        )
        candidates = {}
        for encoded in patches:
            start = time.perf_counter()
            patch = patch_format.unpack(encoded.data)
            application = Application(patch, resolve(patch.by_name(), patch.tied, baseline.tensors))
            application.prove(base_digest)
            decode_s = time.perf_counter() - start
            trial = Trial(encoded.header.codec, len(encoded.data), encoded.encode_s, decode_s)
            candidates[trial] = (application, encoded)
        return candidates


def copy_whole(tensors: Layout) -> tuple[Layout, Encoded]:
    """A copy of all bits, and their digest, for a version that has an anchor only."""
    start = time.perf_counter()
    copy = tensors.clone()
    copied = time.perf_counter()
    digest = digests.to_hex(digests.state_digest(copy))
    return copy, Encoded(digest, None, None, copied - start, time.perf_counter() - copied, 0.0)
