"""What PulseLoCo and DiLoCo refuse before a round: arguments, models and states that a round would get wrong."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pulse_rl as pulse
from tests.loco.ranks import Model, Ranks, adam, good, inner_step


def test_arguments_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """Before the process group is looked for: there is none here."""
    model = Model()
    with pytest.raises(pulse.ExchangeError, match="init_process_group"):
        pulse.PulseLoCo(model, adam(model), sync_every=1)
    with pytest.raises(ValueError, match="sync_every.* found 0"):
        pulse.DiLoCo(model, adam(model), sync_every=0)
    with pytest.raises(ValueError, match="overlap: expected 0 to 2 inner steps"):
        pulse.DiLoCo(model, adam(model), sync_every=3, overlap=3)
    with pytest.raises(ValueError, match="gate: expected one of bfloat16, .* found 'int8'"):
        pulse.PulseLoCo(model, adam(model), sync_every=1, gate="int8")  # type: ignore[arg-type]
    for scale in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(ValueError, match="gate_scale: expected None, or from 1/1024 to 1024"):
            pulse.PulseLoCo(model, adam(model), sync_every=1, gate_scale=scale)
    with pytest.raises(ValueError, match="outer_lr"):
        pulse.PulseLoCo(model, adam(model), sync_every=1, outer_momentum=1.0)
    some = torch.optim.SGD([model.b], lr=1.0)
    with pytest.raises(ValueError, match="4 that are not: a, scale, empty, strided"):
        pulse.PulseLoCo(model, some, sync_every=1)
    with pytest.raises(ValueError, match="found none"):
        pulse.PulseLoCo(torch.nn.Module(), adam(model), sync_every=1)
    with pytest.raises(TypeError, match="model: expected a torch module, found AdamW"):
        pulse.PulseLoCo(adam(model), model, sync_every=1)  # type: ignore[arg-type]


def refuse_models(group: Any, rank: int, size: int) -> dict[str, str]:
    messages = {}

    def refused(what: str, kind: type[Exception], run: Any) -> None:
        with pytest.raises(kind) as caught:
            run()
        messages[what] = str(caught.value)

    def made(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> pulse.PulseLoCo:
        return pulse.PulseLoCo(model, optimizer, sync_every=2, group=group)

    model = Model()
    model.b = torch.nn.Parameter(model.b.detach().bfloat16())
    refused("narrow", TypeError, lambda: made(model, adam(model)))
    model = Model()
    model.part = torch.nn.Parameter(model.b.data[5:20])  # a view of another parameter's memory
    refused("shared", ValueError, lambda: made(model, adam(model)))
    model = Model()
    model.wide = torch.nn.Parameter(torch.zeros(1).expand(5))
    refused("expanded", ValueError, lambda: made(model, adam(model)))
    model = Model()
    head = torch.nn.Parameter(torch.zeros(3))
    refused("strangers", ValueError, lambda: made(model, torch.optim.SGD([*model.parameters(), head], lr=1)))

    model = Model()
    optimizer = adam(model)
    with made(model, optimizer) as loco:
        for step in range(2):
            inner_step(model, optimizer, rank, step)
        refused("entered twice", RuntimeError, loco.__enter__)
        refused("loaded late", RuntimeError, lambda: loco.load_state_dict({}))
        refused("set", AttributeError, lambda: setattr(loco, "outer_lr", 0.1))
        optimizer.add_param_group({"params": head})
        refused("added", ValueError, loco.sync)
        assert (loco.round, loco.outer_lr) == (1, 0.7)
    state = loco.state_dict()
    model = Model()
    again = made(model, adam(model))
    again.load_state_dict(state)
    with torch.no_grad():
        model.b.add_(1)  # as a model that is loaded after it does
    refused("order", ValueError, again.__enter__)
    return messages


def test_models_that_a_round_would_get_wrong_are_refused(ranks: Ranks) -> None:
    (messages,) = good(ranks(refuse_models, 1))
    assert messages["narrow"].startswith("parameter 'b': expected float32, found torch.bfloat16")
    assert "memory" in messages["shared"]
    assert ": part:" in messages["shared"]
    assert ": wide:" in messages["expanded"]
    assert "1 others" in messages["strangers"]
    assert messages["added"] == messages["strangers"]
    assert messages["set"].startswith("outer_lr: expected 0.7, with which this context was made, found 0.1")
    assert "load the model before this state" in messages["order"]


def shard(group: Any, rank: int, size: int) -> str:
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(TypeError) as caught:
        pulse.PulseLoCo(model, torch.optim.AdamW(model.parameters()), sync_every=1, group=group)
    return str(caught.value)


def test_shares_of_parameters_are_refused_by_name(ranks: Ranks) -> None:
    assert all(message.startswith("parameter 'bias': ") for message in good(ranks(shard, 2)))


def differ(group: Any, rank: int, size: int, what: str) -> None:
    """Rank 1 has other parameters, or another option."""
    model = Model()
    if what == "parameters" and rank == 1:
        with torch.no_grad():
            model.b[3] += 1e-3
    other = {"options": {"outer_lr": 0.5, "gate_scale": 7.0}, "scale": {"gate_scale": 1.0}}
    options: dict[str, Any] = other.get(what, {}) if rank == 1 else {}
    if what == "models" and rank == 1:
        model.b = torch.nn.Parameter(torch.zeros(7, 5))
        model.more = torch.nn.Parameter(torch.zeros(2))
        model.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    with pulse.PulseLoCo(model, adam(model), sync_every=1, group=group, **options):
        pass


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("parameters", ""),
        ("options", " (outer_lr=0.5 instead of 0.7, gate_scale=7.0 instead of 7.000000000000001)"),
        ("scale", " (gate_scale=1 instead of 7)"),
        (
            "models",
            " (parameters: the tensors differ: 1 missing in rank 1: scale; 1 unexpected in rank 1: more; "
            "1 of another shape: b (F32 [77] in the others, F32 [7, 5] in rank 1))",
        ),
    ],
)
def test_a_rank_that_starts_unlike_the_others_is_named_on_all(ranks: Ranks, what: str, named: str) -> None:
    errors = ranks(differ, 3, what)
    for error in errors:
        assert isinstance(error, pulse.IntegrityError)
        assert error.ranks == (1,)
        assert f"{what.replace('scale', 'options')} differ before round 1: rank 1 of 3" in str(error)
        assert str(error).endswith(named)
        assert (error.expected, error.found) == (errors[0].expected, errors[0].found)
        assert error.expected != error.found


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pulse_rl as p\n"
        "try: p.PulseLoCo\n"
        "except p.MissingExtraError as error: assert (error.name, error.extra) == ('torch', 'torch'), vars(error)\n"
        "else: sys.exit('imported')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
