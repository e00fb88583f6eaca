"""What one trainer sends of a run of segments, as bytes.

    16 bytes   BLAKE3 of the rest
    u32 × 2    bytes of the positions, bytes of the exponents
    u32 × S    sends in each segment
    positions  a block of the context codec, over θ cast to the gate's format: all trainers hold it
    exponents  one zstd frame, one byte a value
    the rest   of each value, sign above mantissa, little-endian: 3 bytes of a float32, 1 of a bfloat16

The context codec codes changes, so positions are given to it as changes that all move up by one step: directions
and sizes then cost almost nothing. The exponents of the values lie near lr · H and take about 3 bits (the entropy
of each alone is 2.4); signs and mantissas are nearly random and are sent uncoded.

Values as logarithms (`log8`) are whole numbers of few bits, and many elements are sent. So they have another layout,
made for speed, which also uses the outer momentum, since all trainers hold it (`kernels.cpu.sends`). What is sent is
brought into the order of classes once (`in_order`), to be encoded and to be added up:

    16 bytes   BLAKE3 of the rest
    u32 × 2    bytes of all streams, LOG8: no length of exponents, so that a reader of another layout refuses it
    u32 × S    sends in each segment
    u32 × S    bytes of each segment's stream
    streams

A dense payload is all values, float32 and little-endian.

Who sent a payload is not known here: a broken one is a FormatError, from which `exchange` makes an ExchangeError.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from pulse_rl.codecs.base import OldReader, Run, Specs, Units
from pulse_rl.codecs.context import ContextCodec
from pulse_rl.codecs.zstd import decompress
from pulse_rl.dtypes import DTYPES, UIntArray, field_of
from pulse_rl.errors import FormatError
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import moves
from pulse_rl.kernels.cpu import sends as streams
from pulse_rl.kernels.cpu.classes import CLASSES, Classes, Places, arrange, counted, order
from pulse_rl.kernels.cpu.loco import F32
from pulse_rl.loco import log8
from pulse_rl.loco.gate import Sends, cast
from pulse_rl.weights.changes import Changes
from pulse_rl.weights.segments import SEGMENT, map_segments

ValueDtype: TypeAlias = Literal["log8", "float32", "bfloat16"]
VALUE_DTYPES: tuple[str, ...] = get_args(ValueDtype)
_MANTISSAS = {"float32": 23, "bfloat16": 7}
HASH, LENGTHS = 16, struct.Struct("<II")
LOG8 = 0xFFFFFFFE  # in place of the length of the exponents
# A position takes 3 bits of 27 here, so a sixteenth of a bit more for each hot element costs 0.5 – 0.9 % of the bytes;
# it makes decoding 15 – 45 % faster at 0.7 – 3.2 % of sends.
_CODEC = ContextCodec(price=128)


# Of segments whose values are logarithms, and are none.
NO_BITS: UIntArray = np.empty(0, np.uint16)
NO_CLASSES = counted(np.empty(0, np.uint8), np.zeros(256, np.float32))


class SharedSegment(NamedTuple):
    """A segment as sender and receiver both know it."""

    shape: tuple[int, ...]  # of the whole tensor
    start: int  # flat index of the first element
    shared: F32  # θ there, (n,)
    bits: UIntArray  # the same, cast to the gate's format; NO_BITS of logarithms
    classes: Classes  # of logarithms the class of each element; else NO_CLASSES

    @property
    def size(self) -> int:
        return len(self.shared)

    @property
    def stop(self) -> int:
        return self.start + self.size


Sent: TypeAlias = Sends | Places | F32  # of a segment; of logarithms by class; of dense payloads all values, (n,)
Decoder: TypeAlias = Callable[[], Sent]


def limit(sizes: Sequence[int]) -> int:
    """An upper bound of a payload of segments of these sizes, in bytes: all sent, what is learned, the framing."""
    return sum(sizes) * 7 + 3072 * len(sizes) + (1 << 17)


class Coding(NamedTuple):
    """How values are written; all ranks have the same."""

    gate: str
    value_dtype: str = "float32"  # a ValueDtype, or "dense": every element is sent, as DiLoCo does
    scale: float = 1.0  # the gate's; of log8 the units of a cell's width


def in_order(sends: Sends, segment: SharedSegment, coding: Coding) -> Sent:
    """What is sent of a segment, in the order in which its payload holds it."""
    if coding.value_dtype != "log8":
        return sends
    there = np.empty(len(sends.indices), np.float32)
    cpu.gather(segment.shared.view(np.uint32), sends.indices, there.view(np.uint32))
    return arrange(segment.classes, sends.indices, log8.to_codes(sends.values, there, coding.gate, coding.scale))


def encode(sent: Sequence[Sent], segments: Sequence[SharedSegment], coding: Coding) -> bytes:
    """One payload of these segments. The same gives the same bytes, whatever the number of threads.

    sent: of each segment, `in_order`.
    """
    if coding.value_dtype == "dense":
        return b"".join(one.astype("<f4", copy=False).tobytes() for one in sent if isinstance(one, np.ndarray))
    counts = np.array([len(one[0]) for one in sent], "<u4").tobytes()
    if coding.value_dtype == "log8":
        sizes = [segment.size for segment in segments]
        coded = list(map_segments(_encode_log8, zip(sent, segments, strict=True), sizes))
        lengths = np.array([len(each) for each in coded], "<u4").tobytes()
        body = [LENGTHS.pack(sum(map(len, coded)), LOG8), counts, lengths, *coded]
    else:
        sends = [one for one in sent if isinstance(one, Sends)]
        positions = _encode_positions(sends, segments, coding)
        exponents, rest = _split(np.concatenate([one.values for one in sends]), coding.value_dtype)
        frame = zstandard.ZstdCompressor(1).compress(exponents.tobytes())
        body = [LENGTHS.pack(len(positions), len(frame)), counts, positions, frame, rest.tobytes()]
    data = b"".join(body)
    return blake3(data).digest(HASH) + data


def open_payload(payload: memoryview, segments: Sequence[SharedSegment], coding: Coding) -> list[Decoder]:
    """Check a payload of these segments; returns one function a segment that decodes it and checks what it says.

    Raises FormatError for bytes that no `encode` wrote; so do the functions that it returns.
    """
    if coding.value_dtype == "dense":
        return _open_dense(payload, segments)
    header = HASH + LENGTHS.size + 4 * len(segments)
    most = limit([segment.size for segment in segments])
    if not header <= len(payload) <= most:
        raise FormatError(f"payload: expected {header} to {most} bytes, found {len(payload)}")
    if blake3(payload[HASH:]).digest(HASH) != bytes(payload[:HASH]):
        raise FormatError(f"payload: its {len(payload)} bytes do not match their hash")
    positions_nbytes, frame_nbytes = LENGTHS.unpack_from(payload, HASH)
    counts = np.frombuffer(payload[HASH + LENGTHS.size : header], "<u4").astype(np.int64)
    for count, segment in zip(counts.tolist(), segments, strict=True):
        if count > segment.size:
            raise FormatError(f"payload: expected at most {segment.size} sends of a segment, found {count}")
    if coding.value_dtype == "log8":
        first = header + 4 * len(segments)
        if frame_nbytes != LOG8 or first + positions_nbytes != len(payload):
            raise FormatError(
                f"payload: expected values as logarithms in {first + positions_nbytes} bytes, found {len(payload)} "
                f"bytes and {frame_nbytes} of exponents"
            )
        lengths = np.frombuffer(payload[header:first], "<u4").astype(np.int64)
        if lengths.sum() != positions_nbytes:
            raise FormatError(f"payload: expected streams of {positions_nbytes} bytes, found {lengths.sum()}")
        at = first + np.concatenate([[0], np.cumsum(lengths)])
        return [
            partial(_decode_log8, payload[a:b], count, segment, coding)
            for a, b, count, segment in zip(at, at[1:], counts.tolist(), segments, strict=False)
        ]
    total = int(counts.sum())
    width = (_MANTISSAS[coding.value_dtype] + 1) // 8
    expected = header + positions_nbytes + frame_nbytes + width * total
    if expected != len(payload):
        raise FormatError(f"payload: expected {expected} bytes, found {len(payload)}")
    frame = header + positions_nbytes
    units = _open_positions(payload[header:frame], _specs(segments, counts, coding))
    exponents = np.frombuffer(decompress(payload[frame : frame + frame_nbytes], total, "exponents"), np.uint8)
    if len(exponents) != total or (exponents == 0xFF).any():
        raise FormatError(f"payload: expected {total} exponents of finite values, found {len(exponents)}")
    values = _join(exponents, np.frombuffer(payload[frame + frame_nbytes :], np.uint8), coding.value_dtype)
    ends = np.cumsum(counts).tolist()
    return [
        partial(_decode, units, number, values[end - count : end], segment)
        for number, (count, end, segment) in enumerate(zip(counts.tolist(), ends, segments, strict=True))
    ]


def indices_of(sent: Sent, segment: SharedSegment) -> NDArray[np.uint32]:
    """The elements of a segment that are sent, (k,), each once."""
    if isinstance(sent, Places):
        return order(segment.classes)[sent.places].astype(np.uint32)
    return sent.indices if isinstance(sent, Sends) else np.arange(segment.size, dtype=np.uint32)


def rounded(values: F32, value_dtype: str) -> F32:
    """The values as they arrive when sent in that dtype: the rounding error stays in the residual."""
    if value_dtype != "bfloat16":  # of log8 they were made so
        return values
    widened: F32 = (cast(values, value_dtype).astype(np.uint32) << 16).view(np.float32)
    return widened


def _open_dense(payload: memoryview, segments: Sequence[SharedSegment]) -> list[Decoder]:
    ends = np.cumsum([segment.size for segment in segments]).tolist()
    if len(payload) != 4 * ends[-1]:
        raise FormatError(f"payload: expected {4 * ends[-1]} bytes, found {len(payload)}")
    values = np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise FormatError("payload: expected finite values, found an infinity or NaN")
    return [partial(np.ndarray.view, part) for part in np.split(values, ends[:-1])]


def _specs(segments: Sequence[SharedSegment], counts: NDArray[np.int64], coding: Coding) -> Specs:
    places = [(segment.size, segment.shape[-1] if segment.shape else 1, segment.start) for segment in segments]
    sizes, rows, starts = np.array(places, np.int64).reshape(-1, 3).T
    long = rows > SEGMENT
    strides, phases = np.where(long, sizes, rows), np.where(long, 0, starts % rows)
    return Specs(DTYPES[coding.gate][0], sizes, counts, strides, phases)


def _encode_positions(sends: Sequence[Sends], segments: Sequence[SharedSegment], coding: Coding) -> bytes:
    """Which elements are sent, as a block in which these move by one step: `u32 n | head of n bytes | span`."""
    counts = np.array([len(one.indices) for one in sends], np.int64)
    specs, edges = _specs(segments, counts, coding), np.append(0, np.cumsum(counts))
    old = np.concatenate([segment.bits[one.indices] for one, segment in zip(sends, segments, strict=True)])
    moved = moves.apply_moves(old, np.ones(len(old), np.bool_), np.ones(len(old), np.uint64), field_of(specs.dtype))
    changes = Changes(np.concatenate([one.indices for one in sends]), moved)
    run = Run(specs, edges, changes, old, OldReader(lambda number: segments[number].bits))
    head, (span,) = _CODEC.encode([run], [len(segments)])
    return struct.pack("<I", len(head)) + head + span


def _open_positions(block: memoryview, specs: Specs) -> Units:
    """The inverse: each segment is a unit. Raises FormatError."""
    if len(block) < 4:
        raise FormatError(f"payload: expected at least 4 bytes of positions, found {len(block)}")
    (nbytes,) = struct.unpack_from("<I", block)
    (span,) = _CODEC.open(block[4 : 4 + nbytes], [specs], [specs.segments])
    return span([block[4 + nbytes :]])


def _decode(units: Units, number: int, values: F32, segment: SharedSegment) -> Sends:
    (found,) = units.decode(np.array([number]), OldReader(lambda _: segment.bits), None)
    return Sends(found.changes.indices, values)


def _encode_log8(pair: tuple[Sent, SharedSegment]) -> bytes:
    sent, segment = pair
    assert isinstance(sent, Places)
    return streams.encode(segment.classes, sent)


def _decode_log8(data: memoryview, count: int, segment: SharedSegment, coding: Coding) -> Places:
    largest = log8.largest_codes(segment.classes.widths[:CLASSES], coding.scale)
    found = streams.decode(data, segment.classes, count, largest)
    if found is None:
        raise FormatError(
            f"payload: expected {count} finite sends of {segment.size} elements, found {len(data)} bytes that do not "
            "hold them"
        )
    return found


def _split(values: F32, value_dtype: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Exponents (k,), and sign and mantissa of each value in bytes, (k, 3) or (k, 1)."""
    mantissa = _MANTISSAS[value_dtype]
    bits = values.view(np.uint32)
    exponents = (bits >> 23).astype(np.uint8)
    rest = (bits >> 31 << mantissa) | (bits >> 23 - mantissa & (1 << mantissa) - 1)
    planes: UIntArray = rest.astype("<u4").view(np.uint8).reshape(-1, 4)[:, : (mantissa + 1) // 8]
    return exponents, planes


def _join(exponents: NDArray[np.uint8], planes: NDArray[np.uint8], value_dtype: str) -> F32:
    """The inverse of `_split`, float32 (k,)."""
    mantissa = _MANTISSAS[value_dtype]
    wide = np.zeros((len(exponents), 4), np.uint8)
    wide[:, : (mantissa + 1) // 8] = planes.reshape(len(exponents), (mantissa + 1) // 8)
    rest = wide.view("<u4").reshape(-1)
    bits = (rest >> mantissa << 31) | exponents.astype(np.uint32) << 23
    bits |= (rest & (1 << mantissa) - 1) << 23 - mantissa
    values: F32 = bits.astype(np.uint32, copy=False).view(np.float32)
    return values
