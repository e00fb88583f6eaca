"""Ed25519 keys, from PEM files or as they are. Needs the extra `sign`.

`openssl genpkey -algorithm ed25519 -out key.pem` makes a private key, and
`openssl pkey -in key.pem -pubout -out key.pub.pem` its public one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from pulse_rl.disk import read_file
from pulse_rl.errors import require
from pulse_rl.log.sealed import seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PrivateKey: TypeAlias = "str | Path | Ed25519PrivateKey"  # a PEM file, not encrypted, or the key itself
PublicKey: TypeAlias = "str | Path | Ed25519PublicKey"


class Keys:
    """The keys of a history: what signs its manifests, and what they are checked by.

    sign_with: None to sign nothing. public_key: None for that of `sign_with`; without either nothing is checked.
    Raises MissingExtraError, FileNotFoundError, and ValueError for what is no Ed25519 key.
    """

    def __init__(self, sign_with: PrivateKey | None, public: PublicKey | None) -> None:
        self._private: Ed25519PrivateKey | None = _key(sign_with, "private") if sign_with is not None else None
        self.public: Ed25519PublicKey | None = _key(public, "public") if public is not None else None
        if self._private is not None and self.public is None:
            self.public = self._private.public_key()

    @property
    def signs(self) -> bool:
        """Whether there is a private key."""
        return self._private is not None

    def seal(self, document: msgspec.Struct) -> bytes:
        """Encode and seal a document, signed where there is a private key."""
        return seal(document, self._private.sign if self._private is not None else None)


def _key(key: Any, what: Literal["private", "public"]) -> Any:
    """An Ed25519 key. Raises as `Keys`."""
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    where = "the key"
    if isinstance(key, str | Path):
        where = str(key)
        try:
            data = read_file(Path(key))
            if what == "private":
                key = serialization.load_pem_private_key(data, password=None)
            else:
                key = serialization.load_pem_public_key(data)
        except (ValueError, TypeError) as error:  # a TypeError is an encrypted one
            reason = str(error).partition(". See https")[0]
            raise ValueError(f"{where}: expected an Ed25519 {what} key in PEM, without a password: {reason}") from None
    if not isinstance(key, getattr(ed25519, f"Ed25519{what.capitalize()}Key")):
        raise ValueError(f"{where}: expected an Ed25519 {what} key, found {type(key).__name__}")
    return key
