"""Relays: each version of a history is published on to another store, with views, whatever ends them in between."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.engines.follow import Driver, Manner
from pulse_rl.engines.relay import Relay
from pulse_rl.engines.states import Follow
from pulse_rl.errors import EngineError
from pulse_rl.history.operate.prune import Retention, delete_planned
from pulse_rl.weights.views.view import View, view_of
from tests.forked import python

VIEW = pulse.Fp8(block="channel", rule="vllm")
FORM = "fp8=Fp8(block='channel', rule='vllm')"


class Trainer:
    """A trainer and its store, which a relay follows."""

    def __init__(self, store: Path, seed: int = 0) -> None:
        self._random = torch.Generator().manual_seed(seed)
        weight = torch.randn((128, 256), generator=self._random).bfloat16()
        self.weights = {"head.weight": weight, "norm.weight": torch.ones(33).bfloat16(), "tied.weight": weight}
        self.publisher = pulse.Publisher(store, anchor_every=3)

    def publish(self, *versions: int) -> None:
        for version in versions:
            flat = self.weights["head.weight"].view(-1)
            flat[torch.randint(0, len(flat), (40,), generator=self._random)] += 1
            assets = {"config.json": b'{"tiny": true}'}
            self.publisher.publish(self.weights, version=version, assets=assets, metadata={"reward": version})


def check(trainer: Trainer, target: Path, versions: list[int]) -> None:
    """The store holds these versions, the newest bit for bit, as it holds the view of it that is made afresh."""
    history, source = pulse.History(target), trainer.publisher.history
    assert [history.read(sequence).version for sequence in history.sequences()] == versions
    for version in versions:
        found, expected = history.find(version), source.find(version)
        assert (found.digest, found.tied, found.metadata) == (expected.digest, expected.tied, expected.metadata)
    for view, made in ((None, dict(trainer.weights)), ("fp8", dict(pulse.Quantised(VIEW, trainer.weights).look()))):
        subscriber = pulse.Subscriber(target, view=view)
        subscriber.sync(weights := subscriber.allocate())
        assert subscriber.verify(weights) == pulse.digest(made)
    (config,) = pulse.load_assets(target, target.with_name("assets"), view="fp8")
    assert json.loads(config.read_bytes()).keys() == {"tiny", "quantization_config"}


def test_versions_keep_their_numbers_and_a_relay_that_is_made_anew_reads_what_is_new(tmp_path: Path) -> None:
    trainer, target = Trainer(tmp_path / "source"), tmp_path / "target"
    fetched = []
    for newest in (4, 7, 9):
        trainer.publish(*range(newest - 1, newest + 1))
        follow = Follow(str(tmp_path / "source"), heartbeat="relay")
        driver = Driver(
            trainer.publisher.history, follow, [Relay(str(target), {"fp8": VIEW})], manner=Manner(poll=0.05)
        )
        driver.start()
        assert driver.wait_until_current(60), driver.engines()
        driver.stop()
        (seen,) = driver.engines()
        assert (seen.standing, seen.version, seen.error, seen.updates) == ("ok", newest, None, 1)
        assert seen.report is not None
        fetched.append((seen.report.route, seen.report.fetched_nbytes))
    check(trainer, target, [4, 7, 9])
    assert [route for route, _ in fetched] == ["anchor", "patches", "patches"]
    assert fetched[1][1] < fetched[0][1] / 20  # the rest was read where it is
    status = pulse.status(tmp_path / "source", max_lag=0)
    assert [(one.id, one.version, one.verdict) for one in status.subscribers or ()] == [("relay", 9, "ok")]


def test_the_end_of_a_run_is_passed_on(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "source")
    trainer.publish(0)
    relay = Relay(str(tmp_path / "target"), {})
    relay.follow(str(tmp_path / "source"))
    relay.stage(0)
    relay.apply(0)
    assert not pulse.Subscriber(tmp_path / "target").ended
    trainer.publisher.end()
    assert relay.state().version == 0
    assert pulse.Subscriber(tmp_path / "target").ended


def test_another_history_is_refused_and_one_that_has_gone_back(tmp_path: Path) -> None:
    """One that has other bits of the version, or lacks it though it is not pruned so far; by a relay of either age."""
    names = ("source", "other", "lacking", "later")
    source, other, lacking, later = (Trainer(tmp_path / name, seed) for seed, name in enumerate(names))
    source.publish(1, 2)
    other.publish(1, 2)
    lacking.publish(1, 3)
    later.publish(100)
    relay = Relay(str(tmp_path / "target"), {})
    relay.follow(str(tmp_path / "source"))
    relay.stage(2)
    relay.apply(2)
    with pytest.raises(EngineError, match="has gone back") as gone:
        relay.stage(1)
    assert (gone.value.kind, gone.value.version) == ("IntegrityError", 2)
    for each in (relay, Relay(str(tmp_path / "target"), {})):
        for name in names[1:]:
            with pytest.raises(EngineError, match="of another history") as refused:
                each.follow(str(tmp_path / name))
            assert refused.value.kind == "IntegrityError"
    assert pulse.History(tmp_path / "target").newest().version == 2
    source.publish(3, 4)
    source.publish(5)
    delete_planned(source.publisher.history, Retention(1, grace=0).plan(source.publisher.history))
    relay.follow(str(tmp_path / "source"))  # which has version 2 no more


def test_a_relay_that_another_one_has_overtaken_goes_on_from_there(tmp_path: Path) -> None:
    trainer, target = Trainer(tmp_path / "source"), tmp_path / "target"
    one, other = (Relay(str(target), {"fp8": VIEW}) for _ in range(2))
    for relay, version in ((other, 0), (one, 1)):
        trainer.publish(version)
        relay.follow(str(tmp_path / "source"))
        relay.stage(version)
        relay.apply(version)
    trainer.publish(2)
    other.stage(2)
    with pytest.raises(EngineError, match="another publisher"):
        other.apply(2)
    assert other.state().follow is None  # the driver sends `follow` again
    driver = Driver(trainer.publisher.history, Follow(str(tmp_path / "source")), [other], manner=Manner(poll=0.05))
    driver.start()
    assert driver.wait_until_current(60), driver.engines()
    driver.stop()
    check(trainer, target, [0, 1, 2])


# The command

MAIN = "from pulse_rl.cli.main import main; main()"
STRUCK = f"""
import os, signal, sys
from pulse_rl.store.directory import DirectoryStore

left = int(sys.argv.pop(1))

def struck(write):
    def strike(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments, **options)

    return strike

DirectoryStore.put = struck(DirectoryStore.put)
{MAIN}
"""


def test_a_command_that_is_killed_at_a_write_loses_nothing(tmp_path: Path) -> None:
    trainer, target = Trainer(tmp_path / "source"), tmp_path / "target"
    call = ("relay", str(tmp_path / "source"), str(target), "--view", FORM, "--once", "--json")
    for version in range(2):  # the first is one with anchors, the other one with patches
        trainer.publish(2 * version)
        killed = python(STRUCK, "3", *call)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        head = pulse.History(target).head()
        assert (head and head.version) == (None, 1)[version]
        trainer.publish(newest := 2 * version + 1)
        done = python(MAIN, *call)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert (found["newest"], found["store_error"]) == (newest, None)
        (engine,) = found["engines"]
        assert (engine["standing"], engine["version"], engine["report"]["version"]) == ("ok", newest, newest)
    check(trainer, target, [1, 3])
    assert pulse.verify(target).ok


def test_a_relay_keeps_as_many_versions_as_it_is_told(tmp_path: Path) -> None:
    """The relay deletes versions before the newest anchor, and their views."""
    trainer, target = Trainer(tmp_path / "source"), tmp_path / "target"
    relay = Relay(str(target), {"fp8": VIEW}, retain=2, grace=0.0)
    for version in range(53):  # an anchor comes every 50 versions
        trainer.publish(version)
        if not version:
            relay.follow(str(tmp_path / "source"))
        relay.stage(version)
        relay.apply(version)
    check(trainer, target, [50, 51, 52])
    assert pulse.verify(target).ok


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("fp8", "expected NAME=FORM"),
        ("fp8=Fp9()", "expected one of"),
        ("fp8=Fp8(block='row')", "found 'row'"),
        (FORM.replace("fp8", "int8"), "found int8, int8"),
    ],
)
def test_a_form_that_is_none_is_a_bad_command_line(form: str, words: str, tmp_path: Path) -> None:
    Trainer(tmp_path / "source").publish(0)
    views = ("--view", "int8=Int8()", "--view", form)
    done = python(MAIN, "relay", str(tmp_path / "source"), str(tmp_path / "target"), *views)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "target").exists()


def test_every_kind_of_view_can_be_named() -> None:
    needed: dict[type[View], dict[str, Any]] = {pulse.Fp4: {"format": "nvfp4"}}
    for kind in View.__subclasses__():
        made = kind(**needed.get(kind, {}))
        assert view_of(f"x={made!r}") == ("x", made)
    assert view_of(FORM) == ("fp8", VIEW)
