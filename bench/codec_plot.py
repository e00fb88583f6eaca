"""Draw where changes are and how many bits each part of them takes: python -m bench.codec_plot OLD NEW docs/codec.svg

Left, by exponent of the old value: the probability of a change, the share of the elements, the share of the changes.
Right, the bits per change of each part, `context` next to `gap`. The bits of a `context` stream are divided by the
codec's counting mode: it counts the ones and the bits in every context, and the code length of a running mean depends
on nothing else (it is that of a Beta-binomial). The computed lengths differ from those of the written streams by less
than 0.1 %, which is printed: after 1,000 bits the running mean becomes a window.
"""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import lgamma, log
from pathlib import Path
from typing import Any

import numpy as np

from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import field_of
from pulse_rl.kernels.cpu import coding, context, rangecoder
from pulse_rl.kernels.cpu.coding import Kind, MemoryRows, SegmentMoves, Starts
from pulse_rl.kernels.cpu.study import count_exponents
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.encode import encode
from pulse_rl.weights.layout import Layout

BF16 = field_of("BF16")
WIDTH, HEIGHT, BOTTOM, TOP = 930, 350, 300, 20
LEFT, MIDDLE = 50, 520  # where the two drawings start
PLOT = 390  # width of the left one
EXPONENTS = range(-20, 1)  # of 2, drawn
COLORS = {
    "positions": "#1f5f99",
    "directions": "#4f9bd9",
    "sizes": "#a8cdee",
    "new values": "#7fb4e3",
    "statistics": "#e0a030",
    "container": "#999",
}

_log_gamma = np.vectorize(lgamma, otypes=[float])


def code_bits(states: Any, counts: Any) -> Any:
    """Bits that each context's decisions take, from its first state and its counts (ones << 32 | bits)."""
    ones, bits = counts >> 32, counts & 0xFFFFFFFF
    weight = (states & rangecoder.LIMIT) + 0.5  # of the first probability: the step after n bits is 1 / (n + 1.5)
    first = (states >> rangecoder.SEEN) / 2.0**32 * weight

    def rising(start: Any, count: Any) -> Any:
        return _log_gamma(start + count) - _log_gamma(start)

    return (rising(weight, bits) - rising(first, ones) - rising(weight - first, bits - ones)) / log(2)


@contextmanager
def counted() -> Iterator[list[tuple[Any, Any, int]]]:
    """Collect the segments that are coded inside: each one's first states, its counts, and the bytes of its stream."""
    original = coding.encode_segments
    found: list[tuple[Any, Any, int]] = []

    def spy(memory: MemoryRows, kind: Kind, starts: Starts, changes: SegmentMoves) -> list[bytes | None]:
        streams = original(memory, kind, starts, changes)
        for number, stream in enumerate(streams):
            if stream is None:
                continue
            one, (a, b) = np.array([number]), changes.edges[number : number + 2]
            alone = Kind(*kind[:2], *(each[one] for each in kind[2:]))
            mine = SegmentMoves(
                changes.edges[number : number + 2] - a, changes.indices[a:b], changes.moved.at(slice(a, b))
            )
            counts = starts._replace(states=np.zeros_like(starts.states))
            coding.count_bits(memory.of(one), alone, counts, mine)
            which = kind.classes[number]
            found.append((starts.states[which], counts.states[which], len(stream)))
        return streams

    coding.encode_segments = spy
    try:
        yield found
    finally:
        coding.encode_segments = original


def context_parts(old: Layout, new: Layout) -> tuple[dict[str, float], int]:
    """Bits of a `context` patch by part, and the changes."""
    with counted() as found:
        (patch,) = encode(old, new, base=0, target=1, codecs=[CODECS["context"]])
    unary, scale, top, gap, sign, end = context.tables(BF16.exponents)
    parts = dict.fromkeys(("positions", "directions", "sizes"), 0.0)
    for states, counts, _ in found:
        bits, ones, seen = code_bits(states, counts), counts >> 32, counts & 0xFFFFFFFF
        # Raw bits: of a gap all below the bit that follows its length, of a size all below two such bits.
        lengths = seen[gap + 32 : gap + 64]
        raw_gaps = int((lengths * np.maximum(np.arange(32) - 1, 0)).sum())
        raw_sizes = int(ones[unary:scale].reshape(-1, context.UNARY)[:, 2:].sum() + ones[scale:top].sum())
        parts["positions"] += bits[:unary].sum() + bits[gap:sign].sum() + raw_gaps
        parts["directions"] += bits[sign:end].sum()
        parts["sizes"] += bits[unary:gap].sum() + raw_sizes
    coded, streams = sum(parts.values()), 8 * sum(nbytes for *_, nbytes in found)
    print(f"code lengths counted: {coded:,.0f} bits, streams written: {streams:,} bits ({coded / streams - 1:+.3%})")
    parts = {name: bits * streams / coded for name, bits in parts.items()}
    read = patch_format.unpack(patch.data)
    payload = sum(len(block.shared or b"") for block in read.blocks) + sum(map(len, read.payloads.values()))
    parts["statistics"] = 8 * payload - streams
    parts["container"] = 8 * (len(patch.data) - payload)
    return parts, patch.changes


def gap_parts(old: Layout, new: Layout) -> dict[str, float]:
    """Bits of a `gap` patch by part."""
    (patch,) = encode(old, new, base=0, target=1, codecs=[CODECS["gap"]])
    spans = patch_format.unpack(patch.data).payloads.values()
    positions = sum(4 + struct.unpack_from("<I", span)[0] for span in spans)
    payload = sum(map(len, spans))
    return {
        "positions": 8 * positions,
        "new values": 8 * (payload - positions),
        "container": 8 * (len(patch.data) - payload),
    }


def by_exponent(old: Layout, new: Layout) -> tuple[Any, Any]:
    """Elements and changes with each exponent of the old value, (E,)."""
    elements, changes = np.zeros(BF16.exponents, np.int64), np.zeros(BF16.exponents, np.int64)
    for name, bits in old.items():
        before, after = bits.read(0, bits.size), new[name].read(0, bits.size)
        elements += count_exponents(before, BF16)
        changes += count_exponents(before[before != after], BF16)
    return elements, changes


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def draw_exponents(elements: Any, changes: Any) -> str:
    places = [127 + e for e in EXPONENTS]
    rate = changes / np.maximum(elements, 1)
    step = PLOT / len(places)

    def x(k: float) -> float:
        return LEFT + step * (k + 0.5)

    def y(value: float) -> float:
        return BOTTOM - value * (BOTTOM - TOP)

    out = [
        f'<path d="M{LEFT} {y(v):.1f}h{PLOT}" stroke="#ddd"/>' + text(LEFT - 8, y(v) + 4, f"{v:.0%}", "end")
        for v in (0, 0.25, 0.5, 0.75, 1)
    ]
    for share, color, offset in ((elements / elements.sum(), "#bbb", -0.42), (changes / changes.sum(), "#e0a030", 0)):
        out += [
            f'<rect x="{x(k + offset):.1f}" y="{y(share[p]):.1f}" width="{step * 0.42:.1f}" '
            f'height="{BOTTOM - y(share[p]):.1f}" fill="{color}"/>'
            for k, p in enumerate(places)
        ]
    held = [(k, p) for k, p in enumerate(places) if elements[p]]
    line = " ".join(f"{x(k):.1f},{y(rate[p]):.1f}" for k, p in held)
    out.append(f'<polyline points="{line}" fill="none" stroke="#1f5f99" stroke-width="2"/>')
    out += [f'<circle cx="{x(k):.1f}" cy="{y(rate[p]):.1f}" r="3" fill="#1f5f99"/>' for k, p in held]
    out += [
        text(x(k), BOTTOM + 18, f'2<tspan dy="-5" font-size="9">{str(e).replace("-", "−")}</tspan>')
        for k, e in enumerate(EXPONENTS)
        if e % 4 == 0
    ]
    legend = (("#1f5f99", "probability that it changes"), ("#bbb", "share of all elements"))
    for row, (color, words) in enumerate((*legend, ("#e0a030", "share of all changes"))):
        out.append(f'<rect x="{LEFT + 190}" y="{TOP + 8 + 20 * row}" width="12" height="12" fill="{color}"/>')
        out.append(text(LEFT + 208, TOP + 18 + 20 * row, words, "start"))
    out.append(text(LEFT + PLOT / 2, BOTTOM + 40, "magnitude of the old value"))
    return "".join(out)


def draw_parts(parts: dict[str, dict[str, float]], changes: int) -> str:
    """Bits per change, one column per codec."""
    highest = max(sum(each.values()) for each in parts.values()) / changes
    unit = (BOTTOM - TOP) / highest
    out = [f'<path d="M{MIDDLE} {BOTTOM}h{WIDTH - MIDDLE - 10}" stroke="#888"/>']
    for column, (name, each) in enumerate(parts.items()):
        x, y = MIDDLE + 20 + 190 * column, float(BOTTOM)
        labels_from = BOTTOM + 4.0
        for part, bits in each.items():
            height = bits / changes * unit
            y -= height
            out.append(f'<rect x="{x}" y="{y:.1f}" width="60" height="{height:.1f}" fill="{COLORS[part]}"/>')
            # Thin parts: labels keep a line's distance and point at theirs.
            labels_from = min(labels_from - 15, y + height / 2 + 4)
            out.append(f'<path d="M{x + 60} {y + height / 2:.1f}L{x + 68} {labels_from - 4:.1f}" stroke="#888"/>')
            out.append(text(x + 71, labels_from, f"{part} {bits / changes:.2f}", "start"))
        out.append(text(x + 30, BOTTOM + 18, f"{name}: {sum(each.values()) / changes:.2f}"))
    out.append(text((MIDDLE + WIDTH) / 2, BOTTOM + 40, "bits a change, everything included"))
    return "".join(out)


def main(old_path: str, new_path: str, target: str) -> None:
    old, new = open_checkpoint(old_path), open_checkpoint(new_path)
    mine, changes = context_parts(old, new)
    parts = {"context": mine, "gap": gap_parts(old, new)}
    for name, each in parts.items():
        print(name, {part: round(bits / changes, 3) for part, bits in each.items()})
    elements, changed = by_exponent(old, new)
    Path(target).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        f"{draw_exponents(elements, changed)}{draw_parts(parts, changes)}</svg>\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
