"""A rank of `bench shards`: `python -m bench.shards.ranks SETTINGS`, a process for each, over Gloo.

It publishes its share of the model, or receives it, by each codec in turn. It prints one JSON document. `shards` says
what is measured and how.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

import pulse_rl as pulse
from bench.roles import Peak, warm
from bench.shards.model import Layout, Model, ModelSize
from pulse_rl.codecs.choose import CodecName

TIMEOUT = timedelta(seconds=600)


class Settings(msgspec.Struct, frozen=True):
    """What one rank's process is started with."""

    role: Literal["publisher", "receiver"]
    directory: str  # a history for each codec
    model: ModelSize
    layout: Layout
    rank: int
    ranks: int
    port: int
    versions: int  # after the first
    codecs: tuple[CodecName, ...]


class Published(msgspec.Struct, frozen=True):
    """What one rank published by one codec; a number for each version after the first."""

    codec: str
    digests: list[str]  # with the first version's
    density: list[float]
    patch_nbytes: list[int]  # of all parts
    group_nbytes: list[int]  # that this rank sent to the others
    cpu_s: list[float]
    peak_nbytes: int  # beyond its model, over all versions, with the first


class Received(msgspec.Struct, frozen=True):
    """What one rank received by one codec; a number for each version after the first."""

    codec: str
    digests: list[str]
    fetched_nbytes: list[int]
    cpu_s: list[float]
    apply_cpu_s: list[float]  # of a staged version
    sync_s: list[float]
    apply_s: list[float]


class _Cpu:
    """Processor seconds of this process, on all threads."""

    def __init__(self) -> None:
        self._start = time.process_time()

    @property
    def seconds(self) -> float:
        return time.process_time() - self._start


def publish(settings: Settings, group: Any) -> list[Published]:
    model = Model(settings.model, settings.layout, settings.rank, settings.ranks)
    warm()
    found = []
    for codec in settings.codecs:
        found.append(_publish(settings, codec, model, group))
        model.restart()
    return found


def _publish(settings: Settings, codec: CodecName, model: Model, group: Any) -> Published:
    store, peak = Path(settings.directory) / codec, Peak()
    reports, cpu_s = [], []
    with pulse.Publisher(store, cast="bfloat16", anchor_every=10**9, codec=codec, group=group) as publisher:
        for version in range(settings.versions + 1):
            if version:
                model.step()
            sampled_s, cpu = peak.cpu_s, _Cpu()
            with peak:
                reports.append(publisher.publish(model.weights(), version=version))
            cpu_s.append(cpu.seconds - (peak.cpu_s - sampled_s))
    others = reports[1:]
    return Published(
        codec=codec,
        digests=[report.digest for report in reports],
        density=[report.density for report in others],
        patch_nbytes=[report.patch_nbytes for report in others],
        group_nbytes=[report.group_nbytes for report in others],
        cpu_s=cpu_s[1:],
        peak_nbytes=peak.nbytes,
    )


def receive(settings: Settings, group: Any) -> list[Received]:
    model = Model(settings.model, settings.layout, settings.rank, settings.ranks)
    warm()
    return [_receive(settings, codec, model, group) for codec in settings.codecs]


def _receive(settings: Settings, codec: CodecName, model: Model, group: Any) -> Received:
    """Follow one history twice: by `sync`, and by `stage` and `apply`."""
    store = Path(settings.directory) / codec
    synced, staged = (pulse.Subscriber(store, group=group) for _ in range(2))
    weights, others = model.live(), model.live()  # the first version, which is recognised
    digests, fetched = [synced.sync(weights, version=0).digest], []
    staged.sync(others, version=0)
    cpu_s, apply_cpu_s, sync_s, apply_s = [], [], [], []
    for version in range(1, settings.versions + 1):
        cpu = _Cpu()
        report = synced.sync(weights, version=version)
        cpu_s.append(cpu.seconds)
        sync_s.append(report.total_s)
        digests.append(report.digest)
        fetched.append(report.fetched_nbytes)
        kept = staged.stage(others, version=version)
        cpu = _Cpu()
        apply_s.append(kept.apply().total_s)
        apply_cpu_s.append(cpu.seconds)
    synced.verify(weights)
    return Received(codec, digests, fetched, cpu_s, apply_cpu_s, sync_s, apply_s)


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    group = None
    if settings.ranks > 1:
        address = f"tcp://127.0.0.1:{settings.port}"
        dist.init_process_group("gloo", address, rank=settings.rank, world_size=settings.ranks, timeout=TIMEOUT)
        group = dist.group.WORLD
    found: Any = publish(settings, group) if settings.role == "publisher" else receive(settings, group)
    print(msgspec.json.encode(found).decode(), flush=True)
    if settings.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Settings))
