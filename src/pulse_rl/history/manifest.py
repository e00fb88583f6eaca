"""A manifest: what one version is, and which objects it consists of. It is sealed. Objects' names are made here too.

Members with a default may be missing, and readers ignore those that they do not know: so a member can be added without
a new version of the format.
"""

import re
from typing import Annotated, TypeAlias

import msgspec

from pulse_rl.documents import Count, Digest, HeadHash, Token, ViewName
from pulse_rl.errors import IntegrityError
from pulse_rl.log.objects import ObjectRef, number_in
from pulse_rl.log.sealed import SealedFormat, open_sealed
from pulse_rl.log.signing import Keys

MAX_MANIFEST_NBYTES = 16 << 20
FORMAT = SealedFormat("pulse-rl/history", 1, "the history", "manifest", MAX_MANIFEST_NBYTES)
MAX_SEQUENCE = 10**12 - 1  # the greatest number of 12 digits

_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")

# The sequence number in the name of a manifest; in that of a patch, a trail or an anchor's file.
manifest_sequence = number_in(r"manifests/(\d{12})\.json")
object_sequence = number_in(
    rf"(?:patches|trails|anchors)/(\d{{12}})-[0-9a-f]{{16}}(?:\.safetensors|\.json\.zst|/{_FILE.pattern})"
)

PARTS = "parts.json"

Scalar: TypeAlias = str | int | float | bool | None
Software = Annotated[str, msgspec.Meta(max_length=255)]


class PatchObject(ObjectRef, frozen=True, omit_defaults=True):
    """A patch: one file, or the list of the parts that several publishing ranks have put.

    Attributes:
        name: Its name in the store.
        nbytes: Its size in bytes.
        blake3: Its BLAKE3 hash, 64 hex digits.
        head_nbytes: Bytes of the file's head, which is read alone for a share of the patch; 0 for a list of parts.
        head_blake3: The first 32 hex digits of the head's BLAKE3 hash; empty for a list of parts.
        parts: How many files it consists of, where the object lists them; 0 for a file.
        parts_nbytes: Their bytes together.
    """

    head_nbytes: Count = 0
    head_blake3: HeadHash = ""
    parts: Count = 0
    parts_nbytes: Count = 0

    @property
    def total_nbytes(self) -> int:
        """All bytes that a receiver of whole weights reads."""
        return self.nbytes + self.parts_nbytes


class PatchRef(PatchObject, frozen=True, kw_only=True, omit_defaults=True):
    """The patch from the previous manifest's version to this one's.

    Attributes:
        name: Its name in the store.
        nbytes: Its size in bytes.
        blake3: Its BLAKE3 hash, 64 hex digits.
        head_nbytes: As in `PatchObject`.
        head_blake3: As in `PatchObject`.
        parts: As in `PatchObject`.
        parts_nbytes: As in `PatchObject`.
        base: The version that it starts from.
        codec: The codec of its changes.
        changes: How many elements it changes.
    """

    base: Count
    codec: str
    changes: Count


class ViewEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One version in a view: the same weights in another precision, which has its own patches and anchors.

    Attributes:
        form: How its weights are made of the version's, as text: a view of another form is another view.
        digest: As in `Manifest`, as all others.
        elements: Likewise.
        full_nbytes: Likewise.
        tied: Likewise.
        patch: Likewise.
        anchor: Likewise.
        anchor_sequence: Likewise.
        anchor_number: Likewise.
        trail: Likewise.
        nonfinite: Likewise.
    """

    form: str
    digest: Digest
    elements: Count
    full_nbytes: Count
    tied: dict[str, str]
    patch: PatchRef | None
    anchor: tuple[ObjectRef, ...]
    anchor_sequence: Count
    anchor_number: Count
    trail: ObjectRef | None
    nonfinite: Count = 0

    def info(self, name: str) -> "ViewInfo":
        """Sum up this view, as `status` and `inspect` tell of it.

        Args:
            name: The name of the view.

        Returns:
            Its name, its form, and how many bytes it takes.
        """
        return ViewInfo(name, self.form, self.full_nbytes, self.patch.total_nbytes if self.patch else 0)


class ViewInfo(msgspec.Struct, frozen=True):
    """A view of a version.

    Attributes:
        name: Its name.
        form: How its weights are made of the version's, as text.
        full_nbytes: How many bytes they have.
        patch_nbytes: How many the patch from the version before has; 0 without one.
    """

    name: str
    form: str
    full_nbytes: int
    patch_nbytes: int


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a history.

    Attributes:
        format: "pulse-rl/history".
        format_version: The version of that format.
        sequence: The sequence number: the place of this version in the history.
        version: The version, as it was published.
        digest: The digest of its weights, 16 hex digits.
        elements: How many elements its weights have.
        full_nbytes: How many bytes they have.
        tied: Further names of tensors, each with the name of the tensor that it is tied to.
        patch: The patch from the version before; None for the first version and for one with only an anchor.
        anchor: The files of its full checkpoint; empty for a version without an anchor.
        anchor_sequence: The sequence number of the newest version with an anchor, up to and including this one.
        anchor_number: The number of that anchor in the history: 0, 1, 2, ….
        trail: The object that lists the patches between the last versions; None if there are none.
        publisher: 16 random hex digits that name the publisher that committed it.
        created: When, in seconds since 1970 by the publisher's clock. For people: nothing depends on it.
        history: The id of the history, 16 random hex digits made with its first version.
        software: What wrote it, as "pulse-rl 0.1.0".
        metadata: What the trainer noted of this version; None for nothing.
        nonfinite: How many elements are NaN or infinite.
        views: By name, what this version is in each of its views.
    """

    format: str
    format_version: int
    sequence: Count
    version: Count
    digest: Digest
    elements: Count
    full_nbytes: Count
    tied: dict[str, str]
    patch: PatchRef | None
    anchor: tuple[ObjectRef, ...]
    anchor_sequence: Count
    anchor_number: Count
    trail: ObjectRef | None
    publisher: Token
    created: float
    history: Token
    software: Software
    metadata: dict[str, Scalar] | None = None
    nonfinite: Count = 0
    views: dict[ViewName, ViewEntry] = {}

    @property
    def anchor_nbytes(self) -> int:
        """The bytes of the anchor's files; 0 without one."""
        return sum(ref.nbytes for ref in self.anchor)

    @property
    def density(self) -> float | None:
        """The share of the elements that the patch changes; None without a patch, or without elements."""
        return self.patch.changes / self.elements if self.patch and self.elements else None

    @property
    def refs(self) -> list[ObjectRef]:
        """The objects that it names itself, without those of its views."""
        return [ref for ref in (*self.anchor, self.patch, self.trail) if ref is not None]

    def of(self, view: str) -> "Manifest | None":
        """Look at this version as a view has it.

        Args:
            view: The name of the view.

        Returns:
            The manifest of a history of that view alone; None without such a view.
        """
        entry = self.views.get(view)
        if entry is None:
            return None
        fields = {name: value for name, value in msgspec.structs.asdict(entry).items() if name != "form"}
        return msgspec.structs.replace(self, views={}, **fields)

    @property
    def view_infos(self) -> "tuple[ViewInfo, ...]":
        """The views of this version, as `status` and `inspect` tell of them."""
        return tuple(entry.info(name) for name, entry in sorted(self.views.items()))

    def each_view(self) -> "list[Manifest]":
        """List this version, and the version as each of its views has it.

        Returns:
            Their manifests, this one first.
        """
        return [self, *filter(None, map(self.of, self.views))]

    def entry(self, form: str) -> ViewEntry:
        """Turn the manifest of a view's version into what that version says of the view.

        Args:
            form: How the view's weights are made.

        Returns:
            The entry.
        """
        fields = {name: getattr(self, name) for name in ViewEntry.__struct_fields__ if name != "form"}
        return ViewEntry(form=form, **fields)


def manifest_name(sequence: int) -> str:
    return f"manifests/{sequence:012d}.json"


def patch_name(sequence: int, token: str) -> str:
    """The name of a patch to the version at a sequence number."""
    return f"patches/{sequence:012d}-{token}.safetensors"


def parts_name(sequence: int, token: str) -> str:
    """The name of the list of the parts of a patch."""
    return f"patches/{sequence:012d}-{token}/{PARTS}"


def part_name(parts: str, number: int) -> str:
    """The name of one part, from that of their list."""
    return f"{parts.removesuffix(PARTS)}{number:05d}.safetensors"


def trail_name(sequence: int, token: str) -> str:
    """The name of the trail of a version."""
    return f"trails/{sequence:012d}-{token}.json.zst"


def anchor_name(sequence: int, token: str) -> str:
    """The name of the directory of an anchor's files."""
    return f"anchors/{sequence:012d}-{token}"


def is_file_name(name: str) -> bool:
    """Whether an anchor's file can have this name."""
    return _FILE.fullmatch(name) is not None


def parse(data: bytes | memoryview, sequence: int, keys: Keys | None, where: str) -> Manifest:
    """Decode and check a manifest.

    sequence: the number in the object's name. keys: what it must be signed by; None to check no signature. Otherwise as
    `open_sealed`.
    """
    name = manifest_name(sequence)

    def wrong(message: str) -> IntegrityError:
        return IntegrityError(f"{where}{message}", name=name)

    manifest = open_sealed(data, Manifest, FORMAT, key=keys.public if keys else None, name=name, where=where)
    if manifest.sequence != sequence:
        raise wrong(f": sequence: expected {sequence}, found {manifest.sequence}")
    for view, one in zip(("", *manifest.views), manifest.each_view(), strict=True):
        if reason := _contradiction(one):
            raise wrong(f": view {view!r}: {reason}" if view else f": {reason}")
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    """What in a manifest cannot be, leaving out its views; None for nothing."""
    sequence = manifest.sequence
    if manifest.anchor_sequence > sequence:
        return f"anchor_sequence: expected at most {sequence}, found {manifest.anchor_sequence}"
    if (manifest.anchor_sequence == sequence) != bool(manifest.anchor):
        return "its anchor and anchor_sequence contradict each other"
    if manifest.patch is None and not manifest.anchor:
        return "expected a patch, an anchor or both, found neither"
    for folder, refs in (("patches", [manifest.patch]), ("trails", [manifest.trail]), ("anchors", manifest.anchor)):
        for ref in filter(None, refs):
            if object_sequence(ref.name) != sequence or not ref.name.startswith(f"{folder}/"):
                return f"it names an impossible object {ref.name!r}"
    return None


def check_same_history(found: Manifest, known: Manifest) -> None:
    """Raise IntegrityError unless two manifests are of one history: another one may be signed by the same key."""
    if found.history != known.history:
        raise IntegrityError(
            f"{manifest_name(found.sequence)} (version {found.version}) is of another history than version "
            f"{known.version}: expected the history id {known.history}, found {found.history}: it was copied from "
            "another run, or this one was begun anew",
            name=manifest_name(found.sequence),
            expected=known.history,
            found=found.history,
        )
