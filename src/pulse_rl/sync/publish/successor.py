"""What may follow a version of a history.

What no reader would accept is refused here, before anything is put, by the code that readers use.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from pulse_rl.checkpoint.header import check_header
from pulse_rl.checkpoint.shards import plan_shards
from pulse_rl.errors import (
    BaseMismatchError,
    FormatError,
    IntegrityError,
    PatchFormatError,
    StoreError,
    translate,
)
from pulse_rl.history.anchor_share import tensors_of
from pulse_rl.history.history import History
from pulse_rl.history.manifest import Manifest, Scalar, manifest_name
from pulse_rl.history.reading import FaultLog
from pulse_rl.history.search import check_line
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.segments import Entry
from pulse_rl.patch.table import entries_of
from pulse_rl.sync.share_plan import SharePlan
from pulse_rl.sync.shares import Share
from pulse_rl.weights.boxes import whole
from pulse_rl.weights.layout import compare_layouts, next_in_store

MAX_METADATA_NBYTES = 4096  # of its JSON


def next_version(head: Manifest | None, sequence: int) -> int:
    """The version after the newest one: one more; more where manifests in between cannot be read.

    sequence: of the next version. Raises ValueError where nothing tells the newest version.
    """
    if head is None and sequence > 0:
        raise ValueError("version: expected a number, as no manifest that is left tells the newest version; found None")
    return head.version + sequence - head.sequence if head is not None else 0


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Scalar] | None:
    """What a manifest can hold of metadata. Raises TypeError or ValueError.

    Scalars of NumPy and torch become Python's; a float32 keeps its value when it is rounded to float32 again. A float
    that JSON does not have, as NaN, becomes its text.
    """
    if not metadata:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: expected a mapping, as {{'step': 120}}, found {metadata!r:.100}")
    found: dict[str, Scalar] = {}
    for name, value in metadata.items():
        if hasattr(value, "item"):  # also np.float64, which is a float
            narrow, value = getattr(value, "itemsize", 8) <= 4, value.item()
            if narrow and isinstance(value, float):  # by its shortest decimals: 0.3, and not 0.30000001192092896
                value = float(str(np.float32(value)))
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"metadata: expected names with text, numbers, booleans or None, found {name!r}: {value!r}")
        found[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    try:
        encoded = msgspec.json.encode(found)
        read_back = msgspec.json.decode(encoded, type=dict[str, Scalar])
    except (UnicodeEncodeError, msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(f"metadata: expected what JSON can hold, found otherwise: {error}") from None
    if len(encoded) > MAX_METADATA_NBYTES or read_back != found:
        raise ValueError(f"metadata: expected at most {MAX_METADATA_NBYTES} bytes of JSON, found {len(encoded)}")
    return found


def check_readable(plan: SharePlan) -> None:
    """Raise ValueError for tensors that a patch or an anchor could hold, but no reader would accept."""
    if "__metadata__" in plan.all_names:  # a patch could hold it, an anchor could not
        raise ValueError("tensor names: expected any but '__metadata__', which safetensors keeps for itself")
    with _readable():
        rows = {name: (name, spec.dtype, spec.shape) for name, spec in plan.tensors.items()}
        patch_format.check_table([Entry(*row, (whole(row[2]),)) for row in rows.values()], plan.tied)
        for shard in plan_shards(plan.tensors)[0]:
            check_header([rows[name] for name in shard.tensors])


def check_parts(share: Share) -> None:
    """Raise ValueError if no reader would accept what this rank will publish after the first version."""
    with _readable():
        patch_format.check_table(entries_of(share.own), share.plan.tied)


def _readable() -> AbstractContextManager[None]:
    return translate(FormatError, to=lambda reason: ValueError(f"these tensors cannot be published: {reason}"))


def check_key(history: History, head: Manifest | None, sequence: int = 0) -> None:
    """Raise ValueError if the history is signed and this is not its key: workers would refuse what is added to it.

    head: the newest version that can be read. sequence: of the next version; where there are others and the key is of
    none of them, they are not damaged but another publisher's.
    """
    if head is None and sequence and History(history.store).end()[1] is not None:
        raise ValueError(
            f"sign_with: expected the private key of {history.store.url}, found another one, by which no version there "
            "is signed: workers that follow it would refuse what is added; to sign with another key, or to begin with "
            "it, take a new store"
        )
    if head is not None and not history.signs and history.is_signed(head.sequence):
        raise ValueError(
            f"sign_with: expected the private key of {history.store.url}, whose version {head.version} is signed, "
            "found None: workers with the public key would refuse what is added"
        )


def check_place(history: History, head: Manifest | None) -> None:
    """Compare the newest version with what is before it, where a publisher begins to continue from it.

    Raises IntegrityError if the newest manifests are lost or this one is of another history, ValueError as `check_key`.
    """
    check_key(history, head)
    first = history.first()
    if first > (head.sequence if head else 0):
        raise IntegrityError(
            f"{history.store.url} has lost its newest manifests: expected {manifest_name(first)}, where its last "
            "pruning let it begin, and those after it; found "
            f"{manifest_name(head.sequence) if head else 'none'} as the last",
            name=manifest_name(first),
        )
    if head is not None:
        check_line(history, head, FaultLog())


def check_successor(head: Manifest, before: SharePlan | None, plan: SharePlan, version: int, url: str) -> None:
    """Raise ValueError or BaseMismatchError unless these tensors can be the version after `head`.

    before: of `head`; None where it cannot be rebuilt, so that sizes are all that can be compared. url: the store's.
    """
    if version <= head.version:
        raise ValueError(
            f"version: expected more than {head.version}, the newest one, found {version}; without version=… it is the "
            "next number, and resume() returns the newest; a run that begins anew needs a new or emptied store"
        )
    sides = next_in_store(head.version, url)
    if before is not None and (before is not plan or head.tied != plan.tied):
        before = replace(before, tied=head.tied)
        compare_layouts(before.all_names, plan.all_names, sides)
    elif before is None and (plan.elements, plan.nbytes) != (head.elements, head.full_nbytes):
        raise BaseMismatchError(
            f"{sides.what}: the tensors differ: expected {head.elements} elements in {head.full_nbytes} bytes, found "
            f"{plan.elements} in {plan.nbytes}: publish the same model, with the same cast, or to a new store"
        )
    if head.tied != plan.tied:
        raise BaseMismatchError(
            f"{sides.what}: the tied tensors differ: expected {head.tied}, found {plan.tied}: {sides.model}, "
            "or for copies give Publisher(tied=…) as before",
            missing=sorted(head.tied.keys() - plan.tied.keys()),
            unexpected=sorted(plan.tied.keys() - head.tied.keys()),
        )


def check_stored(history: History, head: Manifest, plan: SharePlan) -> None:
    """Raise BaseMismatchError if the store has other tensors of `head`, of which no more than sizes was compared.

    Where they cannot be read that has to do: an anchor leads past it.
    """

    def compare(*, proved: bool) -> None:
        try:
            tensors = tensors_of(history, head, proved=proved)
        except (IntegrityError, PatchFormatError, StoreError):
            return
        compare_layouts(tensors, plan.tensors, next_in_store(head.version, history.store.url))

    try:
        compare(proved=False)
    except BaseMismatchError:  # unless a header is damaged
        compare(proved=True)
