"""Where a pruned history begins: `first.json`, a number and its check.

Pruning deletes what is before that number, so a flipped digit must not be believed. Releases that know no check read
the object as a JSON number, and JSON allows white space after it: so the check is written in white space, 16
characters of two bits each. A number without one, as those releases and people write it, is believed as it is.
"""

from blake3 import blake3

from pulse_rl.documents import Count, decode_json
from pulse_rl.errors import FormatError, IntegrityError, ObjectNotFoundError, translate
from pulse_rl.store.base import Store, read_up_to

FIRST = "first.json"  # the number of the oldest manifest from which on there is no gap; only after a pruning
MAX_FIRST_NBYTES = 64  # a number and white space

_BITS = b" \t\n\r"  # the characters of JSON's white space, for the bits 00, 01, 10 and 11
_LINE_ENDS = (b"", b"\n", b"\r\n")  # after a number without a check


def encode_first(sequence: int) -> bytes:
    """The bytes of `first.json` for a sequence number."""
    digits = b"%d" % sequence
    return digits + _check(digits)


def read_first(store: Store) -> int:
    """The sequence number in `first.json`; 0 if there is none.

    Raises IntegrityError if it is damaged, and StoreError.
    """
    try:
        data = bytes(read_up_to(store, FIRST, MAX_FIRST_NBYTES))
    except ObjectNotFoundError:
        return 0
    with translate(FormatError, to=lambda reason: IntegrityError(reason, name=FIRST)):
        sequence = decode_json(data, Count, f"{FIRST} in {store.url} is not a sequence number")
    digits = data.rstrip(_BITS)
    if data[len(digits) :] not in (*_LINE_ENDS, _check(digits)):
        raise IntegrityError(
            f"{FIRST} in {store.url} is damaged: it says {sequence}, and the check after the number does not match; "
            "delete it, and the next pruning writes it anew",
            name=FIRST,
            found=sequence,
        )
    return sequence


def _check(digits: bytes) -> bytes:
    """The first 32 bits of the BLAKE3 hash of the digits, the highest first."""
    bits = int.from_bytes(blake3(digits).digest()[:4], "big")
    return bytes(_BITS[bits >> shift & 3] for shift in range(30, -1, -2))
