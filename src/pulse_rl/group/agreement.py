"""What must be alike on all ranks: what they hold and what they were asked for, with the ranks named that differ."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from pulse_rl.errors import ExchangeError, IntegrityError
from pulse_rl.group.collectives import Group, name_ranks

T = TypeVar("T", bound=Hashable)


def compare(group: Group, values: Mapping[str, int | str], when: str, remedy: str) -> None:
    """Make sure that all ranks hold the same. A collective.

    values: "parameters differ" → a digest (16 hex digits) or a whole number from 0. Raises IntegrityError for the
    first value that differs between ranks: what, when, which ranks differ from the majority, and the remedy.
    """
    numbers = [_signed(int(value, 16) if isinstance(value, str) else value) for value in values.values()]
    table = group.gather_numbers(numbers)
    for (what, value), column in zip(values.items(), table.T.tolist(), strict=True):
        majority, odd = _odd(column)
        if odd:
            shown = _hex if isinstance(value, str) else int
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


def _odd(values: Sequence[T]) -> tuple[T, list[int]]:
    """The commonest value, of equally common ones rank 0's, and the ranks with another one."""
    majority = Counter(values).most_common(1)[0][0]
    return majority, [rank for rank, value in enumerate(values) if value != majority]


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one that a tensor can hold."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _hex(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"
