"""A real vLLM server follows a history, next to vLLM's own ways to new weights, on the same versions.

1. Versions are published one after the other; after each the server stages and applies it, while clients send requests.
2. Clients send requests while versions arrive every few seconds, and while none do, in turns.
3. The same server reloads versions from files (vLLM's `reload_weights`, layer by layer) and takes the same changes by
   vLLM's sparse patch loader. Both are timed inside of the worker, with the files in the page cache and the patch in
   memory, so they have nothing to fetch; and neither proves anything.
4. A fresh server loads the last version of part 1 from files: its greedy outputs, their log-probabilities and the
   checksums of /weight_checker must be those that the first server had at that version.

With `--view`, two servers instead: one follows the weights, the other one a view of them in FP8, by turns, version by
version, while both answer requests.

All processes share this machine, and its CUDA device if it has one: what the publisher takes, generation lacks.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.engine.server import DEVICE, Load, Server, served
from bench.engine.versions import Replayed, Trained
from bench.engine.worker import write_patch
from bench.report import Progress, Table, ms, times
from pulse_rl.engines.client import EngineClient
from pulse_rl.engines.states import EngineReport
from pulse_rl.errors import require
from pulse_rl.history.history import History
from pulse_rl.history.manifest import ViewEntry
from pulse_rl.sync.publish.publisher import Publisher
from pulse_rl.sync.publish.report import PublishReport
from pulse_rl.weights.views.view import Fp8

COMPARED = 5  # versions that vLLM's own ways take
TOKENS = 32  # of a completion
ALONE_S = 20.0  # for which the memory that requests and pauses take is looked at
VIEW = Fp8(block="channel", rule="vllm")  # which vLLM follows in place
ALLOWANCE_NBYTES = 64_000_000  # of memory that following may take beside one patch


class Followed(msgspec.Struct, frozen=True):
    """Versions that the engine followed in place. Medians in seconds."""

    versions: int
    changes: int  # median
    patch_nbytes: int  # median
    stage_s: float  # while requests were generated
    pause_s: float
    longest_pause_s: float
    apply_s: float  # of that pause, the writing
    serving_s: float  # from the return of publish to the end of the update
    requests_nbytes: int  # peak of the engine's private memory above what it was: by requests, and as many pauses alone
    peak_nbytes: int  # the same while versions arrive, too
    promise_nbytes: int  # of the difference


class Throughput(msgspec.Struct, frozen=True):
    """Requests a second, of each stretch; and what a request takes of the engine's processor time, staging included."""

    every_s: float  # between two versions
    seconds: float  # of a stretch
    without: tuple[float, ...]
    arriving: tuple[float, ...]
    without_processor_s: float
    arriving_processor_s: float
    updates: int

    @property
    def ratio(self) -> float:
        return sum(self.arriving) / sum(self.without)

    @property
    def processor_ratio(self) -> float:
        return self.without_processor_s / self.arriving_processor_s


class EngineBenchReport(msgspec.Struct, frozen=True):
    """The whole measurement."""

    model: str
    vllm: str
    elements: int
    full_nbytes: int
    codec: str
    map_tensors: int
    map_s: float  # finding and proving where the tensors live, once
    followed: Followed
    reload_s: tuple[float, ...]
    sparse_s: tuple[float, ...]
    throughput: Throughput
    outputs_equal: bool
    logprobs_equal: bool
    checksums_equal: bool

    def facts(self) -> dict[str, object]:
        found = self.followed
        return {
            "model": f"{self.model}, {self.elements:,} elements, {self.full_nbytes / 1e6:,.0f} MB; vLLM {self.vllm}",
            "versions": f"{found.versions} in place, {found.changes:,} changes each, {self.codec}, "
            f"{found.patch_nbytes / 1e6:.2f} MB",
            "against a fresh engine": f"outputs {_same(self.outputs_equal)}, log-probabilities "
            f"{_same(self.logprobs_equal)}, checksums {_same(self.checksums_equal)}",
            "the map": f"{self.map_tensors} tensors, found and proved in {self.map_s:.2f} s, once",
        }

    def tables(self) -> list[Table]:
        found, reload_s = self.followed, statistics.median(self.reload_s)
        pauses = [
            ("pulse, in place", ms(found.pause_s), ms(found.longest_pause_s), times(reload_s / found.pause_s)),
            ("vLLM's reload_weights", ms(reload_s), ms(max(self.reload_s)), "1"),
            ("vLLM's sparse patch loader", *_own(self.sparse_s, reload_s)),
        ]
        rate = self.throughput
        rest = [
            ("staged, while requests run", ms(found.stage_s)),
            ("written, of the pause", ms(found.apply_s)),
            ("from publish to serving", ms(found.serving_s)),
            ("memory that requests and pauses take", f"{found.requests_nbytes / 1e6:,.0f} MB"),
            (
                "memory beyond that, while versions arrive",
                f"{(found.peak_nbytes - found.requests_nbytes) / 1e6:,.0f} MB, ≤ {found.promise_nbytes / 1e6:,.0f} MB",
            ),
            (f"requests/s, a version every {rate.every_s:g} s", f"{statistics.mean(rate.arriving):.2f}"),
            ("requests/s, no versions", f"{statistics.mean(rate.without):.2f}; ratio {rate.ratio:.3f}"),
            ("processor time of a request, a version arriving", ms(rate.arriving_processor_s)),
            ("processor time of a request, no versions", f"{ms(rate.without_processor_s)}; {rate.processor_ratio:.3f}"),
        ]
        return [(("pause", "median", "longest", "shorter than reload"), pauses), (("", "median"), rest)]


def _own(seconds: tuple[float, ...], reload_s: float) -> tuple[str, str, str]:
    median = statistics.median(seconds)
    return ms(median), ms(max(seconds)), times(reload_s / median)


def _same(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def engine(
    *,
    model: Annotated[str, typer.Option(help="smollm2, or a directory or hub id.")] = "smollm2",
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Take the versions of a run's history, from its first on; otherwise train."),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="AdamW's learning rate, where it trains.")] = 3e-6,
    versions: Annotated[int, typer.Option(min=1, help="Versions that the engine follows one after the other.")] = 20,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between versions, while requests are counted.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a stretch in which requests are counted.")] = 30.0,
    stretches: Annotated[int, typer.Option(min=1, help="Such stretches with versions, and without.")] = 2,
    view: Annotated[
        bool, typer.Option("--view", help="Only compare pauses: of a server that follows BF16, and of one on a view.")
    ] = False,
    serve: Annotated[
        list[str] | None, typer.Option(metavar="ARGUMENT", help="One more argument of the server; may be repeated.")
    ] = None,
    progress: Progress,
) -> EngineBenchReport | ViewBenchReport:
    """Have a real vLLM server follow versions in place, next to its own reload and its sparse patches.

    On a CUDA device, or else a CPU. Compares outputs and checksums with a fresh engine. Needs vLLM (make setup-vllm),
    6 GB of memory, 2 GB of disk, and a quarter of an hour on two cores.
    """
    vllm = require("vllm", "vllm")
    if view:
        return _compare_pauses(model, store, lr, versions, progress)
    arriving = stretches * int(seconds / every)
    steps = iter(range(4))

    def begin(what: str) -> None:
        progress(next(steps), 4, what)

    with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as scratch:
        bench = _Bench(Path(scratch), store, model, lr)
        with served(bench.checkpoint("first"), bench.log, serve or []) as server:
            engine = EngineClient(server.url)
            engine.follow(bench.store)
            mapping = engine.stage().mapping
            assert mapping is not None
            begin(f"{versions} versions in place")
            followed, codec = bench.follow(server, engine, versions)
            expected = server.outputs(), server.checksums()
            last = bench.checkpoint("last")
            begin("requests while versions arrive")
            throughput = bench.throughput(server, engine, every, seconds, stretches, arriving)
            begin("vLLM's own ways")
            reload_s, sparse_s = bench.baselines(server)
        begin("a fresh engine")
        with served(last, bench.log, serve or []) as server:
            fresh = server.outputs(), server.checksums()
    (texts, logprobs), (fresh_texts, fresh_logprobs) = _columns(expected[0]), _columns(fresh[0])
    return EngineBenchReport(
        model=store or model,
        vllm=vllm.__version__,
        elements=bench.elements,
        full_nbytes=bench.full_nbytes,
        codec=codec,
        map_tensors=mapping.tensors,
        map_s=mapping.seconds,
        followed=followed,
        reload_s=reload_s,
        sparse_s=sparse_s,
        throughput=throughput,
        outputs_equal=texts == fresh_texts,
        logprobs_equal=logprobs == fresh_logprobs,
        checksums_equal=expected[1] == fresh[1],
    )


class Pauses(msgspec.Struct, frozen=True):
    """What updates of one engine took, in seconds; medians, but for the pauses."""

    changes: int
    patch_nbytes: int
    stage_s: float
    apply_s: float
    pause_s: tuple[float, ...]

    def row(self, name: str) -> tuple[str, ...]:
        seconds = (self.stage_s, self.apply_s, statistics.median(self.pause_s), max(self.pause_s))
        return (name, f"{self.changes:,}", f"{self.patch_nbytes / 1e3:,.0f} kB", *map(ms, seconds))


class ViewBenchReport(msgspec.Struct, frozen=True):
    """The pauses of an engine that follows the weights, and of one that follows a view of them."""

    model: str
    vllm: str
    form: str  # of the view
    weights: Pauses
    view: Pauses

    def facts(self) -> dict[str, object]:
        weights, view = (statistics.median(each.pause_s) for each in (self.weights, self.view))
        return {
            "model": f"{self.model}; vLLM {self.vllm}",
            "view": self.form,
            "versions": f"{len(self.view.pause_s)}, on both by turns",
            "pause": f"of the view {view / weights:.2f} of BF16's",
        }

    def tables(self) -> list[Table]:
        rows = [self.weights.row("BF16"), self.view.row("the view")]
        return [(("followed", "changes", "patch", "staged", "written", "pause", "longest"), rows)]


def _pauses(patches: list[int], reports: list[EngineReport]) -> Pauses:
    return Pauses(
        changes=int(statistics.median(each.changes for each in reports)),
        patch_nbytes=int(statistics.median(patches)),
        stage_s=statistics.median(each.stage_s for each in reports),
        apply_s=statistics.median(each.apply_s for each in reports),
        pause_s=tuple(each.pause_s for each in reports),
    )


def _compare_pauses(model: str, store: str | None, lr: float, versions: int, progress: Progress) -> ViewBenchReport:
    """Measure the pauses of two servers by turns, each with requests. Needs 8 GB of memory for SmolLM2-135M."""
    vllm = require("vllm", "vllm")
    with tempfile.TemporaryDirectory(prefix="pulse-rl-bench-") as scratch, ExitStack() as stack:
        bench = _Bench(Path(scratch), store, model, lr, {"rows": VIEW})
        progress(0, 2, "two servers start")
        files = (bench.checkpoint("first"), bench.anchor("rows"))
        servers = [stack.enter_context(served(each, bench.log)) for each in files]
        engines = [EngineClient(server.url) for server in servers]
        for engine, view in zip(engines, (None, "rows"), strict=True):
            engine.follow(bench.store, view=view)
        bench.publish()
        for engine in engines:
            engine.update()  # loads the kernels' machine code
        progress(1, 2, f"{versions} versions")
        for server in servers:
            stack.enter_context(Load(server, 2, TOKENS))
        patches: tuple[list[int], list[int]] = ([], [])
        reports: tuple[list[EngineReport], list[EngineReport]] = ([], [])
        for version in range(versions):
            published = bench.publish()
            patches[0].append(published.patch_nbytes)
            patches[1].append(_patch_nbytes(published.views["rows"]))
            for at in (0, 1) if version % 2 else (1, 0):
                reports[at].append(engines[at].update())
    weights, followed = (_pauses(*found) for found in zip(patches, reports, strict=True))
    return ViewBenchReport(store or model, vllm.__version__, repr(VIEW), weights, followed)


def _patch_nbytes(view: ViewEntry) -> int:
    return view.patch.total_nbytes if view.patch else 0


def _columns(outputs: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    return [each["text"] for each in outputs], [each["logprobs"] for each in outputs]


class _Bench:
    """The publisher's side, and what is measured."""

    def __init__(
        self, directory: Path, store: str | None, model: str, lr: float, views: Mapping[str, Fp8] | None = None
    ) -> None:
        self._directory, self.log, self.store = directory, directory / "vllm.log", directory / "store"
        assets = directory / "assets"
        assets.mkdir()
        self._source: Replayed | Trained = Replayed(store, assets) if store is not None else Trained(model, lr)
        self._publisher = Publisher(
            self.store, anchor_every=1000, views=views, baseline="host" if DEVICE == "cpu" else "device"
        )
        report = self._publisher.publish(self._source.weights, version=0, assets=self._source.assets)
        self.elements, self.full_nbytes = report.elements, report.full_nbytes
        self._version = itertools.count(1)

    def checkpoint(self, name: str) -> Path:
        """The weights of now as files that vLLM loads."""
        from safetensors.torch import save_file

        directory = self._directory / name
        directory.mkdir()
        for file, data in self._source.assets.items():
            (directory / file).write_bytes(data)
        save_file(self._source.weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    def anchor(self, view: str) -> Path:
        """The files of a view's newest anchor, which vLLM loads."""
        name = History(self.store, view=view).newest().anchor[0].name
        return (self.store / name).parent

    def publish(self) -> PublishReport:
        """Go to the next version, and publish it."""
        self._source.step()
        return self._publisher.publish(self._source.weights, version=next(self._version))

    def follow(self, server: Server, engine: EngineClient, versions: int) -> tuple[Followed, str]:
        published, reports, serving = [], [], []
        self.publish()
        engine.update()  # loads the kernels' machine code
        with _peak(server) as peak, Load(server, 2, TOKENS):
            for _ in range(versions):  # each pause makes vLLM take more, with a version to write or without
                time.sleep(ALONE_S / versions)
                with _paused(server):
                    pass
            requests_nbytes = int(server.call("bench_peak", "look")["nbytes"])
            for _ in range(versions):
                published.append(self.publish())
                start = time.perf_counter()
                reports.append(engine.update())
                serving.append(time.perf_counter() - start)
        return Followed(
            versions=versions,
            changes=int(statistics.median(each.changes for each in published)),
            patch_nbytes=int(statistics.median(each.patch_nbytes for each in published)),
            stage_s=statistics.median(each.stage_s for each in reports),
            pause_s=statistics.median(each.pause_s for each in reports),
            longest_pause_s=max(each.pause_s for each in reports),
            apply_s=statistics.median(each.apply_s for each in reports),
            serving_s=statistics.median(serving),
            requests_nbytes=requests_nbytes,
            peak_nbytes=peak[0],
            promise_nbytes=max(each.patch_nbytes for each in published) + ALLOWANCE_NBYTES,
        ), published[-1].codec or "no patch"

    def throughput(
        self, server: Server, engine: EngineClient, every: float, seconds: float, stretches: int, arriving: int
    ) -> Throughput:
        first = self._publisher.version or 0
        for _ in range(arriving):  # before, so that only what the engine does takes from it
            self.publish()
        upcoming, updates = iter(range(first + 1, first + 1 + arriving)), []
        rates: dict[bool, list[float]] = {False: [], True: []}
        processor_s, requests = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
        with Load(server, 4, TOKENS):
            time.sleep(5.0)
            for stretch in range(2 * stretches):
                # Without and with, then with and without: a drift of the machine meets both alike.
                with_versions = stretch % 4 in (1, 2)
                start, tokens, begun_s = time.perf_counter(), server.tokens(), _processor_s(server)
                if with_versions:
                    for number in range(int(seconds / every)):
                        time.sleep(max(0.0, start + number * every - time.perf_counter()))
                        updates.append(engine.update(next(upcoming)))
                time.sleep(max(0.0, start + seconds - time.perf_counter()))
                done = (server.tokens() - tokens) / TOKENS
                rates[with_versions].append(done / (time.perf_counter() - start))
                processor_s[with_versions] += _processor_s(server) - begun_s
                requests[with_versions] += done
        without_s, arriving_s = (processor_s[each] / requests[each] for each in (False, True))
        return Throughput(every, seconds, tuple(rates[False]), tuple(rates[True]), without_s, arriving_s, len(updates))

    def baselines(self, server: Server) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of vLLM's reload, and of its sparse patch loader, for the versions from here on."""
        reload_s, sparse_s = [], []
        for number in range(COMPARED):
            before = {name: tensor.clone() for name, tensor in self._source.weights.items()}
            self._source.step()
            patch, files = self._directory / f"patch-{number}.safetensors", self.checkpoint(f"next-{number}")
            write_patch(patch, before, self._source.weights)
            with _paused(server):
                sparse_s.append(float(server.call("bench_sparse", str(patch))["seconds"]))
            with _paused(server):
                reload_s.append(float(server.call("bench_reload", str(files))["seconds"]))
            (files / "model.safetensors").unlink()
        return tuple(reload_s), tuple(sparse_s)


@contextmanager
def _peak(server: Server) -> Iterator[list[int]]:
    """The peak of the engine's private memory over a block, in bytes above what it was."""
    found: list[int] = []
    server.call("bench_peak", "begin")
    try:
        yield found
    finally:
        found.append(int(server.call("bench_peak", "end")["nbytes"]))


def _processor_s(server: Server) -> float:
    """Processor time that the engine's process has taken so far."""
    return float(server.call("bench_processor", "")["seconds"])


@contextmanager
def _paused(server: Server) -> Iterator[None]:
    server.post("pause?mode=keep")
    try:
        yield
    finally:
        server.post("resume")
