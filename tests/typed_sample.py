"""A program as a user's, for type checkers that see the package from outside: what public names take and give."""

from pathlib import Path
from typing import assert_type

import numpy as np
import torch

import pulse_rl as pulse
from pulse_rl import testing, watch
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
