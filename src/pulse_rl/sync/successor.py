"""What may follow a version of a history, and the manifest of what follows."""

import time

from pulse_rl.errors import BaseMismatchError
from pulse_rl.history.manifest import FORMAT, FORMAT_VERSION, Manifest
from pulse_rl.sync.baseline import Baseline
from pulse_rl.weights.layout import Layout, compare_layouts


def check_successor(head: Manifest, base: Baseline | None, tensors: Layout, version: int) -> None:
    """Raise ValueError or BaseMismatchError unless these tensors can be the version after `head`.

    base: holds `head`; None where it cannot be rebuilt, so that sizes are all that can be compared.
    """
    if version <= head.version:
        raise ValueError(f"version: expected more than {head.version}, the newest one, found {version}")
    what = f"version {head.version} and version {version}"
    if base is not None:
        compare_layouts(base.tensors.all_names(), tensors.all_names(), what)
    elif (tensors.elements, tensors.nbytes) != (head.elements, head.full_nbytes):
        raise BaseMismatchError(
            f"{what}: the tensors differ: expected {head.elements} elements in {head.full_nbytes} bytes, found "
            f"{tensors.elements} in {tensors.nbytes}: publish the same model, with the same cast"
        )
    if head.tied != tensors.tied:
        raise BaseMismatchError(
            f"{what}: the tied tensors differ: expected {head.tied}, found {tensors.tied}",
            missing=sorted(head.tied.keys() - tensors.tied.keys()),
            unexpected=sorted(tensors.tied.keys() - head.tied.keys()),
        )


def new_manifest(
    sequence: int, version: int, digest: str, tensors: Layout, head: Manifest | None, publisher: str, *, anchor: bool
) -> Manifest:
    """All of a new version's manifest but its objects.

    head: the version before; None for the first. publisher: the token of the one that publishes. anchor: whether the
    version is an anchor, as the first always is.
    """
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        sequence=sequence,
        version=version,
        digest=digest,
        elements=tensors.elements,
        full_nbytes=tensors.nbytes,
        tied=tensors.tied,
        patch=None,
        anchor=(),
        anchor_sequence=sequence if anchor or head is None else head.anchor_sequence,
        anchor_number=0 if head is None else head.anchor_number + anchor,
        trail=None,
        publisher=publisher,
        created=time.time(),
    )
