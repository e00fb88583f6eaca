"""group="world": publishers and subscribers that are made before torch's process group is."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pulse_rl as pulse
from tests.group import world as group_world
from tests.sync.shares import model, shares


def made_before(rank: int, size: int, directory: Path) -> list[Any]:
    """Make all as if there were no group yet, then publish and sync; returns the digests, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pulse_rl.sync").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        publisher = pulse.Publisher(directory / "store", group="world", codec="gap")
        subscriber = pulse.Subscriber(directory / "store", group="world", heartbeat=f"rank-{rank}")
        alone = pulse.Publisher(directory / f"alone-{rank}", codec="gap", group=None)  # as WORLD is
    live = shares({name: torch.zeros_like(tensor) for name, tensor in model(0).items()}, rank, size)
    digests = []
    for version in range(2):
        report = publisher.publish(shares(model(version), rank, size))
        subscriber.sync(live)
        digests += [report.digest, subscriber.digest]
        alone.publish(model(version))
    return [digests, lines]


def test_ranks_find_each_other_in_the_first_call(tmp_path: Path) -> None:
    """Digests are those of the whole weights; the publishers without a group are warned of, once, but for rank 0's."""
    results = group_world.run(made_before, 2, tmp_path)
    expected = [pulse.digest(model(0))] * 2 + [pulse.digest(model(1))] * 2
    for rank, (found, lines) in enumerate(results):
        assert found == expected
        assert sum(line.startswith("rank 1 of 2 publishes by itself") for line in lines) == rank
    assert [one.id for one in pulse.status(tmp_path / "store").subscribers or ()] == ["rank-0"]


def test_without_a_process_group_it_is_one_process_alone() -> None:
    store = pulse.open_store("memory://")
    report = pulse.Publisher(store, group="world").publish(model(0))
    live = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
    assert pulse.Subscriber(store, group="world").sync(live).digest == report.digest


@pytest.mark.parametrize("kind", [pulse.Publisher, pulse.Subscriber])
def test_no_other_text_is_a_group(kind: Any) -> None:
    with pytest.raises(ValueError, match="group: expected a process group, 'world' or None, found 'all'"):
        kind("memory://", group="all")
