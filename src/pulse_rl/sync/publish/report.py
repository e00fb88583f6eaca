"""What a publish reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pulse_rl.history.manifest import Manifest, Scalar, ViewEntry
from pulse_rl.sync.publish.attempt import Attempt
from pulse_rl.sync.publish.delivery import Delivered


@dataclass(frozen=True)
class PublishReport:
    """What one publish did.

    Attributes:
        version: The version.
        base: The version that its patch starts from; None without a patch, as for the first version.
        digest: The digest of the version, 16 hex digits.
        codec: The patch's codec; None without a patch.
        codec_reason: Why this codec, in words: what each candidate took; None without a patch.
        elements: Elements of the model; tied tensors count once.
        changes: Elements whose bits differ from the base.
        density: changes / elements.
        full_nbytes: Bytes of the whole model's bits.
        patch_nbytes: Bytes of the patch, which is what an up-to-date subscriber reads; 0 without a patch.
        pending: Whether the version is still being coded and put in the background. Then nothing is known yet of the
            patch and the store: these fields are 0 or None, and `flush` returns the full report.
        anchor_nbytes: Bytes of the full checkpoint; 0 unless this version has an anchor.
        skip_nbytes: Bytes of skip patches to this version, for subscribers that are several versions behind.
        sent_nbytes: Bytes put into the store: patch, anchor, trail and skip patches, those of views too.
        group_nbytes: Bytes that this rank sent to the others of its group, to all of them together; 0 without a group.
            Only an anchor's tensors go over the group. Of the call, so with background=True what the delivery of the
            version before still sent is part of them.
        reduction: full_nbytes / patch_nbytes; 1 without a patch.
        cast_s: Seconds of reading and casting the weights, summed over threads. Of float32 in host memory that becomes
            bfloat16 they are part of `diff_s`: it is cast as it is compared.
        diff_s: Seconds of finding the changes, summed over threads.
        encode_s: Seconds of encoding.
        prove_s: Seconds of decoding each patch that was tried and proving it against the baseline.
        put_s: Seconds from the first object until the commit.
        skip_s: Seconds of making and putting skip patches, after the commit.
        total_s: Seconds of the call; in the report that `flush` returns, from `publish` until then.
        warning: What deserves a look although the version is published: that weights are NaN or infinite, and what
            failed after the commit (skip patches, pruning). None for nothing.
        metadata: What was noted of the version, as it is stored; None for nothing.
        nonfinite: Elements that are NaN or infinite.
        views: By name, what the version is in its views; empty while it is pending.
    """

    version: int
    base: int | None
    digest: str
    codec: str | None
    codec_reason: str | None
    elements: int
    changes: int
    density: float
    full_nbytes: int
    patch_nbytes: int
    pending: bool
    anchor_nbytes: int
    skip_nbytes: int
    sent_nbytes: int
    group_nbytes: int
    reduction: float
    cast_s: float
    diff_s: float
    encode_s: float
    prove_s: float
    put_s: float
    skip_s: float
    total_s: float
    warning: str | None
    metadata: Mapping[str, Scalar] | None
    nonfinite: int
    views: Mapping[str, ViewEntry]


def nonfinite_warning(manifest: Manifest, spoilt: str) -> str | None:
    """That weights of a version are NaN or infinite; None where all are finite.

    spoilt: a tensor in which some have become so; empty if that is not known.
    """
    if not manifest.nonfinite:
        return None
    where = f", as in {spoilt!r}" if spoilt else ""
    return f"{manifest.nonfinite:,} of {manifest.elements:,} weights are NaN or infinite{where}"


def publish_report(attempt: Attempt, delivered: Delivered | None) -> PublishReport:
    """The report of a version. delivered: None while it is in flight."""
    pending, delivered = delivered is None, delivered or Delivered(attempt.manifest, None, 0, 0.0, 0.0, None)
    new, encoded, manifest = attempt.new, delivered.encoded, delivered.manifest
    patch_nbytes = manifest.patch.total_nbytes if manifest.patch else 0
    sent_nbytes = delivered.skip_nbytes + sum(
        one.anchor_nbytes + (one.patch.total_nbytes if one.patch else 0) + (one.trail.nbytes if one.trail else 0)
        for one in manifest.each_view()
    )
    warnings = nonfinite_warning(manifest, new.spoilt), delivered.warning
    return PublishReport(
        version=manifest.version,
        base=attempt.base.version if attempt.base else None,
        digest=manifest.digest,
        codec=encoded.patch.header.codec if encoded else None,
        codec_reason=encoded.codec_reason if encoded else None,
        elements=manifest.elements,
        changes=new.changes,
        density=new.changes / manifest.elements if manifest.elements else 0.0,
        full_nbytes=manifest.full_nbytes,
        patch_nbytes=patch_nbytes,
        pending=pending,
        anchor_nbytes=manifest.anchor_nbytes,
        skip_nbytes=delivered.skip_nbytes,
        sent_nbytes=sent_nbytes,
        group_nbytes=attempt.clock.group_nbytes,
        reduction=manifest.full_nbytes / patch_nbytes if patch_nbytes else 1.0,
        cast_s=new.cast_s,
        diff_s=new.uncoded.mine.diff_s if new.uncoded else 0.0,
        encode_s=encoded.patch.encode_s if encoded else 0.0,
        prove_s=encoded.prove_s if encoded else 0.0,
        put_s=delivered.put_s,
        skip_s=delivered.skip_s,
        total_s=attempt.clock.seconds,
        warning="; ".join(filter(None, warnings)) or None,
        metadata=manifest.metadata,
        nonfinite=manifest.nonfinite,
        views=manifest.views,
    )
