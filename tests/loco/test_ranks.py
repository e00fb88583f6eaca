"""PulseLoCo and DiLoCo on real ranks over Gloo, against the algorithm in plain torch, bit for bit."""

import itertools
import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.loco import masters
from pulse_rl.weights import digests
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, seen, trainable
from tests.naive import loco as reference


def naive(
    size: int,
    rounds: int,
    every: int,
    *,
    dense: bool,
    gate: str = "bfloat16",
    gate_scale: float = 1.0,
    value_dtype: str = "float32",
) -> list[dict[str, bytes]]:
    """The algorithm as published, in plain torch, all ranks in one process: θ after each round."""
    shared = Model()
    outer = torch.optim.SGD(trainable(shared).values(), lr=0.7, momentum=0.9, nesterov=True)
    models = [Model() for _ in range(size)]
    inner = [adam(model) for model in models]
    residual = [{n: torch.zeros_like(p) for n, p in trainable(shared).items()} for _ in range(size)]
    found, cast = [], getattr(torch, gate)
    with torch.no_grad():
        for round_ in range(rounds):
            for rank, step in itertools.product(range(size), range(every)):
                inner_step(models[rank], inner[rank], rank, round_ * every + step)
            for name, theta in trainable(shared).items():
                total = torch.zeros_like(theta)
                for rank in range(size):
                    s = residual[rank][name] + (theta - trainable(models[rank])[name])
                    if value_dtype == "log8":
                        sent = logarithms(name, theta, s, rank, gate, gate_scale)
                    else:
                        send = (seen(theta, cast) != seen(theta - gate_scale * s, cast)) | dense
                        sent = torch.where(send, s.to(getattr(torch, value_dtype)).float(), 0)
                    residual[rank][name] = s - sent
                    total += sent
                theta.grad = total / size
            outer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
            found.append(bits(trainable(shared)))
    return found


def logarithms(name: str, theta: torch.Tensor, s: torch.Tensor, rank: int, gate: str, scale: float) -> torch.Tensor:
    """What is sent of s, by the naive twins of the kernels."""
    flat, rest = theta.reshape(-1).numpy(), s.reshape(-1).numpy()
    turn = [0, 1 << 31, 1 << 30, 3 << 30][rank]
    codes, sent = np.empty(len(flat), np.int8), np.zeros(len(flat), np.float32)
    seed = digests.seed(name, "F32", tuple(theta.shape))
    reference.log8(flat, flat, rest, gate, scale, seed, turn, codes)
    at = np.flatnonzero(codes)
    values = np.empty(len(at), np.float32)
    reference.log8_values(codes[at], [reference.cast_one(flat[i], gate) for i in at], gate, scale, values)
    sent[at] = values
    return torch.from_numpy(sent).view_as(theta)


def train(
    group: Any, rank: int, size: int, kind: str, rounds: int, every: int, fragment: int, options: dict[str, Any]
) -> tuple[list[dict[str, bytes]], list[pulse.LocoReport], str]:
    model = Model()
    optimizer = adam(model)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masters, "FRAGMENT", fragment)
        loco = getattr(pulse, kind)(model, optimizer, sync_every=every, process_group=group, **options)
    with loco:
        for step in range(rounds * every):
            inner_step(model, optimizer, rank, step)
            if (step + 1) % every == 0:
                found.append(bits(trainable(model)))
        assert loco.report is loco.reports[-1]
    # Outside of the context steps are not counted.
    inner_step(model, optimizer, rank, 99)
    assert loco.inner_steps == 0
    return found, loco.reports, loco.digest


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"exchange": "split"}),
        (3, {"exchange": "gather", "value_dtype": "bfloat16"}),
        (3, {"exchange": "split", "value_dtype": "bfloat16"}),
        (3, {"gate": "float8_e4m3fn"}),
        (4, {"exchange": "gather"}),
        (4, {"exchange": "split", "gate": "float16"}),
        (2, {"gate_scale": 7.0}),
        (3, {"exchange": "gather", "value_dtype": "log8", "gate_scale": 7.0}),
        (3, {"exchange": "split", "value_dtype": "log8", "gate": "float8_e4m3fn", "gate_scale": 2.0}),
    ],
)
def test_pulse_loco_equals_the_algorithm_in_plain_torch(ranks: Ranks, size: int, options: dict[str, Any]) -> None:
    rounds, every = 4, 2
    options = {"value_dtype": "float32"} | options
    expected = naive(size, rounds, every, dense=False, **{n: v for n, v in options.items() if n != "exchange"})
    found = good(ranks(train, size, "PulseLoCo", rounds, every, 500, options))
    for parameters, reports, digest in found:
        assert parameters == expected
        assert [report.round for report in reports] == [1, 2, 3, 4]
        assert reports[-1].digest == digest == found[0][1][-1].digest
        assert all(0 < report.density <= 1 and report.workers == size for report in reports)
        assert all(report.dense_nbytes == 4 * report.elements for report in reports)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_diloco_equals_the_algorithm_in_plain_torch(ranks: Ranks, size: int) -> None:
    expected = naive(size, 3, 2, dense=True)
    for parameters, reports, _ in good(ranks(train, size, "DiLoCo", 3, 2, 500, {})):
        assert parameters == expected
        assert all(r.density == 1 and r.sent_nbytes == r.dense_nbytes and r.exchange == "dense" for r in reports)


def test_the_digest_is_the_models(ranks: Ranks) -> None:
    """pulse.digest of the trainable parameters, so that a publisher's digest can be compared with it."""
    assert len(set(good(ranks(compare_digests, 2)))) == 1


def compare_digests(group: Any, rank: int, size: int) -> str:
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=1, process_group=group) as loco:
        inner_step(model, optimizer, rank, 0)
        assert loco.report is not None
        assert loco.report.digest == loco.digest == pulse.digest(dict(trainable(model)))
        return loco.digest


def move(group: Any, rank: int, size: int, overlap: int) -> None:
    """Parameters that get other memory, become other objects or are frozen for a while are still shared."""
    model = Model()
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    options: dict[str, Any] = {"sync_every": 2, "overlap": overlap, "process_group": group}
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
            pulse.PulseLoCo(model, optimizer, sync_every=2, overlap=overlap, process_group=group) as loco,
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
