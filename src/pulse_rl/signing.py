"""Ed25519 keys: read from PEM files, or taken as they are. Needs the extra `sign`.

`openssl genpkey -algorithm ed25519 -out key.pem` makes a private key, and
`openssl pkey -in key.pem -pubout -out key.pub.pem` its public one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pulse_rl.errors import require

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    PrivateKey: TypeAlias = str | Path | Ed25519PrivateKey  # a PEM file, not encrypted, or the key itself
    PublicKey: TypeAlias = str | Path | Ed25519PublicKey


def private_key(key: PrivateKey) -> Ed25519PrivateKey:
    """Raises MissingExtraError, FileNotFoundError, ValueError for what is no Ed25519 private key."""
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    if not isinstance(key, str | Path):
        loaded, where = key, "the key"
    else:
        where = str(key)
        try:
            loaded = serialization.load_pem_private_key(Path(key).read_bytes(), password=None)
        except (ValueError, TypeError) as error:  # a TypeError is an encrypted one
            raise ValueError(f"{where}: expected an Ed25519 private key in PEM, without a password: {error}") from None
    if not isinstance(loaded, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{where}: expected an Ed25519 private key, found {type(loaded).__name__}")
    return loaded  # type: ignore[no-any-return]


def public_key(key: PublicKey) -> Ed25519PublicKey:
    """Raises MissingExtraError, FileNotFoundError, ValueError for what is no Ed25519 public key."""
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    if not isinstance(key, str | Path):
        loaded, where = key, "the key"
    else:
        where = str(key)
        try:
            loaded = serialization.load_pem_public_key(Path(key).read_bytes())
        except ValueError as error:
            raise ValueError(f"{where}: expected an Ed25519 public key in PEM: {error}") from None
    if not isinstance(loaded, ed25519.Ed25519PublicKey):
        raise ValueError(f"{where}: expected an Ed25519 public key, found {type(loaded).__name__}")
    return loaded  # type: ignore[no-any-return]
