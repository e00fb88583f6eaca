"""Channels over real ranks: what receivers hold after each send, bit for bit, and what an error leaves behind."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from channel_world import BUCKET, bits, made, step, zeros
from loco_ranks import Ranks, good, running

import pulse_rl as pulse


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with running() as run:
        yield run


def several(group: Any, rank: int, size: int, options: dict[str, Any]) -> Any:
    channel = pulse.Channel(group, bucket_nbytes=BUCKET, **options)
    weights = made() if rank == 0 else zeros()
    reports, states = [], []
    for version in (3, 4, 7):
        if rank == 0:
            if version > 3:
                step(weights, version)
            reports.append(channel.send(weights, version=version))
        else:
            reports.append(channel.receive(weights))
        states.append(bits(weights))
        assert channel.version == version
    return reports, states, pulse.digest(weights)


@pytest.mark.parametrize("codec", ["gap", "context", "auto"])
@pytest.mark.parametrize("size", [2, 4])
def test_receivers_hold_the_senders_bits_after_each_send(ranks: Ranks, size: int, codec: str) -> None:
    (sent, states, digest), *others = good(ranks(several, size, {"codec": codec, "validate_every": 2}))
    for received, held, found in others:
        assert held == states
        assert found == digest
        for one, other in zip(sent, received, strict=True):
            same = ("version", "base", "digest", "sent", "sent_nbytes", "changes", "codec", "buckets", "validated")
            assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
    first, second, third = sent
    assert (first.sent, first.base, first.sent_nbytes) == ("dense", None, first.full_nbytes)
    assert (second.sent, second.base, third.base) == ("sparse", 3, 4)
    assert third.digest == digest
    assert second.sent_nbytes < first.full_nbytes / 3
    assert [report.validated for report in sent] == [False, True, False]
    assert first.buckets == -(-first.full_nbytes // BUCKET)


# Sharded senders and receivers


def rows(tensor: torch.Tensor, at: int, parts: int) -> pulse.Shard:
    """Part `at` of a tensor, cut along its first dimension: live memory of its own."""
    n = tensor.shape[0]
    low, high = at * n // parts, (at + 1) * n // parts
    return pulse.Shard(tensor[low:high].clone(), shape=tensor.shape, offset=[low, *[0] * (tensor.ndim - 1)])


def columns(tensor: torch.Tensor, at: int, parts: int) -> pulse.Shard:
    low, high = at * tensor.shape[1] // parts, (at + 1) * tensor.shape[1] // parts
    return pulse.Shard(tensor[:, low:high].clone(), shape=tensor.shape, offset=[0, low])


def share_of_rows(weights: dict[str, torch.Tensor], at: int, parts: int) -> dict[str, Any]:
    """Matrices by rows, all else whole on each."""
    return {name: rows(t, at, parts) if t.ndim == 2 and len(t) else t for name, t in weights.items() if name != "head"}


def share_of_columns(weights: dict[str, torch.Tensor], at: int, parts: int) -> dict[str, Any]:
    return {
        name: columns(t, at, parts) if t.ndim == 2 and len(t) else t for name, t in weights.items() if name != "head"
    }


def update(held: dict[str, Any], full: dict[str, torch.Tensor]) -> None:
    """Set what a rank holds to what the whole weights have there."""
    for name, one in held.items():
        if isinstance(one, pulse.Shard):
            box = one.boxes()[0][0]
            one.tensor.copy_(full[name][tuple(slice(a, a + n) for a, n in zip(*box, strict=True))])


def untied() -> dict[str, torch.Tensor]:
    weights = made()
    del weights["head"]
    return weights


def sharded(group: Any, rank: int, size: int, sources: tuple[int, ...], cuts: dict[int, tuple[str, int, int]]) -> Any:
    """cuts: rank → how its share is cut, its place, and how many shares."""
    channel = pulse.Channel(group, sources, bucket_nbytes=BUCKET, validate_every=1)
    full = untied()
    weights: Any = untied() if rank in sources else {name: torch.zeros_like(t) for name, t in full.items()}
    if rank in cuts:
        how, at, parts = cuts[rank]
        weights = (share_of_rows if how == "rows" else share_of_columns)(weights, at, parts)
    reports = []
    for version in range(3):
        if version:
            step(full, version)
        if rank in sources:
            if rank in cuts:
                update(weights, full)
            for name, tensor in full.items():
                if not isinstance(weights[name], pulse.Shard):
                    weights[name].copy_(tensor)
            reports.append(channel.send(weights, version=version))
        else:
            reports.append(channel.receive(weights))
            expected = {n: t.clone() for n, t in full.items()}
            want = (
                expected
                if rank not in cuts
                else (share_of_rows if cuts[rank][0] == "rows" else share_of_columns)(expected, *cuts[rank][1:])
            )
            for name, one in want.items():
                mine, other = weights[name], one
                if isinstance(one, pulse.Shard):
                    mine, other = mine.tensor, one.tensor
                assert bits({"x": mine}) == bits({"x": other}), name
    return reports, pulse.digest(full)


LAYOUTS = {
    "two senders by rows, whole receivers": ((0, 1), {0: ("rows", 0, 2), 1: ("rows", 1, 2)}),
    "one sender, an engine by columns": ((0,), {1: ("columns", 0, 3), 2: ("columns", 1, 3), 3: ("columns", 2, 3)}),
    "senders by rows, an engine by columns": (
        (0, 2),
        {0: ("rows", 0, 2), 2: ("rows", 1, 2), 1: ("columns", 0, 2), 3: ("columns", 1, 2)},
    ),
    "replicated senders, a whole receiver and half an engine's": ((1, 3), {}),
    "one engine by rows, one receiver whole": ((0,), {1: ("rows", 0, 2), 2: ("rows", 1, 2)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_either_side_fit_together(ranks: Ranks, layout: str) -> None:
    sources, cuts = LAYOUTS[layout]
    for reports, digest in good(ranks(sharded, 4, sources, cuts)):
        assert [report.sent for report in reports] == ["dense", "sparse", "sparse"]
        assert reports[-1].digest == digest
        assert all(report.validated for report in reports)
