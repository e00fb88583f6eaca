"""The protocol of what `find` and `newest` need of a history, which `log` fulfils."""

from typing import Protocol

from pulse_rl.history.manifest import Manifest
from pulse_rl.store.base import Store


class Manifests(Protocol):
    """The manifests of one history. Every method raises StoreError when the store fails."""

    store: Store

    def head(self) -> Manifest | None:
        """The newest manifest; None for an empty history."""

    def sequences(self) -> list[int]:
        """The sequence numbers of all manifests, ascending."""

    def first(self) -> int:
        """The sequence number of the oldest manifest from which on there is no gap."""

    def read(self, sequence: int) -> Manifest:
        """One manifest, checked. Raises VersionNotFoundError, IntegrityError or VersionSkewError."""

    def forget(self) -> None:
        """Read everything again from now on."""
