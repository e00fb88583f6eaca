"""Sealed objects: JSON that proves itself before any of it is decoded.

The last member of the object is `blake3`, the hash of all bytes before it; in a signed history `signature` follows, the
Ed25519 signature of all bytes before it. Every object says its `format` and `format_version`, in each version of a
format: so one of a newer format is not taken for a damaged one.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from pulse_rl.documents import decode_json
from pulse_rl.errors import FormatError, IntegrityError, printable, skew, translate
from pulse_rl.store.base import Store, read_up_to

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_SEAL = re.compile(rb',"blake3":"([0-9a-f]{64})"(?:,"signature":"([0-9a-f]{128})")?\}')
_SIGNATURE_NBYTES = len(',"signature":""}') + 128

D = TypeVar("D", bound=msgspec.Struct)


class SealedFormat(NamedTuple):
    """What sealed objects of one format say, and what messages call them."""

    name: str  # the member `format`
    version: int  # the member `format_version`
    whole: str  # what has this format, as "the history"
    noun: str  # an object of it, as "manifest"
    max_nbytes: int


class _Head(msgspec.Struct):
    """What objects of every version of a format have."""

    format: str
    format_version: int
    software: object = None


def seal(document: msgspec.Struct, sign: Callable[[bytes], bytes] | None) -> bytes:
    """Encode a document. sign: returns the 64 bytes of a signature of its argument; None for no signature."""
    body = msgspec.json.encode(document)[:-1]  # without the closing brace
    sealed = body + f',"blake3":"{blake3(body).hexdigest()}"'.encode()
    if sign is not None:
        sealed += f',"signature":"{sign(sealed).hex()}"'.encode()
    return sealed + b"}"


def open_sealed(
    data: bytes | memoryview,
    kind: type[D],
    form: SealedFormat,
    *,
    key: "Ed25519PublicKey | None",
    name: str,
    where: str,
) -> D:
    """Check the seal of the received bytes, and decode them.

    key: what a signature must verify with; None to check no signature. name: of the object. where: what messages call
    it. Raises IntegrityError for what is damaged, not signed by the key, or of another format or kind, and
    VersionSkewError for a newer format.
    """

    def wrong(message: str) -> IntegrityError:
        return IntegrityError(f"{where}{message}", name=name)

    if len(data) > form.max_nbytes:
        raise wrong(f": expected at most {form.max_nbytes} bytes, found more")
    data = bytes(data)
    found = _seal_of(data)
    if found is None or blake3(data[: found.start()]).hexdigest() != found[1].decode():
        raise wrong(f" is not a {form.noun}, or was damaged: its BLAKE3 hash does not match its bytes")
    if key is not None:
        _verify(data, found[2], key, form.noun, wrong)
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=name)):
        head = decode_json(data, _Head, f"{where} is not a {form.noun}")
        writer = head.software if isinstance(head.software, str) else None
        if head.format == form.name and head.format_version > form.version:
            raise skew(form.whole, head.format_version, form.version, written_by=writer, source=where)
        if (head.format, head.format_version) != (form.name, form.version):
            raise wrong(
                f": expected {form.name} version {form.version}, all that this release reads, found {head.format} "
                f"version {head.format_version}{f', written by {printable(writer)}' if writer else ''}"
            )
        return decode_json(data, kind, f"{where} is not a {form.noun}")


def read_sealed(store: Store, name: str, kind: type[D], form: SealedFormat, key: "Ed25519PublicKey | None") -> D:
    """Read a sealed object. Raises ObjectNotFoundError, StoreError, and as `open_sealed`."""
    data = read_up_to(store, name, form.max_nbytes)
    return open_sealed(data, kind, form, key=key, name=name, where=f"{name} in {store.url}")


def is_signed(data: bytes) -> bool:
    """Whether a sealed object carries a signature, by whatever key."""
    found = _seal_of(data)
    return found is not None and found[2] is not None


def _seal_of(data: bytes) -> "re.Match[bytes] | None":
    tail = max(0, len(data) - _SIGNATURE_NBYTES - len(',"blake3":""') - 64)
    return next((match for match in _SEAL.finditer(data, tail) if match.end() == len(data)), None)


def _verify(
    data: bytes, signature: bytes | None, key: "Ed25519PublicKey", noun: str, wrong: Callable[[str], IntegrityError]
) -> None:
    from cryptography.exceptions import InvalidSignature

    if signature is None:
        raise wrong(f": expected a signed {noun}, as a public key was given to check it by, found no signature")
    try:
        key.verify(bytes.fromhex(signature.decode()), data[: len(data) - _SIGNATURE_NBYTES])
    except InvalidSignature:
        raise wrong(
            ": its signature is not by the key that was given: it was altered, or comes from another publisher"
        ) from None
