"""Publish and receive one model in shares: what a rank of a trainer does, and what a rank of an engine does.

The weights are those of `bench sync`, with their changes, the same whatever the number of ranks. Ranks are processes
over Gloo on this machine, with one thread each. A trainer's ranks hold rows of every tensor, as with FSDP2, or rows and
columns and replicated norms, as with tensor parallelism; one rank holds the model whole and has no group. A receiver
holds the whole model, or is one of two that hold a half each, as with tensor parallelism.

Times are processor seconds of the slowest rank, as the ranks share a machine; medians over the versions after the
first.
Memory is the peak of RssAnon as in `bench sync`, beyond the FP32 masters that the trainer holds anyway. Bytes over the
group are those that one rank sends to each of the others for a version that has no anchor, the most of all versions. A
store is a directory, and nothing is fsynced.
"""

import os
import socket
import statistics
import tempfile
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from bench.report import CODECS, ONE_THREAD, Progress, Table, fresh_processes, ms
from bench.shards.model import Layout, ModelSize
from bench.shards.ranks import Published, Received, Settings, take_part
from bench.sync import ALLOWANCE_NBYTES
from pulse_rl.cli import output
from pulse_rl.codecs.choose import CodecName, check
from pulse_rl.errors import IntegrityError
from pulse_rl.units import nbytes

GROUP_NBYTES = 1024  # to each of the others, for a version
PATCH_RATIO = 1.03  # of the parts of four ranks, to the patch of one
HALF_NBYTES, HALF_CPU = 0.56, 0.6  # of a receiver of a half, to one of the whole
APPLY = 0.05  # of a sync
RECEIVERS = 2


class Publishers(msgspec.Struct, frozen=True):
    """The ranks that published one history."""

    layout: str  # "whole" for one rank
    ranks: int
    codec: str
    patch_nbytes: int  # of all parts, median
    cpu_s: float  # a version, of the slowest rank
    peak_nbytes: int  # of the rank that takes most
    promise_nbytes: int  # its share of the model's bits and of the largest patch, and an allowance
    group_nbytes: float  # to each other rank, the most of a version


class Receivers(msgspec.Struct, frozen=True):
    """The ranks that followed one history."""

    publishers: int  # its parts
    share: str  # "whole" or "half"
    codec: str
    fetched_nbytes: int  # a version, of the rank that reads most
    cpu_s: float  # a version, of the slowest rank
    apply_cpu_s: float  # of a staged version
    sync_s: float
    apply_s: float


class ShardsReport(msgspec.Struct, frozen=True):
    """The whole measurement."""

    elements: int
    full_nbytes: int
    versions: int
    density: float  # median
    load: float  # of the machine while it ran, mean over the last minute, the highest at any run's end
    publishers: tuple[Publishers, ...]
    receivers: tuple[Receivers, ...]

    def facts(self) -> dict[str, object]:
        return {
            "model": f"{self.elements:,} elements, {self.full_nbytes / 1e6:,.0f} MB of BF16",
            "versions": f"{self.versions} after the first, {self.density:.3%} of the elements changed",
            "load": f"{self.load:.1f} on {os.cpu_count()} cores",
        }

    def tables(self) -> list[Table]:
        return [self._memory(), self._work(), self._received()]

    def _memory(self) -> Table:
        rows = [
            (
                each.codec,
                each.ranks,
                each.layout,
                f"{each.peak_nbytes / 1e6:,.1f} MB",
                _against(each.peak_nbytes, each.promise_nbytes, f"{each.promise_nbytes / 1e6:,.1f} MB"),
                f"{each.group_nbytes:,.0f} B",
                _against(each.group_nbytes, GROUP_NBYTES, f"{GROUP_NBYTES} B") if each.ranks > 1 else "",
            )
            for each in self.publishers
        ]
        return ("codec", "publishers", "hold", "memory", "target", "to each other", "target"), rows

    def _work(self) -> Table:
        alone = {each.codec: each for each in self.publishers if each.ranks == 1}
        rows = []
        for each in self.publishers:
            one = alone[each.codec]
            size = each.patch_nbytes / one.patch_nbytes
            rows.append(
                (
                    each.codec,
                    each.ranks,
                    each.layout,
                    nbytes(each.patch_nbytes),
                    f"{size:.3f} ×",
                    _against(size, PATCH_RATIO, f"{PATCH_RATIO} ×") if each.ranks > 1 else "",
                    ms(each.cpu_s),
                    f"{each.cpu_s / one.cpu_s:.2f} ×",
                    f"{1 / each.ranks:.2f} ×",
                )
            )
        columns = ("codec", "publishers", "hold", "patch", "of one's", "target", "processor", "of one's", "1 / ranks")
        return columns, rows

    def _received(self) -> Table:
        by_kind = {(each.publishers, each.codec, each.share): each for each in self.receivers}
        rows = []
        for each in self.receivers:
            whole = by_kind[each.publishers, each.codec, "whole"]
            fetched, cpu = each.fetched_nbytes / whole.fetched_nbytes, each.cpu_s / whole.cpu_s
            apply, half = each.apply_cpu_s / each.cpu_s, each.share == "half"
            rows.append(
                (
                    each.codec,
                    each.publishers,
                    each.share,
                    nbytes(each.fetched_nbytes),
                    f"{fetched:.3f} × " + (_against(fetched, HALF_NBYTES, f"{HALF_NBYTES} ×") if half else ""),
                    ms(each.cpu_s),
                    f"{cpu:.3f} × " + (_against(cpu, HALF_CPU, f"{HALF_CPU} ×") if half else ""),
                    ms(each.apply_cpu_s),
                    f"{apply:.1%} " + _against(apply, APPLY, f"{APPLY:.0%}"),
                )
            )
        columns = (
            "codec",
            "parts",
            "share",
            "fetched",
            "of the whole",
            "processor",
            "of the whole",
            "apply",
            "of sync",
        )
        return columns, rows


def _against(value: float, target: float, text: str) -> str:
    return f"≤ {text}, {'met' if value <= target else 'missed'}"


def shards(
    *,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    width: Annotated[int, typer.Option(min=1, help="How many times as wide as SmolLM2-135M the layers are.")] = 1,
    vocab: Annotated[int, typer.Option(min=16, help="Rows of the embedding.")] = 49152,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Ranks that publish; may be repeated.", show_default="2, 4")
    ] = None,
    versions: Annotated[int, typer.Option(min=2, help="Versions to publish after the first.")] = 5,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="context|gap", help="May be repeated.", show_default="gap, context")
    ] = None,
    progress: Progress,
) -> ShardsReport:
    """Publish and receive a model in shares, by 1, 2 and 4 ranks: memory, bytes and processor seconds of a rank.

    The ranks are processes over Gloo on this machine. SmolLM2-135M takes 3 GB of
    memory and 1 GB of disk; --layers 24 --width 2 has 400M elements and takes
    three times as much. Needs the extra torch.
    """
    codecs = codec or list(CODECS)
    with output.checking():
        for name in codecs:
            check(name)
    names = msgspec.convert(codecs, tuple[CodecName, ...])
    ranks, size = ranks or [2, 4], ModelSize(layers, width, vocab)
    kinds: list[tuple[int, Layout]] = [(1, "rows")]
    kinds += [(count, layout) for layout in ("rows", "rows and columns") for count in ranks if count > 1]
    followed = {(1, "rows"), (max(ranks), "rows")}
    steps, done, load = len(kinds) + 2 * len(followed), 0, 0.0
    published: list[Publishers] = []
    received: list[Receivers] = []
    found: list[list[Published]] = []
    expected: dict[str, list[str]] = {}

    def step(what: str) -> None:
        nonlocal done, load
        load = max(load, os.getloadavg()[0])
        progress(done, steps, what)
        done += 1

    for count, layout in kinds:
        with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as directory:
            settings = Settings("publisher", directory, size, layout, 0, count, 0, versions, names)
            step(f"{count} publishers, {layout}")
            found = _run(settings)
            for by_rank in zip(*found, strict=True):
                expected.setdefault(by_rank[0].codec, by_rank[0].digests)
                _compare(expected, by_rank)
                published.append(_publishers(size, count, layout, by_rank))
            for share, receivers in (("whole", 1), ("half", RECEIVERS)) if (count, layout) in followed else ():
                step(f"receivers of {count} publishers, {share}")
                follow = settings._replace(
                    role="receiver", layout="rows and columns" if receivers > 1 else "rows", ranks=receivers
                )
                for followers in zip(*_run(follow), strict=True):
                    _compare(expected, followers)
                    received.append(_receivers(count, share, followers))
    step("the report")
    return ShardsReport(
        elements=size.elements,
        full_nbytes=2 * size.elements,
        versions=versions,
        density=statistics.median(found[0][0].density),
        load=load,
        publishers=tuple(published),
        receivers=tuple(received),
    )


def _compare(expected: dict[str, list[str]], ranks: Sequence[Published | Received]) -> None:
    for rank, one in enumerate(ranks):
        if one.digests != expected[one.codec]:
            raise IntegrityError(
                f"rank {rank} of {len(ranks)}, {one.codec}: expected digests {expected[one.codec]}, found "
                f"{one.digests}",
                expected=expected[one.codec][-1],
                found=one.digests[-1],
                ranks=(rank,),
            )


def _publishers(size: ModelSize, ranks: int, layout: str, found: Sequence[Published]) -> Publishers:
    share = (2 * size.elements + max(found[0].patch_nbytes)) // ranks
    return Publishers(
        layout=layout if ranks > 1 else "whole",
        ranks=ranks,
        codec=found[0].codec,
        patch_nbytes=int(statistics.median(found[0].patch_nbytes)),
        cpu_s=max(statistics.median(one.cpu_s) for one in found),
        peak_nbytes=max(one.peak_nbytes for one in found),
        promise_nbytes=share + ALLOWANCE_NBYTES,
        group_nbytes=max(max(one.group_nbytes) for one in found) / max(1, ranks - 1),
    )


def _receivers(publishers: int, share: str, found: Sequence[Received]) -> Receivers:
    slowest = max(found, key=lambda one: statistics.median(one.cpu_s))
    return Receivers(
        publishers=publishers,
        share=share,
        codec=slowest.codec,
        fetched_nbytes=max(int(statistics.median(one.fetched_nbytes)) for one in found),
        cpu_s=statistics.median(slowest.cpu_s),
        apply_cpu_s=statistics.median(slowest.apply_cpu_s),
        sync_s=statistics.median(slowest.sync_s),
        apply_s=statistics.median(slowest.apply_s),
    )


def _run(settings: Settings) -> list[Any]:
    """Run all ranks. Returns what each found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with fresh_processes(settings.ranks, **ONE_THREAD) as pool:
        return list(pool.map(take_part, [settings._replace(rank=rank, port=port) for rank in range(settings.ranks)]))
