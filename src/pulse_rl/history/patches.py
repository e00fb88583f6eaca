"""Patches read from a history: whole, or only what a share of the weights needs; in one file or in parts.

A patch of several publishing ranks is a list of parts, `parts.json`, which its manifest binds by a hash. Each part is
one file and covers other elements. What is read of a file is proved before it is returned: all of it by the hash in its
reference, or its head by the hash of the head and each span by the hash in the head.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from pulse_rl.documents import decode_json
from pulse_rl.errors import (
    BaseMismatchError,
    CannotReadRangeError,
    FormatError,
    IntegrityError,
    PatchFormatError,
    translate,
)
from pulse_rl.history.manifest import PatchObject, part_name
from pulse_rl.history.trail import PatchLink, State
from pulse_rl.log.objects import check_size, fetch
from pulse_rl.parallel import at_once
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.encode import EncodedPatch
from pulse_rl.patch.format import Patch
from pulse_rl.patch.segments import Entry
from pulse_rl.patch.targets import boxes_of, holds
from pulse_rl.store.base import Store
from pulse_rl.store.cache import drop_cached
from pulse_rl.store.ranges import WrongSizeError, read_range, read_ranges
from pulse_rl.weights.bits import Bits
from pulse_rl.weights.box_sets import disjoint
from pulse_rl.weights.boxes import Box, whole
from pulse_rl.weights.layout import Layout, TensorSpec

FORMAT = "pulse-rl/parts"
PARTS_AT_ONCE = 8


class PartList(msgspec.Struct, frozen=True):
    """The parts of a patch, in order; their names follow from that of the list."""

    format: str
    parts: tuple[tuple[int, str, int, str], ...]  # nbytes, blake3, head_nbytes, head_blake3 of each

    def refs(self, name: str) -> list[PatchObject]:
        """The parts' objects. name: of the list."""
        return [PatchObject(part_name(name, number), *part) for number, part in enumerate(self.parts)]


class Fetched(NamedTuple):
    """A patch that was read: all its parts, each with the spans that were asked for."""

    parts: list[Patch]
    nbytes: int  # that were read

    @property
    def first(self) -> Patch:
        return self.parts[0]

    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors of all parts. Raises PatchFormatError unless the parts cover each element once."""
        return tensors_of(self.parts)

    @property
    def changes(self) -> int:
        """Elements that change in all parts."""
        return sum(part.changes for part in self.parts)


def describe(name: str, patch: EncodedPatch) -> PatchObject:
    """The reference of a patch file that is put under this name."""
    head = blake3(memoryview(patch.data)[: patch.head_nbytes]).hexdigest()[:32]
    return PatchObject(name, len(patch.data), blake3(patch.data).hexdigest(), patch.head_nbytes, head)


def list_parts(name: str, parts: Sequence[PatchObject]) -> tuple[bytes, PatchObject]:
    """The list of a patch's parts, to be put under this name, and its reference."""
    rows = tuple((part.nbytes, part.blake3, part.head_nbytes, part.head_blake3) for part in parts)
    data = msgspec.json.encode(PartList(FORMAT, rows))
    total = sum(part.nbytes for part in parts)
    return data, PatchObject(name, len(data), blake3(data).hexdigest(), parts=len(parts), parts_nbytes=total)


def part_refs(store: Store, ref: PatchObject, limit: int) -> list[PatchObject]:
    """The files of a patch: itself, or the parts that it lists. Raises as `fetch`."""
    if not ref.parts:
        return [ref]
    check_size(ref.name, ref.parts_nbytes, limit)
    data = fetch(store, ref, limit)
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=ref.name)):
        found = decode_json(data, PartList, f"{ref.name} is not a list of parts")
    parts = found.refs(ref.name)
    if found.format != FORMAT or len(parts) != ref.parts or sum(part.nbytes for part in parts) != ref.parts_nbytes:
        raise IntegrityError(
            f"{ref.name}: expected a list of {ref.parts} parts of {ref.parts_nbytes} bytes, found {len(parts)} of "
            f"{sum(part.nbytes for part in parts)}",
            name=ref.name,
        )
    return parts


def fetch_patch(store: Store, ref: PatchObject, limit: int, share: Layout | None = None) -> Fetched:
    """Read a patch and prove what was read.

    limit: bytes that it may have. share: sharded weights that it will be applied to; None to read all of it.
    Raises PatchFormatError or IntegrityError for what is damaged, VersionSkewError, ObjectNotFoundError or StoreError.
    """
    refs = part_refs(store, ref, limit)
    listed = ref.nbytes if ref.parts else 0
    found = at_once(lambda part: _fetch_part(store, part, limit, share), refs, PARTS_AT_ONCE, "pulse-part")
    parts = [part for part, _ in found]
    _check_alike(ref, parts)
    return Fetched(parts, listed + sum(nbytes for _, nbytes in found))


def has_share(fetched: Fetched, share: Layout) -> bool:
    """Whether all was read that a share of the weights needs."""
    return all(span.number in part.payloads for part in fetched.parts for span in wanted_spans(part, share))


def _fetch_part(store: Store, ref: PatchObject, limit: int, share: Layout | None) -> tuple[Patch, int]:
    """One file, and how many bytes of it were read.

    One whose parts cannot be read, or are not what its manifest promises, is read whole: a transfer may be at fault.
    """
    if share is not None and share.sharded and ref.head_nbytes:
        check_size(ref.name, ref.nbytes, limit)
        if not ref.head_nbytes <= min(ref.nbytes, patch_format.MAX_HEAD_NBYTES):
            raise IntegrityError(f"{ref.name}: a head of {ref.head_nbytes} of {ref.nbytes} bytes", name=ref.name)
        try:
            return _fetch_share(store, ref, share)
        except CannotReadRangeError:
            pass
        except (IntegrityError, PatchFormatError, WrongSizeError):
            drop_cached(store, ref.name)
    return patch_format.unpack(fetch(store, ref, limit), ref.name), ref.nbytes


def _fetch_share(store: Store, ref: PatchObject, share: Layout) -> tuple[Patch, int]:
    """The head of a file and the spans that a share of the weights needs, and how many bytes that is."""
    head = read_range(store, ref.name, 0, ref.head_nbytes, most=ref.nbytes)
    if blake3(head).hexdigest()[:32] != ref.head_blake3:
        raise IntegrityError(
            f"{ref.name} in {store.url} is corrupt: expected a head of BLAKE3 {ref.head_blake3}, found another one",
            name=ref.name,
            expected=ref.head_blake3,
        )
    patch = patch_format.unpack_head(head, ref.nbytes, ref.name)
    wanted = wanted_spans(patch, share)
    payloads = read_ranges(store, ref.name, [(span.start, span.stop) for span in wanted], most=ref.nbytes)
    with translate(PatchFormatError, to=lambda reason: PatchFormatError(reason, source=ref.name)):
        read = patch.with_spans({span.number: data for span, data in zip(wanted, payloads, strict=True)})
    return read, ref.head_nbytes + sum(span.nbytes for span in wanted)


def wanted_spans(patch: Patch, share: Mapping[str, Bits]) -> list[patch_format.Span]:
    """The spans of a patch that change elements which this process holds."""
    tensors = [share.get(entry.name) for entry in patch.table]
    boxes = [None if tensor is None else boxes_of(tensor) for tensor in tensors]
    known: dict[tuple[object, Box], bool] = {}  # most tensors of a kind are held alike

    def is_held(number: int, place: Box) -> bool:
        key = boxes[number], place
        if key not in known:
            tensor = tensors[number]
            known[key] = tensor is not None and holds(tensor, place)
        return known[key]

    return [span for span in patch.spans if any(is_held(*each) for each in span.segments.changing())]


def _check_alike(ref: PatchObject, parts: Sequence[Patch]) -> None:
    """Raise IntegrityError unless these are all parts of one patch."""
    ends = {(p.header.base, p.header.target, p.header.base_digest, p.header.target_digest) for p in parts}
    numbers = [(part.header.part, part.header.parts) for part in parts]
    if len(ends) != 1 or numbers != [(number, len(parts)) for number in range(len(parts))]:
        raise IntegrityError(
            f"{ref.name}: expected parts 0 to {len(parts) - 1} of one patch, found (part, parts) {numbers[:8]}",
            name=ref.name,
        )


def tensors_of(parts: Sequence[Patch]) -> dict[str, TensorSpec]:
    """The tensors that all parts of a patch cover. Raises PatchFormatError unless they cover each element once."""
    if len(parts) == 1 and parts[0].header.parts == 1:
        return parts[0].table.derived(_specs)
    rows: dict[str, Entry] = {}
    for entry in (entry for part in parts for entry in part.table):
        known = rows.get(entry.name)
        if known is not None and (known.dtype, known.shape) != (entry.dtype, entry.shape):
            raise PatchFormatError(f"tensor {entry.name!r}: the parts disagree about its dtype or shape")
        rows[entry.name] = entry._replace(boxes=(known.boxes if known else ()) + entry.boxes)
    return _specs(rows.values())


def _specs(table: Collection[Entry]) -> dict[str, TensorSpec]:
    """The tensors of a table. Raises PatchFormatError unless its boxes are all elements of each, each once."""
    for entry in table:
        if entry.boxes == (whole(entry.shape),):
            continue
        if sum(box.size for box in entry.boxes) != whole(entry.shape).size or not disjoint(entry.boxes):
            raise PatchFormatError(f"tensor {entry.name!r}: the patch does not cover each of its elements once")
    return {entry.name: TensorSpec(*entry[:3]) for entry in table}


def check_promised(fetched: Fetched, link: PatchLink, held: State, tied: Mapping[str, str]) -> None:
    """Raise IntegrityError unless a patch has the target of its link and ties the same tensors.

    Raises BaseMismatchError unless it starts from the held version.
    """
    header = fetched.first.header
    target, promised = (header.target, header.target_digest), (link.to.version, link.to.digest)
    if target != promised:
        raise IntegrityError(
            f"{link.ref.name}: the history promises the target {promised}, found {target}",
            name=link.ref.name,
            expected=link.to.digest,
            found=header.target_digest,
        )
    if (header.base, header.base_digest) != (held.version, held.digest):
        raise BaseMismatchError(
            f"{link.ref.name}: it starts from version {header.base} (digest {header.base_digest}), held is version "
            f"{held.version} ({held.digest})",
            expected=header.base_digest,
            found=held.digest,
        )
    for part in fetched.parts:
        if part.tied != tied:  # tied tensors count once in a digest, so they must stay the same
            raise IntegrityError(f"{link.ref.name}: the history ties {tied}, the patch {part.tied}", name=link.ref.name)
