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

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import msgspec

from bench import ROOT
from bench.report import Progress, Table, ms, times
from pulse_rl.errors import IntegrityError, PulseError, require

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
        for name, full_checkpoints in (("torch.save", self.torch_save), ("safetensors", self.safetensors)):
            nbytes = f"{full_checkpoints.nbytes / 1e6:,.1f} MB"
            rows.append((name, ms(full_checkpoints.save_s), ms(full_checkpoints.load_s), nbytes))
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


def run(*, versions: int, layers: int, codec: str, progress: Progress) -> SyncBenchReport:
    """Measure everything in a temporary directory; needs about 2 GB of disk and 3 GB of memory.

    Raises MissingExtraError without torch or safetensors, IntegrityError if the two sides end with different bits.
    """
    require("torch", "torch")
    require("safetensors", "run")
    with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory:
        settings = {"directory": directory, "versions": versions, "layers": layers}
        progress(0, 3, "publisher")
        published = _run("publisher", settings | {"codec": codec})
        progress(1, 3, "subscriber")
        synced = _run("subscriber", settings)
        progress(2, 3, "full checkpoints")
        full = _run("full", settings)
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


def _run(role: str, settings: dict[str, object]) -> dict[str, Any]:
    """Run one role in its own process. Raises PulseError if that fails."""
    command = [sys.executable, "-m", "bench.roles", role, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PulseError(f"the {role} of the measurement failed with exit code {done.returncode}: {last[0]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
