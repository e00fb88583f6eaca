"""What all ranks must hold alike: numbers, digests and settings, with the ranks named that differ from the majority."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from pulse_rl.documents import decode_json
from pulse_rl.errors import ExchangeError, IntegrityError, printable
from pulse_rl.group.collectives import Group, name_ranks

LIMIT = 1 << 16  # bytes of settings as JSON
_SHOWN = 3  # settings that differ, in a message
_CHARACTERS = 100  # of a value, in a message

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


def compare_settings(group: Group, what: str, settings: Mapping[str, Any], remedy: str) -> None:
    """Make sure that all ranks have the same settings. A collective, of 16 bytes a rank where they are the same.

    what: what has them, as "the publisher". settings: name → what msgspec writes as JSON. remedy: what to do. Raises
    ExchangeError on all ranks with each name that differs, the ranks that are not like the majority, and both values.
    """
    mine = msgspec.json.encode(settings, order="deterministic")
    fingerprint = int.from_bytes(blake2b(mine, digest_size=8).digest(), "little", signed=True)
    lengths, fingerprints = group.gather_numbers([len(mine), fingerprint]).T.tolist()
    if too_long := [rank for rank, length in enumerate(lengths) if length > LIMIT]:
        raise ExchangeError(
            f"{what}: expected settings of at most {LIMIT} bytes, found {max(lengths)} on "
            f"{name_ranks(too_long, group.size)}",
            ranks=too_long,
        )
    if len(set(fingerprints)) == 1:
        return
    tables = [decode_json(data, dict[str, Any], what) for data in group.gather(mine, LIMIT)]
    differing, at_fault = [], set[int]()
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [_json(table[name]) if name in table else "absent" for table in tables]
        majority, odd = _odd(values)
        if odd:
            where = name_ranks(odd, group.size)
            differing.append(f"{printable(name)} is {_cut(values[odd[0]])} on {where}, and {_cut(majority)} elsewhere")
            at_fault |= set(odd)
    rest = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise ExchangeError(
        f"{what}: expected the same settings on all ranks: {'; '.join(differing[:_SHOWN])}{rest}: {remedy}",
        ranks=sorted(at_fault),
    )


def _odd(values: Sequence[T]) -> tuple[T, list[int]]:
    """The commonest value, of equally common ones rank 0's, and the ranks with another one."""
    majority = Counter(values).most_common(1)[0][0]
    return majority, [rank for rank, value in enumerate(values) if value != majority]


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _cut(text: str) -> str:
    line = printable(text)
    return line if len(line) <= _CHARACTERS else line[: _CHARACTERS - 1] + "…"


def _signed(number: int) -> int:
    """An unsigned 64-bit number as the signed one that a tensor can hold."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _hex(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"
