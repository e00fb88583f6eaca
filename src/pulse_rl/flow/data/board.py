"""What the services of a run show each other: facts by name.

It is kept in memory only. After a restart of the dataflow, facts come back with the next reports.
"""

from collections.abc import Mapping
from typing import Any


class StatusBoard:
    """See the module."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, Any]] = {}

    def report(self, who: str, facts: Mapping[str, Any]) -> None:
        """Put facts about a service on the board."""
        self._facts.setdefault(who, {}).update(facts)

    def board(self) -> dict[str, dict[str, Any]]:
        """All facts, by service."""
        return {who: dict(facts) for who, facts in self._facts.items()}
