"""What must be alike on all ranks: what they hold and what they were asked for, with the ranks named that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from pulse_rl.errors import ExchangeError, IntegrityError
from pulse_rl.group.collectives import Group, name_ranks


def compare(group: Group, values: Mapping[str, int | str], when: str, remedy: str) -> None:
    """Make sure that all ranks hold the same. A collective.

    values: "parameters differ" → a digest (16 hex digits) or a whole number from 0. Raises IntegrityError for the
    first value that differs between ranks: what, when, which ranks differ from the majority, and the remedy.
    """
    numbers = [int(value, 16) if isinstance(value, str) else value for value in values.values()]
    table = group.gather_rows(np.array(numbers, np.uint64).view(np.int64)).view(np.uint64)  # tensors have signs
    for (what, value), column in zip(values.items(), table.T.tolist(), strict=True):
        majority = Counter(column).most_common(1)[0][0]  # of equally common ones rank 0's
        if odd := [rank for rank, one in enumerate(column) if one != majority]:
            shown = "{:016x}".format if isinstance(value, str) else int
            raise IntegrityError(
                f"{what} {when}: {name_ranks(odd, group.size)} {'are' if len(odd) > 1 else 'is'} not like the others: "
                f"{remedy}",
                expected=shown(majority),
                found=shown(column[odd[0]]),
                ranks=odd,
            )


def require_same(call: str, found: Sequence[Mapping[str, object]], then: str = "") -> None:
    """Raise ExchangeError, on all ranks alike, unless they were asked for the same.

    found: of each rank, what it was asked for by name. then: how things stand.
    """
    for name, expected in found[0].items():
        if odd := [rank for rank, one in enumerate(found) if one[name] != expected]:
            raise ExchangeError(
                f"{call}: expected the same {name} on all ranks: {expected!r} on rank 0, found "
                f"{found[odd[0]][name]!r} on {name_ranks(odd, len(found))}{then and f'; {then}'}",
                ranks=odd,
            )
