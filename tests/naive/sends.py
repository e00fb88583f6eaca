"""The naive twin of `cpu/sends.py`: what is sent of a segment, as a text of bits, first to last."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.naive.loco import FIELDS, width

LONGEST, NUMBER, CODES = 24, 21, 127
GROUPS, LEVELS, SIGN = 16, 4, 128


class Mean:
    """16 times the mean of about the last 16 numbers of one kind, and their Rice code."""

    def __init__(self, first: int) -> None:
        self.mean = first

    def learn(self, value: int) -> None:
        self.mean += value - self.mean // 16

    def write(self, value: int) -> str:
        low = max(self.mean // 16, 1).bit_length() - 1
        ones = value >> low
        if ones >= LONGEST:
            return "1" * LONGEST + _low(value, NUMBER)
        return "1" * ones + "0" + _low(value, low)

    def read(self, bits: "Bits") -> int:
        low = max(self.mean // 16, 1).bit_length() - 1
        ones = 0
        while ones < LONGEST and bits.take(1):
            ones += 1
        return bits.take(NUMBER) if ones == LONGEST else (ones << low) + bits.take(low)


class Bits:
    """The bits of a stream, least significant of each byte first; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self.text = "".join(f"{byte:08b}"[::-1] for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        taken = self.text[self.at : self.at + count].ljust(count, "0")
        self.at += count
        return int(taken[::-1], 2) if count else 0


class Sent(NamedTuple):
    """What is sent: indices, each once, and codes."""

    indices: list[int]
    codes: list[int]


class _Means:
    """Of each kind of number, through all classes of a stream."""

    def __init__(self, elements: int, sent: int) -> None:
        self.sent, self.unsent = Mean(16 * elements // sent), Mean(16)
        self.turned, self.larger, self.sizes = Mean(16), Mean(64), Mean(0)
        self.errors, self.codes = Mean(16), Mean(64)

    @property
    def center(self) -> int:
        return (self.codes.mean + 8) // 16


class _Unsound(Exception):
    """A stream that no encoder wrote."""


def classes_of(cells: Any, momentum: Any, name: str, scale: float) -> list[int]:
    """The class of each element, and SIGN where its momentum is negative. name: of the gate's format."""
    exponents, mantissas = FIELDS[name]
    found = [(int(cell) >> mantissas) % (1 << exponents) for cell in cells]
    classes = []
    for exponent, cell, value in zip(found, cells, momentum, strict=True):
        units = np.float32(abs(value)) / np.float32(float(width(cell, name))) * np.float32(scale)
        level = sum([units > 0, units >= 1, units >= 4])
        classes.append(LEVELS * min(max(found) - exponent, GROUPS - 1) + level + SIGN * (value < 0))
    return classes


def encode(classes: Any, sent: Sent) -> bytes:
    """The stream of what is sent of a segment."""
    codes = dict(zip(*sent, strict=True))
    means, text = _Means(len(classes), max(len(codes), 1)), ""
    for places in _by_class(classes) if codes else []:
        moves = [codes[i] * (-1 if classes[i] >= SIGN else 1) for i in places if i in codes]
        most = 2 * len(moves) > len(places)
        text += "01"[most]
        text += _gaps([rank for rank, i in enumerate(places) if (i in codes) != most], len(places), _gap(means, most))
        if not moves:
            continue
        text += _gaps([j for j, move in enumerate(moves) if move < 0], len(moves), means.turned)
        larger = [j for j, move in enumerate(moves) if abs(move) > 1]
        most = 2 * len(larger) > len(moves)
        text += "01"[most]
        if most:
            for move in moves:
                off = abs(move) - means.center
                error = 2 * off if off >= 0 else -2 * off - 1
                text += means.errors.write(error)
                means.errors.learn(error)
                means.codes.learn(abs(move))
        else:
            before = -1
            for j in larger:
                text += means.larger.write(j - before - 1)
                means.larger.learn(j - before - 1)
                text += means.sizes.write(abs(moves[j]) - 2)
                means.sizes.learn(abs(moves[j]) - 2)
                before = j
            text += means.larger.write(len(moves) - before - 1)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))


def decode(data: bytes, classes: Any, count: int) -> Sent | None:
    """The inverse; None for a stream that does not hold as many sends, or is of another length."""
    bits, means, sent = Bits(data), _Means(len(classes), count), Sent([], [])
    try:
        for places in _by_class(classes):
            most = bool(bits.take(1))
            coded = set(_read_gaps(bits, len(places), _gap(means, most)))
            chosen = [i for rank, i in enumerate(places) if (rank in coded) != most]
            if chosen:
                moves = _read_moves(bits, len(chosen), means)
                sent.indices.extend(chosen)
                sent.codes.extend(
                    move * (-1 if classes[i] >= SIGN else 1) for i, move in zip(chosen, moves, strict=True)
                )
    except _Unsound:
        return None
    return sent if len(sent.indices) == count and (bits.at + 7) // 8 == len(data) else None


def _read_moves(bits: Bits, count: int, means: _Means) -> list[int]:
    """Codes, negative against the momentum."""
    turned = set(_read_gaps(bits, count, means.turned))
    sizes = [1] * count
    if bits.take(1):
        for j in range(count):
            error = means.errors.read(bits)
            sizes[j] = means.center + (-(error // 2) - 1 if error % 2 else error // 2)
            _check(1 <= sizes[j] <= CODES)
            means.errors.learn(error)
            means.codes.learn(sizes[j])
    else:
        for j in _read_gaps(bits, count, means.larger):
            more = means.sizes.read(bits)
            _check(more <= CODES - 2)
            sizes[j] = more + 2
            means.sizes.learn(more)
    return [-size if j in turned else size for j, size in enumerate(sizes)]


def _gap(means: _Means, most: bool) -> Mean:
    return means.unsent if most else means.sent


def _by_class(classes: Any) -> list[list[int]]:
    """The elements of each class that has some."""
    found = sorted({number % SIGN for number in classes})
    return [[i for i, number in enumerate(classes) if number % SIGN == each] for each in found]


def _gaps(ranks: list[int], count: int, mean: Mean) -> str:
    text, before = "", -1
    for rank in ranks:
        text += mean.write(rank - before - 1)
        mean.learn(rank - before - 1)
        before = rank
    return text + mean.write(count - before - 1)


def _read_gaps(bits: Bits, count: int, mean: Mean) -> Iterator[int]:
    after = 0
    while True:
        gap = mean.read(bits)
        _check(after + gap <= count)
        if after + gap == count:
            return
        mean.learn(gap)
        yield after + gap
        after += gap + 1


def _check(sound: bool) -> None:
    if not sound:
        raise _Unsound


def _low(value: int, width: int) -> str:
    return f"{value % (1 << width):0{width}b}"[::-1] if width else ""
