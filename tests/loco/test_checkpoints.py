"""Checkpoints of trainers: resumed runs, another number of and states that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import pulse_rl as pulse
from tests.loco.ranks import Model, Ranks, adam, bits, good, inner_step, trainable


def resume(
    group: Any, rank: int, size: int, kind: str, every: int, overlap: int, saved_after: int, folder: str
) -> None:
    """Three rounds, and the same from a checkpoint after so many steps: within a round, and, with overlap, between the
    end of a round's exchange and the next round."""
    options: dict[str, Any] = {"sync_every": every, "overlap": overlap, "group": group}
    file, last = Path(folder) / f"{rank}.pt", 3 * every

    def train(steps: range) -> tuple[Any, Model]:
        model = Model()
        optimizer = adam(model)
        loco = getattr(pulse, kind)(model, optimizer, **options)
        if steps.start:
            state = torch.load(file, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["inner"])
            loco.load_state_dict(state["loco"])
            assert (loco.round, loco.inner_steps) == (1, saved_after - every)
        with loco:
            for step in steps:
                inner_step(model, optimizer, rank, step)
                if step + 1 == saved_after:
                    inner = optimizer.state_dict()
                    torch.save({"loco": loco.state_dict(), "model": model.state_dict(), "inner": inner}, file)
        return loco, model

    loco, uninterrupted = train(range(last))
    # Leaving ends a round 3 that has just begun, so nothing is on top of θ: a checkpoint for any number of ranks.
    assert (loco.round, loco.inner_steps, loco.state_dict()["round"]) == (3, 0, 3)
    assert loco.digest == pulse.digest(dict(trainable(uninterrupted)))
    resumed, model = train(range(saved_after, last))
    assert bits(trainable(model)) == bits(trainable(uninterrupted))
    assert [r.digest for r in resumed.reports] == [r.digest for r in loco.reports[1:]]


@pytest.mark.parametrize("kind", ["PulseLoCo", "DiLoCo"])
@pytest.mark.parametrize(("every", "overlap", "saved_after"), [(3, 0, 4), (4, 2, 7)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    ranks: Ranks, every: int, overlap: int, saved_after: int, kind: str, tmp_path: Path
) -> None:
    good(ranks(resume, 2, kind, every, overlap, saved_after, str(tmp_path)))


def save_distributed(group: Any, rank: int, size: int, folder: str) -> tuple[Any, Any]:
    """Two rounds, saved by torch.distributed.checkpoint, then one more: the saved residual, and the last digest."""
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=2, group=group) as loco:
        for step in range(4):
            inner_step(model, optimizer, rank, step)
        state = {"loco": loco.state_dict(), "inner": {str(rank): optimizer.state_dict()["state"]}}
        state_dict_saver.save(state, checkpoint_id=folder, process_group=group)
        kept = {name: t.clone() for name, t in loco.state_dict()["residual"][str(rank)].items()}
        for step in range(4, 6):
            inner_step(model, optimizer, rank, step)
        return kept, loco.digest


def load_distributed(group: Any, rank: int, size: int, folder: str, workers: int) -> tuple[Any, Any]:
    model = Model()
    optimizer = adam(model)
    loco = pulse.PulseLoCo(model, optimizer, sync_every=2, group=group)
    state: dict[str, Any] = {"loco": loco.state_dict(workers=workers)}
    if workers == size:  # the inner state is each rank's own; Adam makes it in a first step
        for p in trainable(model).values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        state["inner"] = {str(rank): optimizer.state_dict()["state"]}
    state_dict_loader.load(state, checkpoint_id=folder, process_group=group)
    loco.load_state_dict(state["loco"])
    kept = {name: t.clone() for name, t in loco.state_dict()["residual"][str(rank)].items()}
    assert (loco.round, loco.inner_steps) == (2, 0)
    with loco:
        for step in range(4, 6):
            inner_step(model, optimizer, rank, step)
    return kept, loco.digest


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_keep_every_residual(ranks: Ranks, tmp_path: Path) -> None:
    """To the same number of ranks bit for bit; to another, the sum that counts is kept: Σ residuals / ranks."""
    saved = good(ranks(save_distributed, 4, str(tmp_path)))
    same = good(ranks(load_distributed, 4, str(tmp_path), 4))
    for (kept, digest), (expected, expected_digest) in zip(same, saved, strict=True):
        assert bits(kept) == bits(expected)
        assert digest == expected_digest
    for size in (2, 3):
        fewer = good(ranks(load_distributed, size, str(tmp_path), 4))
        assert len({digest for _, digest in fewer}) == 1
        for name in saved[0][0]:
            before = sum(kept[name].double() for kept, _ in saved) / 4
            after = sum(kept[name].double() for kept, _ in fewer) / size
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-12)
    assert any(tensor.abs().max() > 0 for kept, _ in saved for tensor in kept.values() if tensor.numel())


def refuse_malformed(group: Any, rank: int, size: int) -> dict[str, tuple[str, str]]:
    """Each state is refused before anything is changed, by a TypeError or a ValueError: what → (error, message)."""
    model = Model()
    optimizer = adam(model)
    with pulse.PulseLoCo(model, optimizer, sync_every=2, group=group) as trained:
        for step in range(2):
            inner_step(model, optimizer, rank, step)
    good_state = trained.state_dict()
    one = {name: tensor.clone() for name, tensor in good_state["theta"].items()}
    model = Model()
    loco = pulse.PulseLoCo(model, adam(model), sync_every=2, group=group)
    before = bits(trainable(model)), loco.digest, bits(loco.state_dict()["residual"]["0"])
    states: dict[str, Any] = {"none": None, "list": [good_state], "empty": {}, "path": "checkpoint.pt"}
    for key in ("kind", "round", "inner_steps", "workers", "theta", "momentum", "residual"):
        states[f"no {key}"] = {name: value for name, value in good_state.items() if name != key}
        states[f"{key} None"] = good_state | {key: None}
    for key in ("round", "inner_steps", "workers"):
        for value in (-1, 1.5, "2", True, float("nan"), torch.tensor([1, 2]), 2**63, torch.tensor(1.0)):
            states[f"{key} {value!r}"] = good_state | {key: value}
    states["workers 0"] = good_state | {"workers": 0}
    states["workers without end"] = good_state | {"workers": 10**15}
    states["theta of numbers"] = good_state | {"theta": dict.fromkeys(one, 1.0)}
    states["theta of arrays"] = good_state | {"theta": {name: tensor.numpy() for name, tensor in one.items()}}
    states["theta on meta"] = good_state | {"theta": {name: tensor.to("meta") for name, tensor in one.items()}}
    states["sparse momentum"] = good_state | {"momentum": one | {"b": one["b"].to_sparse()}}
    states["residual of numbers"] = good_state | {"residual": {"0": 3}}
    states["residual by number"] = good_state | {"residual": {0: one}}
    states["residual reshaped"] = good_state | {"residual": {"0": one | {"b": one["b"][:-1]}}}
    for key in ("theta", "momentum"):
        states[f"{key} infinite"] = good_state | {key: one | {"b": torch.full_like(one["b"], torch.inf)}}
    states["residual NaN"] = good_state | {"residual": {"0": one | {"b": torch.full_like(one["b"], torch.nan)}}}
    states["workers within a round"] = loco.state_dict(workers=4) | {"inner_steps": 1}
    states["another model"] = good_state | {"momentum": {"else": torch.zeros(3)}}
    states["theta rounded"] = good_state | {"theta": {name: tensor.bfloat16() for name, tensor in one.items()}}
    states["no number of names"] = good_state | {"momentum": {3: one["b"]}}
    states["DiLoCo's"] = good_state | {"kind": "DiLoCo"}
    messages = {}
    for what, state in states.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            loco.load_state_dict(state)
        messages[what] = type(caught.value).__name__, str(caught.value)
        assert (bits(trainable(model)), loco.digest, bits(loco.state_dict()["residual"]["0"])) == before, what
        assert (loco.round, loco.inner_steps) == (0, 0), what
    loco.load_state_dict(good_state | {"round": torch.tensor(1), "note": "is not ours"})
    assert (loco.digest, loco.round) == (trained.digest, 1)
    return messages


def test_malformed_states_are_refused_whole(ranks: Ranks) -> None:
    (messages,) = good(ranks(refuse_malformed, 1))
    assert messages["path"] == ("TypeError", "state: expected what state_dict gave, a dict, found str")
    assert messages["no momentum"] == (
        "ValueError",
        "state: expected what state_dict gave, found one without momentum",
    )
    assert messages["round 1.5"] == ("ValueError", "round: expected a whole number from 0, found 1.5")
    assert messages["theta None"] == ("TypeError", "theta: expected a dict, found NoneType")
    assert messages["theta of arrays"][1] == "theta: expected dense tensors, found 'a': ndarray"
    assert messages["residual of numbers"] == ("TypeError", "residual of rank 0: expected name → tensor, found int")
    assert messages["momentum infinite"] == (
        "ValueError",
        "momentum: expected finite numbers, found an infinity or NaN in b",
    )
    assert "1 inner steps later" in messages["workers within a round"][1]
    assert "found 0, as a trainer with a Membership writes" in messages["workers 0"][1]
    assert (
        "momentum: expected the model's trainable parameters in float32, found others: a"
        in messages["another model"][1]
    )
    assert "theta: expected the model's trainable parameters in float32" in messages["theta rounded"][1]
    assert "found none of 1, 2, 3" in messages["workers without end"][1]
    assert "of a PulseLoCo, found that of a DiLoCo" in messages["DiLoCo's"][1]


def refuse_the_other_kind(group: Any, rank: int, size: int, folder: str) -> None:
    """By its kind, as torch.distributed.checkpoint drops residuals that the dict to load into has no place for."""

    def made(kind: str) -> Any:
        model = Model()
        return getattr(pulse, kind)(model, adam(model), sync_every=2, group=group)

    pulse_loco, diloco = made("PulseLoCo"), made("DiLoCo")
    state_dict_saver.save(pulse_loco.state_dict(), checkpoint_id=folder, process_group=group)
    loaded = diloco.state_dict()
    state_dict_loader.load(loaded, checkpoint_id=folder, process_group=group)
    assert not loaded["residual"]
    with pytest.raises(ValueError, match="expected the state of a DiLoCo, found that of a PulseLoCo"):
        diloco.load_state_dict(loaded)
    with pytest.raises(ValueError, match="expected the state of a PulseLoCo, found that of a DiLoCo"):
        pulse_loco.load_state_dict(diloco.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_state_of_the_other_kind_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    good(ranks(refuse_the_other_kind, 1, str(tmp_path)))
