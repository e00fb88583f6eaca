"""A program as a user's, for type checkers that see the package from outside: what public names take and give."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, assert_type

import numpy as np
import torch

import pulse_rl as pulse
from pulse_rl import flow, testing, watch
from pulse_rl.study import Checkpoints, Report, Settings, study


def trainer(model: torch.nn.Module, place: Path) -> int:
    publisher = pulse.Publisher(place, cast="bfloat16", retain=20, codec="auto", views={"fp8": pulse.Fp8()})
    sent = publisher.publish(model, version=1, metadata={"step": 1})
    assert_type(sent, pulse.PublishReport)
    assert_type(sent.density, float)
    assert_type(publisher.history, pulse.History)
    publisher.end()
    return sent.version


def worker(model: torch.nn.Module, place: Path) -> str:
    subscriber = pulse.Subscriber(pulse.open_store(place), heartbeat="worker", poll=1.0)
    subscriber.wait(1, timeout=60)
    assert_type(subscriber.version, int | None)
    assert_type(subscriber.digest, str | None)
    staged = subscriber.stage(model)
    assert_type(staged, pulse.Staged)
    assert_type(staged.apply(), pulse.SyncReport)
    try:
        report = subscriber.sync(model)
    except pulse.IntegrityError as error:
        return f"{error.expected} {error.found}"
    assert_type(report, pulse.SyncReport)
    return report.digest


def patches() -> bytes:
    old, new = ({"w": np.full(9, value, np.float32)} for value in (0, 1))
    patch = pulse.diff(old, new, base=1, target=2, codec="gap")
    assert_type(patch, bytes)
    pulse.apply(old, patch)
    assert_type(pulse.inspect(patch), pulse.PatchInfo)
    assert_type(pulse.digest(old), str)
    return patch


def operator(place: Path) -> bool:
    assert_type(pulse.status(place), pulse.Status)
    assert_type(pulse.plan(params=7_000_000_000, density=0.01, compute_s=60, bandwidth="200Mbit"), pulse.Plan)
    assert_type(study(Checkpoints([place]), Settings(lr=1e-6, betas=(0.9, 0.95))), Report)
    watch.to_prometheus(port=9400).close()
    return pulse.verify(place).ok


class Mine(testing.Adapter):
    """What runs the conformance suite."""


class MyStore:
    """A store of one's own."""

    url = "mine://"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(
        self, name: str, data: bytes | Iterable[bytes], *, mode: Literal["create", "overwrite"] = "overwrite"
    ) -> None:
        if mode == "create" and name in self.objects:
            raise pulse.ObjectExistsError(f"{name} exists", name=name)
        self.objects[name] = data if isinstance(data, bytes) else b"".join(data)

    def check_create(self) -> None:
        pass

    def get(self, name: str) -> memoryview:
        if name not in self.objects:
            raise pulse.ObjectNotFoundError(f"no {name}", name=name)
        return memoryview(self.objects[name])

    def stream(self, name: str) -> Iterator[memoryview]:
        yield self.get(name)

    def list(self, prefix: str, after: str = "") -> list[pulse.ObjectInfo]:
        names = sorted(name for name in self.objects if name.startswith(f"{prefix}/") and name > after)
        return [pulse.ObjectInfo(name, len(self.objects[name]), 0.0) for name in names]

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


def over_my_store() -> pulse.Store:
    store: pulse.Store = MyStore()
    pulse.Publisher(store).publish({"w": np.ones(3)}, version=1)
    return store


def over_a_group(model: torch.nn.Module) -> None:
    channel = pulse.Channel(source=0, codec="gap")
    assert_type(channel.send(model, version=1), pulse.ChannelReport)
    assert_type(channel.receive(model), pulse.ChannelReport)


def several_trainers(model: torch.nn.Module, place: Path) -> int:
    group = pulse.StoreGroup(place, rank=0, world_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pulse.PulseLoCo(model, optimizer, sync_every=8, group=group) as loco:
        optimizer.step()
    assert_type(loco.reports, list[pulse.LocoReport])
    return loco.round


def share(tensor: torch.Tensor, place: Path) -> None:
    shard = pulse.Shard(tensor, shape=(8, 4), offset=(4, 0))
    pulse.Publisher(place, group="world").publish({"w": shard}, version=1)


def folders(store: str, place: Path) -> None:
    for mirrored in pulse.mirror(store, place, once=True):
        assert_type(mirrored, pulse.Mirrored)
    for report in pulse.publish_folders(place, pulse.Publisher(store), once=True):
        assert_type(report, pulse.PublishReport)
    assert_type(pulse.copy_history(store, place), pulse.CopyReport)
    assert_type(pulse.load_assets(store, place), tuple[Path, ...])


async def turns(conversation: flow.Conversation, policy: flow.Policy) -> flow.Rewards:
    turn = await policy.complete([1, 2], stop=())
    assert_type(turn, flow.Turn)
    return flow.Rewards({policy.name: 1.0})
