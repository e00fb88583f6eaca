"""Publish and sync a 135M-parameter model end to end, next to what a user would write without pulse-rl.

Synthetic weights with SmolLM2-135M's tensors: FP32 masters on the trainer's side, moved as an Adam step of learning
rate 1e-6 moves them, so that about 0.15 % of the BF16 bits change a version. They are published with cast="bfloat16"
through a file store. The comparison is torch.save (or safetensors) of the cast weights, then loading the file and
copying it into the live model.

Publisher, subscriber and comparison run one after another, each in its own process. Their memory is the peak of RssAnon
(/proc/self/status, sampled every 2 ms): private memory that the kernel cannot reclaim, which leaves out mapped files;
above what the process held before the first version, with its weights, imports and compiled kernels. Nothing is
fsynced.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.report import Progress, Table, fresh_processes, ms, times
from bench.roles import full_checkpoints, publisher, subscriber
from pulse_rl.codecs.choose import CodecName
from pulse_rl.errors import IntegrityError

ALLOWANCE_NBYTES = 64_000_000  # of memory that each side may take above the model's bits and two patches


class Side(msgspec.Struct, frozen=True):
    """Time and memory of one side. each_s is the median in seconds, of patches only."""

    first_s: float  # seconds of the first version, which has an anchor
    each_s: float
    peak_nbytes: int  # over all versions, with the first
    promise_nbytes: int
    kept: bool  # peak_nbytes ≤ promise_nbytes


class FullCheckpoints(msgspec.Struct, frozen=True):
    """Full checkpoints without pulse-rl. Medians in seconds, with the cast and the copy into the live model."""

    save_s: float
    load_s: float
    nbytes: int


class SyncBenchReport(msgspec.Struct, frozen=True):
    """The whole measurement."""

    elements: int
    full_nbytes: int
    versions: int
    density: float  # median
    codec: str  # of the last patch
    patch_nbytes: int  # median
    reduction: float  # full_nbytes / patch_nbytes
    publisher: Side
    subscriber: Side
    torch_save: FullCheckpoints
    safetensors: FullCheckpoints

    def facts(self) -> dict[str, object]:
        return {
            "model": f"{self.elements:,} elements, {self.full_nbytes / 1e6:,.0f} MB of BF16",
            "versions": f"{self.versions} after the first",
            "patch": f"{self.codec}, {self.patch_nbytes:,} bytes at {self.density:.3%}, "
            f"{self.reduction:,.0f} times less",
        }

    def tables(self) -> list[Table]:
        full = self.full_nbytes / 1e6
        rows = [
            (
                "pulse, a patch",
                ms(self.publisher.each_s),
                ms(self.subscriber.each_s),
                f"{self.patch_nbytes / 1e6:,.2f} MB",
            ),
            ("pulse, the anchor", ms(self.publisher.first_s), ms(self.subscriber.first_s), f"{full:,.1f} MB"),
        ]
        for name, plain in (("torch.save", self.torch_save), ("safetensors", self.safetensors)):
            rows.append((name, ms(plain.save_s), ms(plain.load_s), f"{plain.nbytes / 1e6:,.1f} MB"))
        memory = [
            (
                name,
                f"{side.peak_nbytes / 1e6:,.1f} MB",
                f"≤ {side.promise_nbytes / 1e6:,.1f} MB",
                "kept" if side.kept else "broken",
            )
            for name, side in (("publisher", self.publisher), ("subscriber", self.subscriber))
        ]
        speed = (self.safetensors.save_s + self.safetensors.load_s) / (self.publisher.each_s + self.subscriber.each_s)
        return [
            (("method", "publish", "sync", "sent"), rows),
            (("memory", "peak", "promise", ""), memory),
            (("", "faster"), [("publish and sync, against safetensors, without a network", times(speed))]),
        ]


def sync(
    *,
    versions: Annotated[int, typer.Option(min=2, help="Versions to publish after the first.")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    codec: Annotated[CodecName, typer.Option(help="The publisher's codec.")] = "auto",
    progress: Progress,
) -> SyncBenchReport:
    """Time publish and sync of a 135M-parameter model through a file store, and measure the memory of each side.

    A plain save and load is measured too. Each side is a process. Needs the extra torch.

    Needs about 2 GB of disk and 3 GB of memory.
    """
    with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory, fresh_processes(1) as pool:
        where = Path(directory)
        progress(0, 3, "publisher")
        published = pool.submit(publisher, where, versions, layers, codec).result()
        progress(1, 3, "subscriber")
        synced = pool.submit(subscriber, where, versions, layers).result()
        progress(2, 3, "full checkpoints")
        full = pool.submit(full_checkpoints, where, versions, layers).result()
    if synced["digests"] != published["digests"]:
        raise IntegrityError(
            f"the subscriber's digests: expected {published['digests']}, as published, found {synced['digests']}"
        )
    patch_nbytes = int(statistics.median(published["patch_nbytes"]))
    full_nbytes = published["full_nbytes"]
    allowance = 2 * max(published["patch_nbytes"]) + ALLOWANCE_NBYTES
    return SyncBenchReport(
        elements=published["elements"],
        full_nbytes=full_nbytes,
        versions=versions,
        density=statistics.median(published["density"]),
        codec=published["codec"],
        patch_nbytes=patch_nbytes,
        reduction=full_nbytes / patch_nbytes,
        publisher=_side(published, full_nbytes + allowance),
        subscriber=_side(synced, allowance),
        torch_save=FullCheckpoints(**full["torch"]),
        safetensors=FullCheckpoints(**full["safetensors"]),
    )


def _side(result: dict[str, Any], promise_nbytes: int) -> Side:
    first, *others = result["seconds"]
    peak = result["peak_nbytes"]
    return Side(first, statistics.median(others), peak, promise_nbytes, peak <= promise_nbytes)
