"""The hot loops compared with a plain copy of the same bytes, which is as fast as memory allows.

find_changes and digest run in one thread, segment by segment, as one worker thread runs them; the copy is np.copyto, in
one thread too. Applying a patch overwrites some of the cache lines that a copy of the model overwrites, and these are
its lower limit: with uniformly scattered changes, a density of 1 % touches 27 % of the 64-byte lines of BF16 weights.
So `write_floor_s` is the time that the copy takes for the touched lines alone. Apply runs on all threads, as users run
it. Changes are scattered uniformly, the hardest case for all of these.
"""

from typing import Annotated

import msgspec
import numpy as np
import typer

import pulse_rl as pulse
from bench.report import Progress, Stopwatch, Table, ms, times
from pulse_rl.dtypes import UIntArray
from pulse_rl.kernels import cpu
from pulse_rl.parallel import threads
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.apply import Application
from pulse_rl.patch.live import resolve
from pulse_rl.weights.layout import layout
from pulse_rl.weights.segments import SEGMENT, segments

DENSITIES = (0.001, 0.0015, 0.01, 0.05)
LINE_NBYTES = 64
TENSOR_ELEMENTS = 1 << 23  # the flat weights are cut into tensors of this size for apply


class FindResult(msgspec.Struct, frozen=True):
    """find_changes at one density. Medians in seconds, one thread."""

    density: float
    changes: int
    copy_s: float  # np.copyto of the same bytes
    find_s: float
    numpy_s: float  # np.flatnonzero(old != new)
    of_copy: float  # copy_s / find_s; target ≥ 0.8 at 1 %
    over_numpy: float  # numpy_s / find_s; target ≥ 2


class ApplyResult(msgspec.Struct, frozen=True):
    """Applying a patch of one density. Medians in seconds, on all threads; the copy in one."""

    density: float
    patch_nbytes: int
    touched_lines: float  # of the weights' 64-byte cache lines, those that hold a change
    copy_s: float  # np.copyto of the whole model
    write_floor_s: float  # copy_s · touched_lines
    write_s: float  # Application.write: overwrite and read back
    step_s: float  # parse, decode, prove against a known digest, write: a subscriber's work per version
    apply_s: float  # pulse.apply, which computes the digest of the whole base first
    over_copy: float  # copy_s / write_s; target ≥ 20 at 1 %


class KernelsReport(msgspec.Struct, frozen=True):
    """The whole measurement."""

    elements: int
    full_nbytes: int
    threads: int
    rounds: int
    copy_gbs: float  # of np.copyto, GB copied a second (each is read once and written once)
    digest_gbs: float  # GB read a second, one thread
    find: tuple[FindResult, ...]
    apply: tuple[ApplyResult, ...]

    def facts(self) -> dict[str, object]:
        return {
            "weights": f"{self.elements:,} BF16 elements, {self.full_nbytes / 1e6:,.0f} MB",
            "threads": f"1 for copy, find and digest, {self.threads} for apply; medians of {self.rounds} rounds",
            "copy": f"{self.copy_gbs:.1f} GB/s",
            "digest": f"{self.digest_gbs:.1f} GB/s",
        }

    def tables(self) -> list[Table]:
        found = [
            (f"{r.density:.2%}", ms(r.copy_s), ms(r.find_s), ms(r.numpy_s), times(r.of_copy), times(r.over_numpy))
            for r in self.find
        ]
        applied = [
            (
                f"{r.density:.2%}",
                ms(r.copy_s),
                f"{r.touched_lines:.1%}",
                ms(r.write_floor_s),
                ms(r.write_s),
                times(r.over_copy),
                ms(r.step_s),
                ms(r.apply_s),
            )
            for r in self.apply
        ]
        return [
            (("density", "copy", "find", "numpy", "of copy (≥ 0.8)", "over numpy (≥ 2)"), found),
            (
                ("density", "copy", "lines", "floor", "write", "over copy (≥ 20)", "decode+prove+write", "apply"),
                applied,
            ),
        ]


def kernels(
    *,
    elements: Annotated[int, typer.Option(min=1, help="BF16 elements; the default is SmolLM2-135M's.")] = 134_515_008,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 7,
    progress: Progress,
) -> KernelsReport:
    """Time find_changes, digest and apply, against a copy of the same bytes and against NumPy.

    Takes about ten bytes of memory per element.
    """
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << 16, elements, dtype=np.uint16)
    spare = old.copy()
    steps = 2 * len(DENSITIES)
    found, applied = [], []
    digest = Stopwatch()
    for place, density in enumerate(DENSITIES):
        where = np.flatnonzero(rng.random(elements, dtype=np.float32) < density)
        new = old.copy()
        new[where] ^= 1
        progress(2 * place, steps, f"find at {density:.2%}")
        found.append(_find(old, new, spare, density, rounds))
        progress(2 * place + 1, steps, f"apply at {density:.2%}")
        applied.append(_apply(old, new, spare, where, density, rounds))
    for _ in range(rounds):
        digest.time("digest", lambda: [cpu.digest_range(1, a, old[a:b]) for a, b in segments(elements)])
    copy_s = min(result.copy_s for result in found)
    return KernelsReport(
        elements=elements,
        full_nbytes=old.nbytes,
        threads=threads(),
        rounds=rounds,
        copy_gbs=old.nbytes / copy_s / 1e9,
        digest_gbs=old.nbytes / digest.median("digest") / 1e9,
        find=tuple(found),
        apply=tuple(applied),
    )


def _find(old: UIntArray, new: UIntArray, spare: UIntArray, density: float, rounds: int) -> FindResult:
    indices, values = np.empty(SEGMENT + cpu.SLACK, np.uint32), np.empty(SEGMENT + cpu.SLACK, old.dtype)
    cut = segments(len(old))

    def find() -> int:
        return sum(cpu.find_changes(old[a:b], new[a:b], indices, values) for a, b in cut)

    changes = find()
    clock = Stopwatch()
    for _ in range(rounds):
        clock.time("copy", lambda: np.copyto(spare, new))
        clock.time("find", find)
        clock.time("numpy", lambda: np.flatnonzero(old != new))
    copy_s, find_s, numpy_s = (clock.median(name) for name in ("copy", "find", "numpy"))
    return FindResult(density, changes, copy_s, find_s, numpy_s, copy_s / find_s, numpy_s / find_s)


def _apply(
    old: UIntArray, new: UIntArray, spare: UIntArray, where: "np.typing.NDArray[np.int64]", density: float, rounds: int
) -> ApplyResult:
    """Apply a patch and its inverse in turns."""

    def cut(flat: UIntArray) -> dict[str, UIntArray]:
        starts = range(0, len(flat), TENSOR_ELEMENTS)
        return {f"{start:012d}": flat[start : start + TENSOR_ELEMENTS] for start in starts}

    live = cut(old.copy())
    patches = [pulse.diff(*sides, codec="gap") for sides in ((cut(old), cut(new)), (cut(new), cut(old)))]
    clock = Stopwatch()

    def step(data: bytes, base_digest: int) -> None:
        patch = patch_format.unpack(data)
        application = Application(patch, resolve(patch.by_name(), patch.tied, layout(live)))
        application.prove(base_digest)
        clock.time("write", application.write)

    for number in range(rounds + rounds % 2):
        data = patches[number % 2]
        base_digest = int(patch_format.unpack(data).header.base_digest, 16)
        clock.time("copy", lambda: np.copyto(spare, new))
        clock.time("step", lambda data=data, base_digest=base_digest: step(data, base_digest))  # type: ignore[misc]
    for number in range(rounds + rounds % 2):
        clock.time("copy", lambda: np.copyto(spare, new))
        clock.time("apply", lambda data=patches[number % 2]: pulse.apply(live, data))  # type: ignore[misc]
    line = LINE_NBYTES // old.itemsize
    touched = len(np.unique(where // line)) / -(-len(old) // line)
    copy_s, write_s = clock.median("copy"), clock.median("write")
    return ApplyResult(
        density=density,
        patch_nbytes=len(patches[0]),
        touched_lines=touched,
        copy_s=copy_s,
        write_floor_s=copy_s * touched,
        write_s=write_s,
        step_s=clock.median("step"),
        apply_s=clock.median("apply"),
        over_copy=copy_s / write_s,
    )
