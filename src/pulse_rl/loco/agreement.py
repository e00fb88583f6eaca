"""What all ranks have to hold alike: numbers compared in one collective, and the ranks named that are not like most."""

from collections import Counter
from collections.abc import Mapping

from pulse_rl.errors import IntegrityError
from pulse_rl.loco.group import Group


def compare(group: Group, numbers: Mapping[str, int], when: str, remedy: str) -> None:
    """Make sure that all ranks hold the same. A collective.

    numbers: "parameters differ" → a number below 2^64, such as a digest. Raises IntegrityError for the first that is
    not the same on all: what differs, when, which ranks are not like most, and the remedy.
    """
    table = group.gather_numbers([_signed(number) for number in numbers.values()])
    for what, column in zip(numbers, table.T.tolist(), strict=True):
        if odd := _odd_ones(column):
            raise IntegrityError(
                f"{what} {when}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} of {group.size} "
                f"{'are' if len(odd) > 1 else 'is'} not like the others: {remedy}"
            )


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one that a tensor can hold."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _odd_ones(values: list[int]) -> list[int]:
    """The ranks that are not like most; of two equally many, not like rank 0's."""
    most = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != most]
