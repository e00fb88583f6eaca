"""A rank of `bench shards`, a process for each, over Gloo: it publishes its share of the model, or receives it.

By each codec in turn. `run` says what is measured and how.
"""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

import pulse_rl as pulse
from bench.report import processor_time
from bench.roles import Peak, warm
from bench.shards.model import Layout, Model, ModelSize
from pulse_rl.codecs.choose import CodecName

TIMEOUT = timedelta(seconds=600)


class Settings(NamedTuple):
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


class Published(NamedTuple):
    """What one rank published by one codec; a number for each version after the first."""

    codec: str
    digests: list[str]  # with the first version's
    density: list[float]
    patch_nbytes: list[int]  # of all parts
    group_nbytes: list[int]  # that this rank sent to the others
    cpu_s: list[float]
    peak_nbytes: int  # beyond its model, over all versions, with the first


class Received(NamedTuple):
    """What one rank received by one codec; a number for each version after the first."""

    codec: str
    digests: list[str]
    fetched_nbytes: list[int]
    cpu_s: list[float]
    apply_cpu_s: list[float]  # of a staged version
    sync_s: list[float]
    apply_s: list[float]


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
            sampled_s, begun_s = peak.cpu_s, time.process_time()
            with peak:
                reports.append(publisher.publish(model.weights(), version=version))
            cpu_s.append(time.process_time() - begun_s - (peak.cpu_s - sampled_s))
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
        seconds, report = processor_time(partial(synced.sync, weights, version=version))
        cpu_s.append(seconds)
        sync_s.append(report.total_s)
        digests.append(report.digest)
        fetched.append(report.fetched_nbytes)
        kept = staged.stage(others, version=version)
        seconds, applied = processor_time(kept.apply)
        apply_s.append(applied.total_s)
        apply_cpu_s.append(seconds)
    synced.verify(weights)
    return Received(codec, digests, fetched, cpu_s, apply_cpu_s, sync_s, apply_s)


def take_part(settings: Settings) -> list[Published] | list[Received]:
    """What the process does."""
    torch.set_num_threads(1)
    group = None
    if settings.ranks > 1:
        address = f"tcp://127.0.0.1:{settings.port}"
        dist.init_process_group("gloo", address, rank=settings.rank, world_size=settings.ranks, timeout=TIMEOUT)
        group = dist.group.WORLD
    found = publish(settings, group) if settings.role == "publisher" else receive(settings, group)
    if settings.ranks > 1:
        dist.destroy_process_group()
    return found
