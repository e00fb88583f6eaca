"""PulseLoCo and DiLoCo on real ranks over Gloo, against the algorithm in plain torch, bit for bit."""

import itertools
import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.loco import masters
from tests.loco.naive import Naive
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, trainable


def train(
    group: Any, rank: int, size: int, kind: str, steps: int, every: int, options: dict[str, Any]
) -> tuple[list[dict[str, bytes]], list[pulse.LocoReport], str]:
    """The live parameters after each inner step, and the reports."""
    model = Model()
    optimizer = adam(model)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masters, "FRAGMENT", 500)
        loco = getattr(pulse, kind)(model, optimizer, sync_every=every, group=group, **options)
    with loco:
        for step in range(1, steps + 1):
            inner_step(model, optimizer, rank, step)
            found.append(bits(trainable(model)))
        assert loco.report is loco.reports[-1]
    # Outside of the context steps are not counted.
    left = loco.inner_steps
    inner_step(model, optimizer, rank, 99)
    assert loco.inner_steps == left
    return found, loco.reports, loco.digest


PUBLISHED = {"value_dtype": "float32"}


@pytest.mark.parametrize(
    ("size", "every", "overlap", "options"),
    [
        (1, 2, 0, PUBLISHED),
        (2, 2, 0, {"exchange": "split"} | PUBLISHED),
        (3, 2, 0, {"exchange": "gather", "value_dtype": "bfloat16"}),
        (3, 2, 0, {"exchange": "split", "value_dtype": "bfloat16"}),
        (3, 2, 0, {"gate": "float8_e4m3fn"} | PUBLISHED),
        (4, 2, 0, {"exchange": "gather", "gate_scale": 7.0} | PUBLISHED),
        (4, 2, 0, {"exchange": "split", "gate": "float16"} | PUBLISHED),
        (3, 2, 0, {"exchange": "gather", "value_dtype": "log8", "gate_scale": 7.0}),
        (3, 2, 0, {"exchange": "split", "value_dtype": "log8", "gate": "float8_e4m3fn", "gate_scale": 2.0}),
        (1, 2, 1, PUBLISHED),
        (3, 3, 2, {"exchange": "gather"} | PUBLISHED),
        (3, 3, 2, {"exchange": "split"} | PUBLISHED),
        (1, 3, 2, "DiLoCo"),
        (3, 2, 1, "DiLoCo"),
        (4, 2, 0, "DiLoCo"),
    ],
)
def test_rounds_equal_the_algorithm_in_plain_torch(
    ranks: Ranks, size: int, every: int, overlap: int, options: Any
) -> None:
    """The live parameters of each rank after every inner step; with overlap a round ends that many steps later."""
    kind, options = ("DiLoCo", {}) if options == "DiLoCo" else ("PulseLoCo", options)
    naive = Naive(dense=kind == "DiLoCo", **{name: value for name, value in options.items() if name != "exchange"})
    naive.join(*range(size))
    steps, expected = 3 * every + overlap, list[list[dict[str, bytes]]]()
    for step in range(1, steps + 1):
        naive.steps(range(step, step + 1), *range(size))
        if step % every == 0:
            naive.begin()
        if step >= every and step % every == overlap:
            naive.end()
        expected.append([bits(trainable(naive.trainers[rank].model)) for rank in range(size)])
    found = good(ranks(train, size, kind, steps, every, {"overlap": overlap, **options}))
    for rank, (live, reports, digest) in enumerate(found):
        for step in range(steps):
            assert live[step] == expected[step][rank], f"rank {rank}, inner step {step + 1}"
        assert [report.round for report in reports] == [1, 2, 3]
        assert [report.digest for report in reports] == [report.digest for report in found[0][1]]
        assert reports[-1].digest == digest
        assert all(0 < report.density <= 1 and report.workers == size for report in reports)
        assert all(report.dense_nbytes == 4 * report.elements for report in reports)
        if kind == "DiLoCo":
            assert all(r.density == 1 and r.sent_nbytes == r.dense_nbytes and r.exchange == "dense" for r in reports)


def test_the_digest_is_the_models(ranks: Ranks) -> None:
    """pulse.digest of the trainable parameters, so that a publisher's digest can be compared with it."""
    assert len(set(good(ranks(compare_digests, 2)))) == 1


def compare_digests(group: Any, rank: int, size: int) -> str:
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=1, group=group) as loco:
        inner_step(model, optimizer, rank, 0)
        assert loco.report is not None
        assert loco.report.digest == loco.digest == pulse.digest(dict(trainable(model)))
        return loco.digest


def move(group: Any, rank: int, size: int, overlap: int) -> None:
    """Parameters that get other memory, become other objects or are frozen for a while are still shared."""
    model = Model()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    options: dict[str, Any] = {"sync_every": 2, "overlap": overlap, "group": group}
    with pulse.PulseLoCo(model, optimizer, **options) as loco:
        for step in range(6):
            if step == 1:
                model.a.data = model.a.detach().clone()
            if step == 3:
                model.b = torch.nn.Parameter(model.b.detach().clone())
                optimizer.param_groups[0]["params"][1] = model.b
            for name, parameter in trainable(model).items():
                parameter.grad = torch.full_like(parameter, 1.0 + rank) * len(name)
            model.scale.requires_grad_(step % 2 == 0)
            optimizer.step()
    assert loco.digest == pulse.digest(dict(trainable(model)) | {"scale": model.scale})
    model.frozen = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="found others: frozen"):
        loco.sync()
    model.half()
    with pytest.raises(TypeError, match="'a'.*float16"):
        loco.sync()


@pytest.mark.parametrize("overlap", [0, 1])
def test_rounds_follow_parameters_that_move(ranks: Ranks, overlap: int) -> None:
    good(ranks(move, 2, overlap))


def interrupt(group: Any, rank: int, size: int, overlap: int) -> None:
    """Ctrl-C while the second segment is committed: the round is whole afterwards, and no other one begins."""
    found = []
    for at in (0, 2):  # the segment; 0: no interruption
        model, commit, calls = Model(), masters.Masters.commit, itertools.count(1)

        def interrupted(*arguments: Any, at: int = at, calls: Any = calls, commit: Any = commit) -> int:
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            return int(commit(*arguments))

        optimizer = adam(model)
        with (
            pytest.MonkeyPatch.context() as patch,
            pulse.PulseLoCo(model, optimizer, sync_every=2, overlap=overlap, group=group) as loco,
        ):
            patch.setattr(masters.Masters, "commit", interrupted)
            for step in range(1 + overlap):
                inner_step(model, optimizer, rank, step)
            with pytest.raises(KeyboardInterrupt) if at else nullcontext():
                inner_step(model, optimizer, rank, 1 + overlap)
            state = loco.state_dict()
            if at:
                with pytest.raises(pulse.ExchangeError) as refused:
                    loco.sync()
                assert refused.value.round == 2
        held = state["theta"], state["momentum"], state["residual"]["0"], trainable(model)
        found.append((state["round"], state["inner_steps"], *map(bits, held)))
    assert found[0] == found[1]
    assert found[1][0] == 1


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_interruption_leaves_a_whole_round(ranks: Ranks, overlap: int) -> None:
    good(ranks(interrupt, 1, overlap))
