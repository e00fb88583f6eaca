"""Weights that come one tensor at a time: the same history as of the whole mapping, and one tensor in memory."""

import gc
import json
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pulse_rl as pulse
from tests.loco.ranks import Ranks
from tests.sync.shares import model, shares


def stream(weights: dict[str, torch.Tensor], alive: "list[weakref.ref[torch.Tensor]]") -> Iterator[Any]:
    """Copies in another order, which nobody else holds."""
    for name in sorted(weights, reverse=True):
        if any(ref() is not None for ref in alive):
            gc.collect()  # a third of a second: only where a cycle may hold one
        assert not any(ref() is not None for ref in alive), "a tensor is still held"
        copy = weights[name].clone()
        copy = copy.float() if copy.is_floating_point() else copy
        alive.append(weakref.ref(copy))
        yield name, copy
        del copy


def test_a_stream_is_published_as_the_mapping_is(tmp_path: Path) -> None:
    """Digests, changes and bytes of patches, across a restart and in the background; FP32 is cast on the way."""
    whole = pulse.Publisher("memory://", codec="gap", cast="bfloat16")
    for version in range(4):
        if version in (0, 2):
            publisher = pulse.Publisher(tmp_path, codec="gap", cast="bfloat16")
        weights = model(version)
        expected = whole.publish(weights)
        report = publisher.publish(stream(weights, []), background=version == 3)
        publisher.flush()
        assert (report.version, report.digest, report.changes) == (version, expected.digest, expected.changes)
        live = pulse.Subscriber(tmp_path).allocate()
        assert pulse.Subscriber(tmp_path).sync(live).digest == expected.digest
    assert not list(Path(tmp_path.parent).glob("pulse-rl-*"))


def test_a_stream_is_read_to_its_end_also_where_it_fails(tmp_path: Path) -> None:
    """As the ranks that gather it wait for each other; what fails while it is read on does not hide why."""
    publisher, weights = pulse.Publisher(tmp_path), model(0)
    left = iter([("x", "no tensor"), *weights.items()])
    with pytest.raises(TypeError, match="tensor 'x'"):
        publisher.publish(left)
    assert next(left, None) is None
    left = iter(weights.items())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(pulse.StoreError, match="TMPDIR"):
        patch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        publisher.publish(left)
    assert next(left, None) is None

    def failing() -> Iterator[Any]:
        yield "x", "no tensor"
        raise OSError("gone")

    with pytest.raises(TypeError, match="tensor 'x'"):
        publisher.publish(failing())
    assert publisher.publish(iter(weights.items())).version == 0


def test_what_a_stream_may_not_be(tmp_path: Path) -> None:
    """Nothing is published, and the next version is."""
    publisher, weights = pulse.Publisher(tmp_path, codec="gap"), model(0)
    publisher.publish(weights)
    with pytest.raises(pulse.BaseMismatchError) as lacking:
        publisher.publish(stream({name: t for name, t in weights.items() if name != "norm"}, []), cast="bfloat16")
    assert lacking.value.missing == ("norm",)
    with pytest.raises(ValueError, match="expected each name once, found 'x' again"):
        publisher.publish(iter([("x", weights["norm"]), ("x", weights["norm"])]))
    for wrong in ([weights["norm"]], [(1, weights["norm"])], ["name"]):
        with pytest.raises(TypeError, match=r"expected an iterator of \(name, tensor\)"):
            publisher.publish(iter(wrong))
    with pytest.raises(TypeError, match="tensor 'x'"):
        publisher.publish(iter([("x", "no tensor")]))
    assert publisher.publish(iter(model(1).items())).base == 0


def test_an_anchor_of_a_stream_has_the_config_of_what_it_is_like(tmp_path: Path) -> None:
    config = SimpleNamespace(to_json_string=lambda: json.dumps({"architectures": ["Mine"], "hidden": 3}))
    pulse.Publisher(tmp_path, cast="bfloat16").publish(iter(model(0).items()), like=config)
    (path,) = pulse.load_assets(tmp_path, tmp_path / "worker")
    assert json.loads(path.read_text()) == {"architectures": ["Mine"], "hidden": 3, "dtype": "bfloat16"}


def publish_streams(group: Any, rank: int, size: int, store: str) -> list[str]:
    """First all ranks give shares, then rank 0 alone gives the whole tensors."""
    publisher = pulse.Publisher(store, group=group, codec="gap")
    found = [publisher.publish(iter(shares(model(version), rank, size).items())).digest for version in (0, 1)]
    return [*found, publisher.publish(iter(model(2).items() if rank == 0 else ())).digest]


def test_ranks_give_their_shares_or_one_gives_all(ranks: Ranks, tmp_path: Path) -> None:
    expected = [pulse.digest(model(version)) for version in range(3)]
    assert ranks(publish_streams, 2, str(tmp_path)) == [expected] * 2


def publish_gathered(group: Any, rank: int, size: int, store: str) -> list[str]:
    """Tensors that all ranks gather as they read them, as verl's trainers do. Rank 1 cannot take its first one."""

    def gathered() -> Iterator[Any]:
        for i, (name, tensor) in enumerate(model(0).items()):
            dist.barrier(group)
            if i % size == rank:
                yield name, "no tensor" if rank else tensor

    publisher = pulse.Publisher(store, group=group)
    try:
        publisher.publish(gathered())
    except (TypeError, pulse.ExchangeError) as error:
        return [type(error).__name__, str(publisher.history.head())]
    return []


def test_ranks_that_gather_do_not_wait_for_one_that_fails(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(publish_gathered, 2, str(tmp_path)) == [["ExchangeError", "None"], ["TypeError", "None"]]
