"""Whether a policy has anything to learn from: without a signal a run goes on, and teaches nothing."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONG = 10  # versions in a row without a gradient


def dead(name: str, records: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say of a policy that had no gradient for `LONG` versions in a row: of the longest such time."""
    longest, begin = range(0), 0
    for end, record in enumerate(records, 1):
        if record["grad_norm"] or record["groups_with_variance"]:
            begin = end
        longest = max(longest, range(begin, end), key=len)
    if len(longest) < LONG:
        return None
    first, last = (records[at]["step"] for at in (longest[0], longest[-1]))
    return (
        f"policy {name} had nothing to learn from in steps {first} to {last}: in each group all rewards were equal, so "
        "there was no gradient. Change what is played (an easier or a harder task, a larger workflow.group_size, a "
        "higher workflow.temperature), or the reward, so that plays of one problem differ"
    )


class Learning:
    """Says once of each policy that it has nothing to learn from. log: shows a person one line."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._newest: dict[str, deque[Mapping[str, Any]]] = {}
        self._told: set[str] = set()

    def look(self, records: Sequence[Mapping[str, Any]]) -> None:
        """records: those since the last call, each with its `policy`."""
        for record in records:
            name = record["policy"]
            newest = self._newest.setdefault(name, deque(maxlen=LONG))
            newest.append(record)
            if name not in self._told and (sentence := dead(name, newest)):
                self._told.add(name)
                self._log(sentence)
