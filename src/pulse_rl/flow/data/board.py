"""What the services of a run show each other: facts by name.

It is kept in memory only. After a restart of the dataflow, facts come back with the next reports.
"""

import logging
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


def workers(board: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The facts of the workers on a board that have not left."""
    return {who: facts for who, facts in board.items() if "policies" in facts and not facts.get("left")}


class BoardLog(logging.Handler):
    """Puts what a process logs on the board, for the driver to show, as nobody reads that process's own log.

    Its last message is its `note`, or from warnings on its `warning`: the text, and when it was logged, in seconds
    since 1970. board: what calls the board. who: whose message it is.
    """

    def __init__(self, board: Any, who: str) -> None:
        super().__init__()
        self._board, self._who = board, who

    def emit(self, record: logging.LogRecord) -> None:
        try:
            kind = "warning" if record.levelno >= logging.WARNING else "note"
            self._board.report(self._who, {kind: (record.getMessage(), record.created)})
        except Exception:  # noqa: BLE001 - what is logged must not fail because it is logged
            self.handleError(record)
