"""A manifest: what one version is, which objects it is made of, and the seal that binds both.

The last member of the JSON object is `blake3`, the hash of all bytes before it; in a signed history `signature`
comes after that, Ed25519's of all bytes before it. So what is checked are the bytes as they came, before anything of
them is believed.
"""

import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
from blake3 import blake3

from pulse_rl.errors import IntegrityError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT = "pulse-rl/history"
FORMAT_VERSION = 2
MAX_MANIFEST_NBYTES = 16 << 20
MAX_SEQUENCE = 10**12 - 1  # as many as 12 digits hold

_MANIFEST = re.compile(r"manifests/(\d{12})\.json")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_OBJECT = re.compile(
    rf"(?:patches|trails|anchors)/(\d{{12}})-[0-9a-f]{{16}}(?:\.safetensors|\.json\.zst|/{_FILE.pattern})"
)
_SEAL = re.compile(rb',"blake3":"([0-9a-f]{64})"(?:,"signature":"([0-9a-f]{128})")?\}')
_SIGNATURE_NBYTES = len(',"signature":""}') + 128

Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ObjectRef(msgspec.Struct, frozen=True):
    """One immutable object, bound by its hash."""

    name: str
    nbytes: Count
    blake3: Hash


class PatchRef(ObjectRef, frozen=True):
    """The patch from the previous manifest's version to this one's."""

    base: Count  # version
    codec: str
    changes: Count


class Manifest(msgspec.Struct, frozen=True):
    """One version of a history."""

    format: str
    format_version: int
    sequence: Count
    version: Count
    digest: Digest
    elements: Count
    full_nbytes: Count
    tied: dict[str, str]  # further names of tensors → the name that stands for them
    patch: PatchRef | None  # None for the first version, and for any that is an anchor only
    anchor: tuple[ObjectRef, ...]  # the files of the full checkpoint; empty if this version has none
    anchor_sequence: Count  # the newest manifest with an anchor, this one included
    anchor_number: Count  # of that anchor: 0 for the history's first, 1 for its second, …
    trail: ObjectRef | None  # where the patches of the last versions are told of; None without any
    publisher: Token  # random, of the publisher that committed it
    created: float  # seconds since 1970 by the publisher's clock; for people, nothing depends on it

    @property
    def anchor_nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.anchor)


def manifest_name(sequence: int) -> str:
    return f"manifests/{sequence:012d}.json"


def patch_name(sequence: int, token: str) -> str:
    """The name of a patch to the version at a sequence number."""
    return f"patches/{sequence:012d}-{token}.safetensors"


def trail_name(sequence: int, token: str) -> str:
    """The name of the trail of a version."""
    return f"trails/{sequence:012d}-{token}.json.zst"


def anchor_name(sequence: int, token: str) -> str:
    """The name of the directory of an anchor's files."""
    return f"anchors/{sequence:012d}-{token}"


def is_file_name(name: str) -> bool:
    """Whether an anchor's file can have this name."""
    return _FILE.fullmatch(name) is not None


def manifest_sequence(name: str) -> int | None:
    """The sequence number in a manifest's name; None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def new_token() -> str:
    """16 random hex digits: makes the names of one attempt's objects its own."""
    return secrets.token_hex(8)


def seal(manifest: Manifest, sign: Callable[[bytes], bytes] | None) -> bytes:
    """The bytes of a manifest. sign: gives the 64 bytes of a signature of its argument; None for none."""
    body = msgspec.json.encode(manifest)[:-1]  # without the closing brace
    sealed = body + f',"blake3":"{blake3(body).hexdigest()}"'.encode()
    if sign is not None:
        sealed += f',"signature":"{sign(sealed).hex()}"'.encode()
    return sealed + b"}"


def parse(data: bytes | memoryview, sequence: int, key: "Ed25519PublicKey | None", where: str) -> Manifest:
    """A manifest from the bytes of an object, checked.

    sequence: the number in the object's name. key: what its signature must verify with; None believes any, and
    none. where: what to call it in messages. Raises IntegrityError.
    """
    if len(data) > MAX_MANIFEST_NBYTES:
        raise IntegrityError(f"{where}: expected at most {MAX_MANIFEST_NBYTES} bytes, found more")
    data = bytes(data)
    tail = max(0, len(data) - _SIGNATURE_NBYTES - len(',"blake3":""') - 64)
    found = next((m for m in _SEAL.finditer(data, tail) if m.end() == len(data)), None)
    if found is None or blake3(data[: found.start()]).hexdigest() != found[1].decode():
        raise IntegrityError(f"{where} is no manifest, or was damaged: its BLAKE3 hash does not match its bytes")
    if key is not None:
        _verify(data, found[2], key, where)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where} is no manifest: {error}") from None
    if (manifest.format, manifest.format_version) != (FORMAT, FORMAT_VERSION):
        raise IntegrityError(
            f"{where}: expected {FORMAT} version {FORMAT_VERSION}, "
            f"found {manifest.format} version {manifest.format_version}"
        )
    if manifest.sequence != sequence or manifest.anchor_sequence > sequence:
        raise IntegrityError(f"{where}: it says it is number {manifest.sequence}")
    if (manifest.anchor_sequence == sequence) != bool(manifest.anchor):
        raise IntegrityError(f"{where}: its anchor and anchor_sequence contradict each other")
    if manifest.patch is None and not manifest.anchor:
        raise IntegrityError(f"{where}: expected a patch, an anchor or both, found neither")
    for folder, refs in (("patches", [manifest.patch]), ("trails", [manifest.trail]), ("anchors", manifest.anchor)):
        for ref in filter(None, refs):
            match = _OBJECT.fullmatch(ref.name)
            if not match or int(match[1]) != sequence or not ref.name.startswith(f"{folder}/"):
                raise IntegrityError(f"{where}: it names an impossible object {ref.name!r}")
    return manifest


def object_sequence(name: str) -> int | None:
    """The sequence number in the name of a patch, a trail or an anchor's file; None for any other name."""
    match = _OBJECT.fullmatch(name)
    return int(match[1]) if match else None


def _verify(data: bytes, signature: bytes | None, key: "Ed25519PublicKey", where: str) -> None:
    from cryptography.exceptions import InvalidSignature

    if signature is None:
        raise IntegrityError(f"{where}: expected a signed manifest, found none: a public key was given to check it by")
    try:
        key.verify(bytes.fromhex(signature.decode()), data[: len(data) - _SIGNATURE_NBYTES])
    except InvalidSignature:
        raise IntegrityError(
            f"{where}: its signature is not by the key that was given: it was altered, or comes from another publisher"
        ) from None
