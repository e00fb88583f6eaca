"""Publish and sync a 135M-parameter model end to end, and what a user would write himself.

Synthetic weights with SmolLM2-135M's tensors: FP32 masters on the trainer's side, moved as an Adam step of
learning rate 1e-6 moves them, so that about 0.15 % of the BF16 bits change a version; published with
cast="bfloat16" through a file store. The other way is torch.save (or safetensors) of the cast weights, then
loading the file and copying it into the live model.

Publisher, subscriber and the plain way each run in a process of their own, one after another. Their memory is
the peak of RssAnon (/proc/self/status, sampled every 2 ms): private memory that the kernel cannot take back
by itself, so without mapped files; above what the process held with its weights and imports, and kernels
warm, before the first version. Nobody calls fsync.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.bench.report import Progress, Table, ms, times
from pulse_rl.errors import PulseError, require

ALLOWANCE_NBYTES = 64_000_000  # what both sides may take beyond the model's bits and two patches


class Side(msgspec.Struct, frozen=True):
    """One side's time and memory. Medians in seconds; patches only, but for first_s."""

    first_s: float  # of the first version, which is an anchor
    each_s: float
    peak_nbytes: int  # of all versions, the first one too
    promise_nbytes: int
    kept: bool  # peak_nbytes ≤ promise_nbytes


class Plain(msgspec.Struct, frozen=True):
    """Full checkpoints by hand. Medians in seconds, cast and copy into the live model included."""

    save_s: float
    load_s: float
    nbytes: int


class SyncReport(msgspec.Struct, frozen=True):
    """All of it."""

    elements: int
    full_nbytes: int
    versions: int
    density: float  # median
    codec: str  # of the last patch
    patch_nbytes: int  # median
    reduction: float  # full_nbytes / patch_nbytes
    publisher: Side
    subscriber: Side
    torch_save: Plain
    safetensors: Plain

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
        plain = self.safetensors
        speed = (plain.save_s + plain.load_s) / (self.publisher.each_s + self.subscriber.each_s)
        return [
            (("a version by", "publish", "sync", "sent"), rows),
            (("memory", "peak", "promise", ""), memory),
            (("", "faster"), [("publish and sync, against safetensors, no network between", times(speed))]),
        ]


def run(*, versions: int, layers: int, codec: str, progress: Progress) -> SyncReport:
    """Measure everything in a temporary directory; needs about 2 GB of disk and 3 GB of memory.

    Raises MissingExtraError without torch or safetensors, PulseError if the two sides end in other bits.
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
        plain = _run("plain", settings)
    if synced["digests"] != published["digests"]:
        raise PulseError(f"the subscriber has other bits: {synced['digests']}, published {published['digests']}")
    patch_nbytes = int(statistics.median(published["patch_nbytes"]))
    full_nbytes = published["full_nbytes"]
    allowance = 2 * max(published["patch_nbytes"]) + ALLOWANCE_NBYTES
    return SyncReport(
        elements=published["elements"],
        full_nbytes=full_nbytes,
        versions=versions,
        density=statistics.median(published["density"]),
        codec=published["codec"],
        patch_nbytes=patch_nbytes,
        reduction=full_nbytes / patch_nbytes,
        publisher=_side(published, full_nbytes + allowance),
        subscriber=_side(synced, allowance),
        torch_save=Plain(**plain["torch"]),
        safetensors=Plain(**plain["safetensors"]),
    )


def _side(result: dict[str, Any], promise_nbytes: int) -> Side:
    first, *others = result["seconds"]
    peak = result["peak_nbytes"]
    return Side(first, statistics.median(others), peak, promise_nbytes, peak <= promise_nbytes)


def _run(role: str, settings: dict[str, object]) -> dict[str, Any]:
    """One role in a process of its own."""
    command = [sys.executable, "-m", "pulse_rl.bench.roles", role, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PulseError(f"the {role} of the measurement failed with exit code {done.returncode}: {last[0]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
