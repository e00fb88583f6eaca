"""Hostile `context` blocks: the fast decoder compared with the one written from docs/format.md.

`make fuzz` runs this under Atheris, which searches for inputs that reach new lines of the codec and of the naive
decoder; the tests run the same `check` on Hypothesis' inputs. It accepts libFuzzer's options:

    make fuzz ARGS="-max_total_time=3600"

An input is a few choices and then bytes: the block itself, edits of one that the encoder wrote, the stream of one of
its segments, or edits of the numbers in its head. The last two reach code that a broken head would hide.
"""

import importlib
import inspect
import struct
import sys
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from pulse_rl.codecs import context as context_codec
from pulse_rl.codecs import model
from pulse_rl.codecs.base import OldReader, Run, Specs, Units
from pulse_rl.dtypes import ITEMSIZES, UINTS, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels.cpu import rangecoder
from pulse_rl.kernels.cpu.coding import Streams
from pulse_rl.weights.changes import find_changes
from tests.naive import context as reference_context

CODEC = context_codec.ContextCodec()
Decoded = list[tuple[list[int], list[int]]]  # for each segment the indices and the new bits


class Block(NamedTuple):
    """A block as a reader gets it, and the old bits."""

    payload: bytes
    specs: "list[SegmentSpec]"
    old: list[Any]  # one array per segment


class Segment(NamedTuple):
    """A segment before it is coded."""

    dtype: str
    old: Any
    new: Any
    row: int
    phase: int = 0


class SegmentSpec(NamedTuple):
    """One segment as `Specs` has several."""

    dtype: str
    size: int
    changed: int
    stride: int
    phase: int


def specs_of(specs: Sequence[SegmentSpec]) -> list[Specs]:
    """The same in columns."""
    alike = [list(run) for _, run in groupby(specs, lambda spec: spec.dtype)]
    return [Specs(run[0].dtype, *np.array([spec[1:] for spec in run], np.int64).T) for run in alike]


def spec_of(segment: Segment) -> SegmentSpec:
    """What a decoder knows about a segment."""
    changed = int((segment.old != segment.new).sum())
    return SegmentSpec(segment.dtype, len(segment.old), changed, segment.row, segment.phase)


def run_of(segment: Segment) -> Run:
    """A run of this segment alone, which the encoder takes."""
    changes = find_changes(segment.old, segment.new)
    (specs,) = specs_of([spec_of(segment)])
    edges, replaced = np.append(0, specs.changed), segment.old[changes.indices]
    return Run(specs, edges, changes, replaced, OldReader(lambda number: segment.old))


def encode_block(runs: Sequence[Run]) -> bytes:
    """One block of one span, as `u32 n | head of n bytes | span`."""
    head, (span,) = CODEC.encode(runs, [len(runs)])
    return struct.pack("<I", len(head)) + head + span


def open_block(payload: Any, specs: Sequence[SegmentSpec]) -> Units:
    """The units of such a block. Raises FormatError."""
    if len(payload) < 4:
        raise FormatError("no length of a head")
    block, (nbytes,) = memoryview(payload), struct.unpack_from("<I", payload)
    (span,) = CODEC.open(block[4 : 4 + nbytes], specs_of(specs), [len(specs)])
    return span([block[4 + nbytes :]])


def encoded(segments: Sequence[Segment]) -> Block:
    """The block that the encoder makes of these segments."""
    payload = encode_block(list(map(run_of, segments)))
    return Block(payload, list(map(spec_of, segments)), [segment.old for segment in segments])


def streams_of(streams: Sequence[bytes]) -> Streams:
    """Streams one after another."""
    ends = np.cumsum([len(stream) for stream in streams])
    return Streams(np.frombuffer(b"".join(streams), np.uint8), np.concatenate([[0], ends[:-1]]), ends)


def decode(block: Block) -> Decoded:
    """The library's result. Raises FormatError."""
    units = open_block(block.payload, block.specs)
    decoded = units.decode(np.arange(len(block.specs)), OldReader(lambda number: block.old[number]), None)
    return [(indices.tolist(), values.tolist()) for found in decoded for indices, values in found.each()]


def decode_naively(block: Block) -> Decoded:
    """The document's result. Raises reference_context.Refused."""
    segments = [
        reference_context.Segment(
            spec.dtype, ITEMSIZES[spec.dtype], spec.stride, spec.phase, spec.changed, old.tolist()
        )
        for spec, old in zip(block.specs, block.old, strict=True)
    ]
    return reference_context.decode_block(block.payload, segments)


def check(block: Block) -> bool:
    """Assert that both decoders refuse, or that both give the same valid changes. Returns whether they gave any."""
    expected: Decoded | None
    try:
        expected = decode_naively(block)
    except reference_context.Refused:
        expected = None
    found: Decoded | None
    try:
        found = decode(block)
    except FormatError:
        found = None
    assert found == expected
    if found is None:
        return False
    for (indices, values), spec, old in zip(found, block.specs, block.old, strict=True):
        assert len(indices) == len(values) == spec.changed
        assert all(a < b for a, b in zip(indices, indices[1:], strict=False))
        assert all(0 <= index < spec.size and old[index] != new for index, new in zip(indices, values, strict=True))
    return True


def _drifted(dtype: str, size: int, row: int, phase: int = 0) -> Segment:
    """A segment of which some elements move by a few steps, some by any number and some change sign."""
    rng = np.random.default_rng(size)
    kind = UINTS[ITEMSIZES[dtype]]
    if dtype == "BF16":
        old = (rng.normal(0, 0.02, size).astype("<f4").view("<u4") >> 16).astype(kind)
    else:
        old = rng.integers(0, 256, size * kind.itemsize, np.uint8).view(kind)
    new = old.copy()
    where = rng.random(size) < 0.3
    new[where] += rng.choice(np.array([1, 1, 1, 2, 9, -1, -1, 128, -32768]), size)[where].astype(kind)
    return Segment(dtype, old, new, row, phase)


@cache
def blocks() -> list[Block]:
    return [
        encoded([_drifted("BF16", 300, 70, 33)]),
        encoded(
            [_drifted("F8_E4M3", 200, 20), _drifted("I8", 64, 7), _drifted("F8_E4M3", 65, 65), _drifted("U8", 90, 1)]
        ),
        encoded([_drifted("U16", 50, 9), _drifted("F8_E5M2", 1, 1), _drifted("C64", 40, 40)]),
        encoded([_drifted("F16", 33, 11)._replace(new=np.arange(33, dtype="<u2")), _drifted("F16", 400, 50, 49)]),
    ]


def _edited(data: bytes, edits: bytes) -> bytes:
    """A copy with bytes set (position u16, value u8); a position past the end appends, position 0xFFFF truncates."""
    result = bytearray(data)
    for position, value in struct.iter_unpack("<HB", edits[: len(edits) // 3 * 3]):
        if position == 0xFFFF:
            del result[value:]
        elif position % (len(result) + 1) == len(result):
            result.append(value)
        else:
            result[position % (len(result) + 1)] = value
    return bytes(result)


def _rebuilt(block: Block, chosen: int, edits: bytes, stream: bytes | None) -> Block:
    """A block whose head is valid but for edits of its numbers (place u16, value u8), with one stream replaced."""
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(block.specs):
        groups.setdefault(spec.dtype, []).append(number)
    kinds, order = [], []
    for dtype, members in groups.items():
        kinds += model.kinds(field_of(dtype)) * min(2, len(members)) + [model.MEAN]
        kinds += [model.CLASS, model.LENGTH] * len(members)
        order += members
    coded = np.array(kinds, np.uint8)
    (split,) = struct.unpack_from("<I", block.payload)
    numbers = rangecoder.decode_numbers(memoryview(block.payload)[4 : 4 + split], coded)
    assert numbers is not None
    streams = dict.fromkeys(range(len(order)), b"\x5a\x11\xc3")
    if stream is not None:
        streams[chosen % len(order)] = stream
    numbers[coded == model.MEAN] = 0
    numbers[coded == model.CLASS] = 0
    numbers[coded == model.LENGTH] = [2 * len(streams[number]) for number in order]
    for place, value in struct.iter_unpack("<HB", edits[: len(edits) // 3 * 3]):
        numbers[place % len(numbers)] = value
    head = rangecoder.encode_numbers(numbers, coded)
    payload = struct.pack("<I", len(head)) + head + b"".join(streams[number] for number in sorted(streams))
    return block._replace(payload=payload)


def block_of(data: bytes) -> Block:
    """The block that an input encodes."""
    kind, which, chosen, *_ = data.ljust(3, b"\0")
    block, rest = blocks()[which % len(blocks())], data[3:]
    if kind % 4 == 0:
        return block._replace(payload=rest)
    if kind % 4 == 1:
        return block._replace(payload=_edited(block.payload, rest))
    if kind % 4 == 2:
        return _rebuilt(block, chosen, b"", rest)
    return _rebuilt(block, chosen, rest[:6], rest[6:])


def main() -> None:
    atheris: Any = importlib.import_module("atheris")
    # Compiled kernels show no coverage; the naive decoder takes the same branches in plain Python.
    for module in (reference_context, context_codec, model):
        for thing in vars(module).values():
            for function in vars(thing).values() if inspect.isclass(thing) else [thing]:
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    atheris.instrument_func(function)

    def one(data: bytes) -> None:
        check(block_of(data))

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
