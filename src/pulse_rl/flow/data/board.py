"""What the services of a run show each other: facts by name, the files of each policy's model, and what ranks share.

It is kept in memory only. After a restart of the dataflow, facts come back with the next reports.
"""

from collections.abc import Mapping
from typing import Any

KEPT = 64  # things of which ranks share values


class Board:
    """See the module."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, Any]] = {}
        self._assets: dict[str, dict[str, bytes]] = {}
        self._shared: dict[str, dict[int, Any]] = {}

    def report(self, who: str, facts: Mapping[str, Any]) -> None:
        """Put facts about a service on the board."""
        self._facts.setdefault(who, {}).update(facts)

    def board(self) -> dict[str, dict[str, Any]]:
        """All facts, by service."""
        return {who: dict(facts) for who, facts in self._facts.items()}

    def offer_assets(self, policy: str, files: dict[str, bytes]) -> None:
        """Give workers the files from which they build a policy's model: configuration and tokenizer, not weights."""
        self._assets[policy] = files

    def assets(self, policy: str) -> dict[str, bytes] | None:
        """The files of a policy's model; None until they are offered."""
        return self._assets.get(policy)

    def share(self, what: str, rank: int, value: Any) -> dict[int, Any]:
        """Put one rank's value of something; returns the values of all ranks so far."""
        values = self._shared.pop(what, {})
        self._shared[what] = values | {rank: value}  # the newest last
        while len(self._shared) > KEPT:
            del self._shared[next(name for name in self._shared if not name.endswith("joined"))]
        return self._shared[what]

    def shared(self, what: str) -> dict[int, Any]:
        """The values of something that ranks have put, by rank."""
        return self._shared.get(what, {})
