"""The naive twin of `cpu/sends.py`: what is sent of a segment, as a text of bits, first to last."""

from typing import Any, NamedTuple

from pulse_rl.dtypes import Field

LONGEST, NUMBER, CODES = 24, 21, 127


class Mean:
    """16 times the mean of about the last 16 numbers of one kind, and their Rice code."""

    def __init__(self, first: int) -> None:
        self.mean = first

    def write(self, value: int) -> str:
        low = max(self.mean // 16, 1).bit_length() - 1
        self.mean += value - self.mean // 16
        ones = value >> low
        if ones >= LONGEST:
            return "1" * LONGEST + _low(value, NUMBER)
        return "1" * ones + "0" + _low(value, low)

    def read(self, bits: "Bits") -> int:
        low = max(self.mean // 16, 1).bit_length() - 1
        ones = 0
        while ones < LONGEST and bits.take(1):
            ones += 1
        value = bits.take(NUMBER) if ones == LONGEST else (ones << low) + bits.take(low)
        self.mean += value - self.mean // 16
        return value


class Bits:
    """The bits of a stream, least significant of each byte first; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self.text = "".join(f"{byte:08b}"[::-1] for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        taken = self.text[self.at : self.at + count].ljust(count, "0")
        self.at += count
        return int(taken[::-1], 2) if count else 0


class _Class:
    """The elements of one exponent."""

    def __init__(self, mean_gap: int) -> None:
        self.gaps, self.runs, self.sizes = Mean(mean_gap), Mean(64), Mean(0)
        self.ahead = 0  # elements before the next one that is sent
        self.left: int | None = None  # of a run of codes 1


class Sent(NamedTuple):
    """What is sent: ascending indices, and codes."""

    indices: list[int]
    codes: list[int]


def encode(cells: Any, sent: Sent, field: Field) -> bytes:
    """The stream of what is sent of a segment."""
    exponents = [(int(cell) & field.mask) >> field.shift for cell in cells]
    codes = dict(zip(*sent, strict=True))
    places = {e: [i for i, other in enumerate(exponents) if other == e] for e in set(exponents)}
    classes: dict[int, _Class] = {}
    text = ""

    def gap_from(e: int, i: int) -> int:
        rest = [place for place in places[e] if place >= i]
        return next((k for k, place in enumerate(rest) if place in codes), len(rest))

    def run_from(e: int, i: int) -> int:
        sizes = [abs(codes[place]) for place in places[e] if place >= i and place in codes]
        return next((k for k, size in enumerate(sizes) if size > 1), len(sizes))

    for i in range(max(codes) + 1 if codes else 0):
        e = exponents[i]
        if e not in classes:
            classes[e] = _Class(16 * len(exponents) // len(codes))
            text += classes[e].gaps.write(gap_from(e, i))
        if i not in codes:
            continue
        one, code = classes[e], codes[i]
        text += "1" if code < 0 else "0"
        if one.left is None:
            one.left = run_from(e, i)
            text += one.runs.write(one.left)
        if one.left == 0:
            text += one.sizes.write(abs(code) - 2)
            one.left = run_from(e, i + 1)
            text += one.runs.write(one.left)
        else:
            one.left -= 1
        text += one.gaps.write(gap_from(e, i + 1))
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def decode(data: bytes, cells: Any, count: int, field: Field) -> Sent | None:
    """The inverse; None for a stream that does not hold as many sends, or is of another length."""
    bits, classes, sent = Bits(data), dict[int, _Class](), Sent([], [])
    for i, cell in enumerate(cells):
        e = (int(cell) & field.mask) >> field.shift
        if e in classes and classes[e].ahead:
            classes[e].ahead -= 1
            continue
        if len(sent.indices) == count:
            break
        if e not in classes:
            classes[e] = _Class(16 * len(cells) // count)
            classes[e].ahead = classes[e].gaps.read(bits)
            if classes[e].ahead:
                classes[e].ahead -= 1
                continue
        one, down, size = classes[e], bits.take(1), 1
        if one.left is None:
            one.left = one.runs.read(bits)
        if one.left == 0:
            size = 2 + one.sizes.read(bits)
            if size > CODES:
                return None
            one.left = one.runs.read(bits)
        else:
            one.left -= 1
        one.ahead = one.gaps.read(bits)
        sent.indices.append(i)
        sent.codes.append(-size if down else size)
    return sent if len(sent.indices) == count and -(-bits.at // 8) == len(data) else None


def _low(value: int, count: int) -> str:
    return f"{value % (1 << count):0{count}b}"[::-1] if count else ""
