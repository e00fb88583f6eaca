"""What all ranks must hold alike: compared in one collective, with the ranks named that differ from the majority."""

from collections import Counter
from collections.abc import Mapping

from pulse_rl.errors import IntegrityError
from pulse_rl.group.collectives import Group


def compare(group: Group, values: Mapping[str, int | str], when: str, remedy: str) -> None:
    """Make sure that all ranks hold the same. A collective.

    values: "parameters differ" → a digest (16 hex digits) or a whole number from 0. Raises IntegrityError for the
    first value that differs between ranks: what, when, which ranks differ from the majority, and the remedy.
    """
    numbers = [_signed(int(value, 16) if isinstance(value, str) else value) for value in values.values()]
    table = group.gather_numbers(numbers)
    for (what, value), column in zip(values.items(), table.T.tolist(), strict=True):
        majority = Counter(column).most_common(1)[0][0]  # of two equally common values rank 0's
        if odd := [rank for rank, number in enumerate(column) if number != majority]:
            shown = _hex if isinstance(value, str) else int
            raise IntegrityError(
                f"{what} {when}: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} of {group.size} "
                f"{'are' if len(odd) > 1 else 'is'} not like the others: {remedy}",
                expected=shown(majority),
                found=shown(column[odd[0]]),
                ranks=odd,
            )


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one that a tensor can hold."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _hex(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"
