"""Channels over real ranks: what receivers hold after each send, bit for bit, and what an error leaves behind."""

from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.sync.channel.receiver import PartReader
from tests.channel.world import BUCKET, bits, made, step, zeros
from tests.loco.ranks import Ranks, good


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
    channel = pulse.Channel(group, source=sources, bucket_nbytes=BUCKET, validate_every=1)
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


def resharded(group: Any, rank: int, size: int) -> Any:
    """Two senders cut their weights otherwise, and send the last version's number twice with other bits."""
    channel = pulse.Channel(group, source=(0, 1), bucket_nbytes=BUCKET)
    full, held = torch.arange(64.0).view(8, 8), {"w": torch.zeros(8, 8)}

    def call(cut: int, version: int) -> str:
        rows = full[:cut] if rank == 0 else full[cut:]
        try:
            if rank == 2:
                return channel.receive(held).sent
            return channel.send({"w": pulse.Shard(rows, shape=(8, 8), offset=(rank * cut, 0))}, version=version).sent
        except ValueError as error:
            return str(error)

    sent = [call(4, 5)]
    first = full.clone()
    full += 1
    sent += [call(2, 5), call(2, 5)]
    kept = rank < 2 or torch.equal(held["w"], first)
    sent += [call(2, 6)]
    return sent, kept, rank < 2 or torch.equal(held["w"], full)


def test_a_version_keeps_its_bits_where_senders_hold_other_pieces(ranks: Ranks) -> None:
    for (first, *refused, last), kept, arrived in good(ranks(resharded, 3)):
        assert (first, last, kept, arrived) == ("dense", "dense", True, True)
        assert all("other bits" in error for error in refused)


def stages(group: Any, rank: int, size: int, how: str) -> Any:
    """An engine of two ranks that hold other tensors each, whole but for one, as in pipeline parallelism."""
    channel = pulse.Channel(group, bucket_nbytes=BUCKET, validate_every=2)
    full = made()  # `head` is tied to `embed`
    weights: Any = full
    held = set(full)
    if rank:
        with_head = 1 if how == "tied on one" else 2
        held = {name for name in full if (name in ("embed", "wide", "layers.0.up")) == (rank == 1)} - {"head"}
        held |= {"head"} if rank == with_head else set()
        weights = {name: tensor for name, tensor in zeros().items() if name in held}
        if how == "shards" and rank == 1:
            weights["wide"] = [rows(weights["wide"], at, 2) for at in range(2)]
    reports = []
    for version in range(3):
        if version:
            step(full, version)
        reports.append(channel.send(full, version=version) if rank == 0 else channel.receive(weights))
        for name in held:
            found = weights[name]
            if isinstance(found, list):
                found = torch.cat([one.tensor for one in found])
            assert bits({name: found}) == bits({name: full[name]})
    return [report.sent for report in reports]


@pytest.mark.parametrize("how", ["whole tensors", "tied on one", "shards"])
def test_an_engines_stages_hold_other_tensors(ranks: Ranks, how: str) -> None:
    """One without elements is on the second alone, and so is one that the sender ties to a tensor of the first."""
    assert good(ranks(stages, 3, how)) == [["dense", "sparse", "sparse"]] * 3


def of_fsdp(group: Any, rank: int, size: int) -> Any:
    """Two ranks train with FSDP2, two others receive whole."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 7)).bfloat16()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = DeviceMesh("cpu", [0, 1])
    channel = pulse.Channel(group, source=(0, 1), bucket_nbytes=BUCKET)
    if rank < 2:
        fully_shard(model, mesh=mesh)
    else:
        for tensor in model.state_dict().values():
            tensor.zero_()
    sent = []
    for version in range(2):
        if version:
            step(expected, version)
            if rank < 2:
                from torch.distributed.tensor import distribute_tensor

                for name, tensor in model.state_dict().items():
                    whole = distribute_tensor(expected[name], mesh, tensor.placements, src_data_rank=None)
                    tensor.to_local().copy_(whole.to_local())
        report = channel.send(model, version=version) if rank < 2 else channel.receive(model)
        sent.append(report.sent)
    return sent, rank < 2 or bits(model.state_dict()) == bits(expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_shards_of_fsdp_are_sent_as_they_are(ranks: Ranks) -> None:
    assert good(ranks(of_fsdp, 4)) == [(["dense", "sparse"], True)] * 4


def half(group: Any, rank: int, size: int) -> Any:
    """What an engine's rank keeps of the changes, of all that is sent."""
    kept: list[int] = []
    patch = PartReader.patch

    def noted(self: PartReader) -> Any:
        kept.append(sum(len(one) for _, one in self._kept))
        return patch(self)

    PartReader.patch = noted  # type: ignore[method-assign]
    channel = pulse.Channel(group, codec="gap")
    full = {f"layers.{i}.up": torch.randn(512, 512, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    weights: Any = full if rank == 0 else {name: rows(tensor, rank - 1, 2) for name, tensor in full.items()}
    for version in range(2):
        if version and rank == 0:
            for tensor in full.values():
                tensor.view(torch.int32)[:, ::9] ^= 1
        report = channel.send(weights, version=version) if rank == 0 else channel.receive(weights)
    PartReader.patch = patch  # type: ignore[method-assign]
    return kept, report.payload_nbytes


def test_a_half_engine_keeps_half_of_the_changes(ranks: Ranks) -> None:
    _, *receivers = good(ranks(half, 3))
    for (kept,), nbytes in receivers:
        assert 0.4 * nbytes < kept < 0.56 * nbytes


# Reports


def observed(group: Any, rank: int, size: int) -> Any:
    channel = pulse.Channel(group, bucket_nbytes=BUCKET, codec="gap", observe=True)
    weights = made() if rank == 0 else zeros()
    reports = []
    for version in range(2):
        if rank == 0:
            step(weights, version)
            reports.append(channel.send(weights, version=version))
        else:
            reports.append(channel.receive(weights))
    return reports, rank == 0 or bits(weights) == bits(zeros()), channel.version


def test_observing_measures_and_sends_nothing(ranks: Ranks) -> None:
    (sent, _, version), (received, untouched, held) = good(ranks(observed, 2))
    assert untouched
    assert (version, held) == (1, None)
    for report in (*sent, *received):
        assert report.observed
        assert (report.sent, report.sent_nbytes, report.buckets) == ("none", 0, 0)
        assert report.exchanged_nbytes < 2000
    assert sent[0].payload_nbytes == sent[0].full_nbytes
    assert sent[1].payload_nbytes < sent[1].full_nbytes / 3
    payload = sent[1].payload
    assert payload is not None
    assert payload.changes == sent[1].changes
    assert (payload.index_nbytes, payload.value_nbytes) == (4 * payload.changes, 2 * payload.changes)
    assert 0 < payload.coded_index_nbytes < payload.coded_nbytes < sent[1].payload_nbytes
    assert 4 < payload.index_bits < 8  # of distances of about 20
    assert 8 < payload.value_bits < 16
    dense, sparse = sent[1].cost(1e9, bucket_s=1e-3, launch_s=1e-4)
    assert dense.nbytes == sent[1].full_nbytes
    assert sparse.nbytes == 6 * sent[1].changes
    assert sparse.buckets == 1
    assert sparse.seconds == pytest.approx(8 * sparse.nbytes / 1e9 + 1.1e-3)


def test_observing_needs_no_receiver(ranks: Ranks) -> None:
    for report in good(ranks(alone, 1)):
        assert report.observed
        assert report.base == 0


def alone(group: Any, rank: int, size: int) -> Any:
    channel = pulse.Channel(group, observe=True)
    weights = made()
    channel.send(weights, version=0)
    step(weights, 1)
    with pytest.raises(ValueError, match="some rank of 1 receives"):
        pulse.Channel(group)
    return channel.send(weights, version=1)


def mixed(group: Any, rank: int, size: int) -> Any:
    """All elements of one tensor change, some of another."""
    channel = pulse.Channel(group, codec="gap")
    weights = {"all": torch.zeros(5000).bfloat16(), "some": torch.zeros(5000).bfloat16(), "none": torch.zeros(5)}
    for version in range(2):
        if version and rank == 0:
            weights["all"] += torch.arange(5000)
            weights["some"][::50] += 1
        report = channel.send(weights, version=version) if rank == 0 else channel.receive(weights)
    return report.dense_tensors, report.sparse_tensors, report.changes, bits(weights)


def test_each_tensor_is_sent_dense_or_sparse_by_what_is_smaller(ranks: Ranks) -> None:
    first, second = good(ranks(mixed, 2))
    assert first == second
    assert first[:2] == (1, 1)
    assert first[2] == 4999 + 100


def test_settings_that_make_no_sense_are_refused() -> None:
    for options in (
        {"codec": "raw"},
        {"bucket_nbytes": 0},
        {"validate_every": -1},
        {"bandwidth": "fast"},
        {"bandwidth": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            pulse.Channel(None, **options)
    with pytest.raises(pulse.ExchangeError, match="no process group"):
        pulse.Channel(None)
