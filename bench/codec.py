"""Every codec on real pairs of checkpoints, compared with what a user might do instead and with the `bound`.

Everything runs in one thread, as with PULSE_THREADS=1, on weights in memory, one method after another. Encoding starts
from both states and the old one's digest; decoding starts from the patch's bytes and ends when only the writing is
left. Of a codec it includes proving the target's digest; zstd and XOR prove nothing. After each method all bits are
compared.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
import typer
import zstandard
from numpy.typing import NDArray

from bench.bound import bounds
from bench.report import Progress, Stopwatch, Table, ms, show
from pulse_rl.checkpoint.files import open_checkpoint
from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson
from pulse_rl.codecs.base import Codec
from pulse_rl.codecs.choose import CODECS
from pulse_rl.dtypes import UINTS
from pulse_rl.parallel import threads
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.encode import find
from pulse_rl.patch.live import resolve
from pulse_rl.patch.verbs import pair
from pulse_rl.units import nbytes
from pulse_rl.weights import digests
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.changes import find_changes
from pulse_rl.weights.layout import Layout

ALIGNMENT = 64  # bytes at which tensors start
PATCH_FROM_LIMIT = 1 << 30  # bytes of a model: zstd takes about eight times as much memory to search it


class CodecResult(msgspec.Struct, frozen=True):
    """One codec on one pair. Medians in seconds, one thread."""

    name: str
    nbytes: int  # of the patch, everything included
    bits_per_change: float
    of_bound: float  # 8 · nbytes / bound_bits
    reduction: float  # bytes of the full model / nbytes
    encode_s: float  # both states → patch
    decode_s: float  # patch → changes, proved
    apply_s: float  # patch → changed weights: decode_s and the writing
    exact: bool  # every bit of the changed weights is the new state's, in every round


class PairResult(msgspec.Struct, frozen=True):
    """All codecs on one pair of checkpoints."""

    pair: tuple[str, str]  # old and new
    elements: int
    full_nbytes: int
    changes: int
    density: float  # changes / elements
    bound_bits: float  # the conditional bound with a table for each tensor: positions_bits + moves_bits
    positions_bits: float  # its part for changed or not, given the exponent
    moves_bits: float  # its part for the difference of the ordered bit patterns, given the exponent
    pooled_bits: float  # the conditional bound with one table for all tensors of a dtype
    read_old_s: float  # one read of the old bits: the floor of decode
    read_both_s: float  # one read of the old and the new bits: the floor of encode
    rounds: int
    codecs: tuple[CodecResult, ...]
    skipped: dict[str, str]  # method → why it was not measured

    def facts(self) -> dict[str, object]:
        each = max(1, self.changes)
        return {
            "pair": " → ".join(self.pair),
            "model": f"{self.elements:,} elements, {nbytes(self.full_nbytes)}",
            "changes": f"{self.changes:,} ({self.density:.4%})",
            "bound": f"{self.bound_bits / each:.3f} bits a change: {self.positions_bits / each:.3f} positions, "
            f"{self.moves_bits / each:.3f} moves; {self.pooled_bits / each:.3f} with one table",
            "floor": f"{ms(self.read_old_s)} to read the old bits, {ms(self.read_both_s)} to read both",
            "times": f"one thread, medians of {self.rounds} rounds",
            **{name: f"skipped: {reason}" for name, reason in self.skipped.items()},
        }

    def tables(self) -> list[Table]:
        rows = [
            (
                r.name,
                f"{r.nbytes:,}",
                f"{r.bits_per_change:.3f}",
                f"{r.of_bound:.3f}",
                f"{r.reduction:,.1f}",
                ms(r.encode_s),
                ms(r.decode_s),
                ms(r.apply_s),
                "yes" if r.exact else "NO",
            )
            for r in self.codecs
        ]
        columns = ("codec", "bytes", "bits a change", "of bound", "reduction", "encode", "decode", "apply", "exact")
        return [(columns, rows)]


class CheckpointsResult(msgspec.Struct, frozen=True):
    """Every consecutive pair of a run's checkpoints."""

    pairs: tuple[PairResult, ...]


class Weights(NamedTuple):
    """A model's bits in one array, to be patched as tensors and as plain bytes."""

    flat: NDArray[np.uint8]
    tensors: Layout


class Method(Protocol):
    """A method to code the change from one state to another as bytes."""

    name: str

    def encode(self, old: Weights, new: Weights) -> bytes: ...

    def decode(self, patch: bytes, live: Weights) -> Callable[[], None]:
        """Do everything that needs the old state. Returns a function that writes the new one into live."""


def consecutive(directory: Path) -> list[tuple[Path, Path]]:
    """Every two neighbours among a directory's checkpoints, which are files or directories of shards.

    In natural order, in which step-9 comes before step-10. Raises ValueError if there are fewer than two,
    FileNotFoundError if there is no such directory.
    """
    found = [path for path in directory.iterdir() if path.suffix == ".safetensors" or any(path.glob("*.safetensors"))]
    if len(found) < 2:
        raise ValueError(f"{directory}: expected at least two checkpoints, found {len(found)}")
    return list(pairwise(sorted(found, key=_natural)))


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    parts = re.findall(r"\d+|\D+", path.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def measure(old: Path, new: Path, *, rounds: int, progress: Progress) -> PairResult:
    """Measure every method on one pair. Takes the memory of three copies of the model and what zstd needs.

    Raises BaseMismatchError if the tensors differ, and whatever opening a checkpoint raises.
    """
    with _one_thread():
        before, after = map(_load, pair(open_checkpoint(old), open_checkpoint(new))[:2])
        live = _load(before.tensors)
        base_digest = digests.state_digest(before.tensors)
        full_nbytes = before.tensors.nbytes
        methods: list[Method] = [_Patch(codec, base_digest) for codec in CODECS.values()]
        skipped = {}
        if full_nbytes <= PATCH_FROM_LIMIT:
            methods.append(_PatchFrom())
        else:
            limit = nbytes(PATCH_FROM_LIMIT)
            skipped[_PatchFrom.name] = f"expected a model of at most {limit}, found {nbytes(full_nbytes)}"
        methods.append(_Xor())
        progress(0, rounds + 1, "bound")
        by_tensor, pooled, changes = bounds(before.tensors, after.tensors)
        words, copied = before.flat.view(np.uint64), live.flat.view(np.uint64)
        clock = Stopwatch()
        sizes: dict[str, int] = {}
        exact = dict.fromkeys((method.name for method in methods), True)
        for number in range(rounds):
            progress(number + 1, rounds + 1, f"round {number + 1}")
            np.copyto(live.flat, before.flat)
            clock.time("read old", lambda: words.max(initial=0))
            clock.time("read both", lambda: find_changes(words, copied))
            for method in methods:
                np.copyto(live.flat, before.flat)
                sizes[method.name] = _measure_once(clock, method, before, after, live)
                exact[method.name] &= np.array_equal(live.flat, after.flat)

    def result(name: str) -> CodecResult:
        size, decode_s = sizes[name], clock.median(f"{name} decode")
        return CodecResult(
            name=name,
            nbytes=size,
            bits_per_change=8 * size / changes if changes else float("inf"),
            of_bound=8 * size / by_tensor.bits if by_tensor.bits else float("inf"),
            reduction=full_nbytes / size,
            encode_s=clock.median(f"{name} encode"),
            decode_s=decode_s,
            apply_s=decode_s + clock.median(f"{name} write"),
            exact=exact[name],
        )

    elements = before.tensors.elements
    return PairResult(
        pair=(str(old), str(new)),
        elements=elements,
        full_nbytes=full_nbytes,
        changes=changes,
        density=changes / elements if elements else 0.0,
        bound_bits=by_tensor.bits,
        positions_bits=by_tensor.positions,
        moves_bits=by_tensor.moves,
        pooled_bits=pooled.bits,
        read_old_s=clock.median("read old"),
        read_both_s=clock.median("read both"),
        rounds=rounds,
        codecs=tuple(result(method.name) for method in methods),
        skipped=skipped,
    )


def codec(
    old: Annotated[
        Path | None, typer.Argument(metavar="OLD", help="A safetensors file or a directory of shards.")
    ] = None,
    new: Annotated[Path | None, typer.Argument(metavar="NEW", help="The next version, with the same tensors.")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead of OLD and NEW: every two consecutive checkpoints in DIR, by name."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Code the changes from OLD to NEW by every codec, by zstd and as XOR, and compare with the entropy bound.

    Runs in one thread and in memory: three times the model, and eight times more
    for zstd, which codes models of up to 1 GiB.
    """
    if (old is None) != (new is None) or (old is None) == (checkpoints is None):
        raise typer.BadParameter("expected either OLD and NEW or --checkpoints DIR")
    pairs = consecutive(checkpoints) if checkpoints else [(Path(str(old)), Path(str(new)))]
    results = []
    for before, after in pairs:
        with output.progress(f"{before.name} → {after.name}") as update:
            results.append(measure(before, after, rounds=rounds, progress=update))
        if not as_json:
            show(results[-1], as_json)
            output.write("\n")
    if as_json:
        output.emit(CheckpointsResult(tuple(results)) if checkpoints else results[0])


@contextmanager
def _one_thread() -> Iterator[None]:
    setting = os.environ.get("PULSE_THREADS")
    os.environ["PULSE_THREADS"] = "1"
    threads.cache_clear()
    try:
        yield
    finally:
        if setting is None:
            del os.environ["PULSE_THREADS"]
        else:
            os.environ["PULSE_THREADS"] = setting
        threads.cache_clear()


def _load(tensors: Mapping[str, Bits]) -> Weights:
    """A copy of these tensors."""
    sizes = [bits.size * bits.itemsize for bits in tensors.values()]
    *starts, total = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    flat = np.zeros(total, np.uint8)
    placed = Layout()
    for (name, bits), start, size in zip(tensors.items(), starts, sizes, strict=True):
        elements = flat[start : start + size].view(UINTS[bits.itemsize])
        elements[:] = bits.read(0, bits.size)
        placed[name] = HostBits(bits.dtype, elements.reshape(bits.shape))
    return Weights(flat, placed)


def _measure_once(clock: Stopwatch, method: Method, old: Weights, new: Weights, live: Weights) -> int:
    """Encode, decode and write once, timed. Returns the bytes of the patch."""
    patches: list[bytes] = []
    writes: list[Callable[[], None]] = []
    clock.time(f"{method.name} encode", lambda: patches.append(method.encode(old, new)))
    clock.time(f"{method.name} decode", lambda: writes.append(method.decode(patches[0], live)))
    clock.time(f"{method.name} write", writes[0])
    return len(patches[0])


class _Patch:
    """A patch by one codec."""

    def __init__(self, codec: Codec, base_digest: int) -> None:
        self.name = codec.name
        self._codec = codec
        self._base_digest = base_digest

    def encode(self, old: Weights, new: Weights) -> bytes:
        found, before = find(old.tensors, new.tensors, codecs=[self._codec]), self._base_digest
        (coded,) = found.code()
        return coded.finish(base=0, target=1, base_digest=before, target_digest=before + found.delta).data

    def decode(self, patch: bytes, live: Weights) -> Callable[[], None]:
        parsed = patch_format.unpack(patch)
        application = Application(parsed, resolve(parsed.by_name(), parsed.tied, live.tensors))
        application.prove(self._base_digest)
        return application.write


class _PatchFrom:
    """The new bytes by zstd, with the old bytes as dictionary, as `zstd --patch-from` does.

    Its long-distance matcher ignores dictionaries that this library loads, and its fast strategies index only the last
    16 MB of one; `greedy` indexes all of it if the hash table is large enough.
    """

    name = "zstd patch-from"

    def encode(self, old: Weights, new: Weights) -> bytes:
        reach = max(12, len(old.flat).bit_length())
        parameters = zstandard.ZstdCompressionParameters.from_level(
            3, window_log=reach, hash_log=reach - 2, strategy=zstandard.STRATEGY_GREEDY
        )
        compressor = zstandard.ZstdCompressor(dict_data=_dictionary(old), compression_params=parameters)
        coded: bytes = compressor.compress(new.flat.data)
        return coded

    def decode(self, patch: bytes, live: Weights) -> Callable[[], None]:
        decompressor = zstandard.ZstdDecompressor(dict_data=_dictionary(live), max_window_size=1 << 31)
        new = np.frombuffer(decompressor.decompress(patch), np.uint8)
        return lambda: np.copyto(live.flat, new)


def _dictionary(weights: Weights) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(weights.flat.data, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


class _Xor:
    """The XOR of both states, which is nearly all zeros, by zstd."""

    name = "xor zstd-1"

    def encode(self, old: Weights, new: Weights) -> bytes:
        coded: bytes = zstandard.ZstdCompressor(level=1).compress((old.flat ^ new.flat).data)
        return coded

    def decode(self, patch: bytes, live: Weights) -> Callable[[], None]:
        flips = np.frombuffer(zstandard.ZstdDecompressor().decompress(patch), np.uint8)

        def write() -> None:
            live.flat[:] ^= flips

        return write
