"""Links and trails: which patches lead from version to version.

Besides the patch from each version to the next there are skip patches, over 4, 16 and 64 versions. Both ends of a
skip patch are sequence numbers that its span divides. So any version can be reached from any older one by at most
three patches of each span but the longest on the way up, as many on the way down, and patches of the longest between.

A trail is one small object that lists the patches between the last versions, and the longer ones further back. A
subscriber that has slept reads it instead of every manifest in between. `search` reads trails from a store and finds
the cheapest chain; here they are only decoded, extended and encoded.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import msgspec
import zstandard

from pulse_rl.codecs.zstd import decompress
from pulse_rl.documents import Count, Digest, Hash, HeadHash, Token, decode_json
from pulse_rl.errors import FormatError, IntegrityError, skew, translate
from pulse_rl.history.manifest import FORMAT, Manifest, PatchObject, parts_name, patch_name

REACH = {1: 64, 4: 64, 16: 128, 64: 512}  # by span: how many versions back a trail lists such patches
SPANS = tuple(span for span in REACH if span > 1)  # of skip patches; each divides the next
MAX_TRAIL_NBYTES = 1 << 20


class State(NamedTuple):
    """A version and its place in the history.

    Attributes:
        sequence: Its sequence number.
        version: The version.
        digest: The digest of its weights, 16 hex digits.
    """

    sequence: int
    version: int
    digest: str


class PatchLink(NamedTuple):
    """One patch between two versions of a history.

    Attributes:
        ref: The patch.
        base_sequence: The sequence number of the version that it starts from.
        to: The version that it leads to.
    """

    ref: PatchObject
    base_sequence: int
    to: State


_FIELDS = attrgetter(*PatchObject.__struct_fields__[1:])  # those of a patch's object but its name


class _StoredLink(msgspec.Struct, frozen=True, array_like=True):
    """A link as a trail stores it."""

    base: Count  # sequence numbers
    target: Count
    version: Count  # at the target
    digest: Digest
    token: Token
    nbytes: Count
    blake3: Hash
    head_nbytes: Count = 0  # from here on as in `PatchObject`
    head_blake3: HeadHash = ""
    parts: Count = 0
    parts_nbytes: Count = 0

    @property
    def ref(self) -> PatchObject:
        """The patch's object."""
        return PatchObject((parts_name if self.parts else patch_name)(self.target, self.token), *_FIELDS(self))


class _Kind(msgspec.Struct):
    """The version of a trail's format, which is that of the history's; trails need not say it."""

    format_version: int = FORMAT.version


class Trail(msgspec.Struct, frozen=True):
    """The patches that lead to a version and to those before it, as far as a trail reaches.

    Attributes:
        sequence: The sequence number of the version.
        patches: The patches, as they are stored; `links` gives them with names.
    """

    sequence: Count
    patches: tuple[_StoredLink, ...] = ()

    def links(self) -> list[PatchLink]:
        """List the patches.

        Returns:
            The patches, in the order of the versions that they lead to.
        """
        return [
            PatchLink(p.ref, p.base, State(p.target, p.version, p.digest))
            for p in sorted(self.patches, key=lambda p: (p.target, p.base))
        ]

    def extended(self, sequence: int, links: Iterable[PatchLink]) -> "Trail":
        """Extend this trail to a later version.

        Args:
            sequence: The sequence number of that version.
            links: The patches made since.

        Returns:
            A trail with these patches and those of this one that are still within reach.
        """
        tokens = ((link, link.ref.name.partition("-")[2][:16]) for link in links)  # patches/000000000007-TOKEN…
        new = (_StoredLink(link.base_sequence, *link.to, token, *_FIELDS(link.ref)) for link, token in tokens)
        within = (p for p in (*self.patches, *new) if p.base >= sequence - REACH[p.target - p.base])
        return Trail(sequence, tuple(within))

    def encode(self) -> bytes:
        """Encode this trail.

        Returns:
            The bytes of its object: JSON, compressed by zstd.
        """
        return zstandard.ZstdCompressor(level=9).compress(msgspec.json.encode(self))


def state_of(manifest: Manifest) -> State:
    """The version that a manifest commits."""
    return State(manifest.sequence, manifest.version, manifest.digest)


def link_of(manifest: Manifest) -> PatchLink | None:
    """The patch that a manifest itself names; None for a version that has only an anchor."""
    return PatchLink(manifest.patch, manifest.sequence - 1, state_of(manifest)) if manifest.patch else None


def decode_trail(data: bytes | bytearray, manifest: Manifest, where: str) -> Trail:
    """Decode the trail of a version.

    where: what messages call it. Raises IntegrityError unless it is a trail that leads to the manifest's version, and
    VersionSkewError for one of a newer format.
    """
    name = manifest.trail.name if manifest.trail else where
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=name)):
        what = f"{where} is not a trail"
        document = decompress(memoryview(data), MAX_TRAIL_NBYTES, what)
        found = decode_json(document, _Kind, what).format_version
        if found > FORMAT.version:
            raise skew("the trail", found, FORMAT.version, written_by=manifest.software, source=where)
        trail = decode_json(document, Trail, what)
    states = {link.to for link in trail.links()}
    if (
        trail.sequence != manifest.sequence
        or state_of(manifest) not in states
        or len(states) != len({state.sequence for state in states})
        or any(p.target > manifest.sequence or p.target - p.base not in REACH for p in trail.patches)
    ):
        raise IntegrityError(f"{where} is not a trail to version {manifest.version}", name=name)
    return trail
