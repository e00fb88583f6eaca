"""Filters: which groups of a policy are worth training on. A filter sees one policy's part of a group.

A filter is called with a PolicyGroup and returns None to keep it, or the reason for which it is dropped: one word,
under which drops are counted. It decides by the group alone, so that it needs no recovery.
"""

from collections.abc import Callable
from typing import TypeAlias

from pulse_rl.flow.samples import PolicyGroup

Filter: TypeAlias = Callable[[PolicyGroup], str | None]


def keep_all(group: PolicyGroup) -> str | None:
    """Keep every group."""
    return None


def drop_equal(group: PolicyGroup) -> str | None:
    """Drop groups whose rewards are all equal: their advantages are zero, and they teach nothing."""
    return "no_variance" if bool((group.rewards == group.rewards[0]).all()) else None
