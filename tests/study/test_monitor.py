"""SparsityMonitor: its counts against a naive count with torch and against a publisher's patch, in training loops."""

import gc
import json
import resource
import signal
import weakref
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.study import Sparsity, SparsityMonitor


class Tiny(torch.nn.Module):
    """Tensors of four kinds, tied weights, a frozen one, a buffer of whole numbers; more elements than two segments."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embed_tokens = torch.nn.Embedding(2100, 1000)
            self.mlp = torch.nn.Linear(1000, 37)
            self.norm = torch.nn.LayerNorm(37)
            self.lm_head = torch.nn.Linear(1000, 2100, bias=False)
            self.frozen = torch.nn.Linear(3, 5)
        self.lm_head.weight = self.embed_tokens.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> Any:
        self.seen += 1
        return self.norm(self.mlp(self.embed_tokens(tokens))).square().sum() + self.lm_head.weight[:7].sum()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(torch.arange(number, 2000 + number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy, in BF16, of every tensor once."""
    names = [*dict(model.named_parameters()), "seen"]
    state = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    return {name: (t.bfloat16() if t.is_floating_point() else t).clone() for name, t in state.items()}


def differing(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    width = getattr(torch, f"int{8 * old.itemsize}")
    return old.view(width) != new.view(width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", [False, True])
def test_counts_are_those_of_a_naive_count(dtype: torch.dtype, hooked: bool) -> None:
    """In all and by kind, after every step; with float32 masters, and with BF16 parameters as they are."""
    model = Tiny().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    monitor = SparsityMonitor(model)
    found: list[Sparsity | None] = []
    if hooked:
        optimizer.register_step_post_hook(lambda *_: found.append(monitor.step()))
    before = bits(model)
    for number in range(1, 4):
        train_step(model, optimizer, number)
        if not hooked:
            found.append(monitor.step())
        after = bits(model)
        changed = {name: int(differing(before[name], after[name]).sum()) for name in before}
        by_kind = {"embedding": changed["embed_tokens.weight"], "mlp": changed["mlp.weight"] + changed["mlp.bias"]}
        by_kind |= {"norm": changed["norm.weight"] + changed["norm.bias"], "other": 1}
        last = found[-1]
        assert last is not None
        assert (last.step, last.since) == (number, number - 1)
        assert last.elements == sum(tensor.numel() for tensor in before.values())
        assert 0 < last.changed == sum(changed.values()) < last.elements
        assert last.density == last.changed / last.elements
        assert {name: one.changed for name, one in last.by_kind.items()} == by_kind
        assert last.by_kind["mlp"].elements == 1000 * 37 + 37
        assert last.by_kind["mlp"].density == by_kind["mlp"] / (1000 * 37 + 37)
        patch = pulse.inspect(pulse.diff(before, after))
        assert (last.changed, last.density) == (patch.changes, patch.density)
        before = after


def test_distances_are_in_neighbouring_values() -> None:
    """A weight moved by one step of its bits, another by five, a third through zero: 1, 5 and 2 · 3 steps."""
    weight = torch.tensor([1.0, 1.0, 3 * 2.0**-133, 7.0]).bfloat16()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight)
    monitor = SparsityMonitor(model)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1 + 2**-7, 1 + 5 * 2**-7, -3 * 2.0**-133, 7.0]))
    found = monitor.step()
    assert found is not None
    assert (found.changed, found.neighbours) == (3, 1 / 3)
    assert found.mean_distance == pytest.approx((1 + 5 + 7) / 3)  # −0 and +0 are two values


def test_far_distances_add_up() -> None:
    """Four whole numbers that move by 2^62 each: together more than 64 bits hold."""
    model = torch.nn.Module()
    seen = torch.zeros(4, dtype=torch.int64)
    model.register_buffer("seen", seen)
    monitor = SparsityMonitor(model)
    seen += 2**62
    found = monitor.step()
    assert found is not None
    assert found.mean_distance == 2.0**62


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_is_followed(named: bool) -> None:
    """Without a call, over its parameters, by kind if they have names; until the monitor is closed."""
    model = Tiny()
    parameters: Any = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    found: list[tuple[dict[str, float], int]] = []
    monitor = SparsityMonitor(optimizer, log=lambda scalars, step: found.append((scalars, step)))
    before = bits(model)
    train_step(model, optimizer, 1)
    after = bits(model)
    changed = sum(int(differing(before[name], after[name]).sum()) for name in before if name != "seen")
    kinds = {"embedding", "mlp", "norm", "other"} if named else {"other"}
    assert [step for _, step in found] == [1]
    assert found[0][0]["sparsity/changed"] == changed
    prefix = "sparsity/density/"
    assert {name.removeprefix(prefix) for name in found[0][0] if name.startswith(prefix)} == kinds
    train_step(model, optimizer, 2)
    monitor.close()
    train_step(model, optimizer, 3)
    assert [step for _, step in found] == [1, 2]


def test_groups_with_the_same_names_are_all_counted() -> None:
    """A policy and a critic in one optimizer, as PPO has them: each has a weight and a bias."""
    policy, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)
    groups: Any = [{"params": list(model.named_parameters())} for model in (policy, critic)]
    monitor = SparsityMonitor(torch.optim.SGD(groups, lr=1.0))
    with torch.no_grad():
        critic.weight += 1
    found = monitor.step()
    assert found is not None
    assert (found.elements, found.changed) == (15 + 10, 8)


def test_every_third_step_counts_the_changes_of_three(tmp_path: Path) -> None:
    """Against the bits of three steps before; the file has a whole line for each measurement as soon as it is made."""
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    path = tmp_path / "deeper" / "sparsity.jsonl"
    monitor = SparsityMonitor(model, every=3, path=path)
    before = bits(model)
    for number in range(1, 8):
        train_step(model, optimizer, number)
        measured = monitor.step()
        assert (measured is not None) == (number % 3 == 0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [3, 6][: number // 3]
        if measured is not None:
            after = bits(model)
            assert measured.changed == sum(int(differing(before[name], after[name]).sum()) for name in before)
            assert lines[-1]["changed"] == measured.changed
            assert lines[-1]["by_kind"]["mlp"]["density"] == measured.by_kind["mlp"].density
            before = after
    SparsityMonitor(model, step=7, path=path).step()  # a run that continues appends to its file
    last = [json.loads(line) for line in path.read_text().splitlines()][-1]
    assert (last["step"], last["since"], last["changed"], last["neighbours"], last["mean_distance"]) == (8, 7, 0, 0, 0)


def test_a_truncated_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    """As on a full disk: the run that continues starts a new line."""
    path = tmp_path / "sparsity.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"si')
    for step in (2, 3):
        SparsityMonitor(torch.nn.Linear(2, 2), step=step, path=path).step()
    first, torn, *rest = path.read_text().splitlines()
    assert (first, torn) == ('{"step":1}', '{"step":2,"si')
    assert [json.loads(line)["step"] for line in rest] == [3, 4]


def test_a_parameter_with_new_memory_is_still_counted() -> None:
    model = torch.nn.Linear(8, 8)
    monitor = SparsityMonitor(model)
    for _ in range(2):
        model.weight.data = model.weight.data * 2
        found = monitor.step()
        assert found is not None
        assert found.changed == 64


def test_a_step_may_be_numbered_by_numpy(tmp_path: Path) -> None:
    """Another number is refused before the measurement, so that no change is lost."""
    model = torch.nn.Linear(2, 2)
    monitor = SparsityMonitor(model, path=tmp_path / "sparsity.jsonl")
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(TypeError, match="float"):
        monitor.step(4.5)  # type: ignore[arg-type]
    monitor.step(np.int64(5))  # type: ignore[arg-type]
    line = json.loads((tmp_path / "sparsity.jsonl").read_text())
    assert (line["since"], line["step"], line["changed"]) == (0, 5, 4)


def test_a_baseline_takes_two_bytes_an_element() -> None:
    monitor = SparsityMonitor(Tiny())
    assert monitor._baseline.nbytes == 2 * (monitor._baseline.elements - 1) + 8  # the whole number is as it is


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model = Tiny()
    with pytest.raises(TypeError, match="expected a torch module or a torch optimizer, found dict"):
        SparsityMonitor({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every: expected at least 1 step, found 0"):
        SparsityMonitor(model, every=0)
    with pytest.raises(ValueError, match="expected weights, found none"):
        SparsityMonitor(torch.nn.Identity())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        SparsityMonitor(model, path=tmp_path / "file" / "sparsity.jsonl")
    wrapping: Any = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="found AcceleratedOptimizer, which wraps one: give the one it wraps"):
        SparsityMonitor(wrapping)
    SparsityMonitor(wrapping.optimizer).close()


# -- What goes wrong later does not end the training -----------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "pulse_rl.study.monitor"]


def test_replaced_tensors_are_counted_from_their_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """No count is made up for the step at which they were replaced, and none is lost after it."""
    model = Tiny()
    monitor = SparsityMonitor(model)
    model.mlp = torch.nn.Linear(1000, 41)
    assert monitor.step() is None
    assert monitor.step() is not None
    (warning,) = warnings_of(caplog)
    assert warning.startswith("SparsityMonitor, step 1: no count; the next one starts from step 1: ")
    assert "mlp.weight" in warning
    with torch.no_grad():
        model.mlp.weight[:5] += 1
    found = monitor.step()
    assert found is not None
    assert (found.since, found.step, found.changed) == (2, 3, 5 * 1000)


def test_a_parameter_group_that_is_added_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    model, head = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found: list[int] = []
    SparsityMonitor(optimizer, log=lambda scalars, step: found.append(step))
    for number in range(4):
        if number == 1:
            optimizer.add_param_group({"params": list(head.parameters())})
        head(model(torch.ones(4))).sum().backward()
        optimizer.step()
    assert found == [1, 3, 4]
    (warning,) = warnings_of(caplog)
    assert "2 unexpected in this step: group1.0, group1.1" in warning


def test_an_optimizer_whose_state_is_replaced_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    """Its groups are new objects then, with the same parameters; without any group the monitor stops."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    found: list[int] = []
    SparsityMonitor(optimizer, log=lambda scalars, step: found.append(step))
    state = optimizer.state_dict()
    for number in range(4):
        if number == 1:
            optimizer.load_state_dict(state)
        if number == 2:
            optimizer.param_groups = []
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    assert found == [1, 2]
    what = [warning.split(": ")[1] for warning in warnings_of(caplog)]
    assert what == ["no count; the next one starts from step 3", "stopped"]
    assert not optimizer._optimizer_step_post_hooks


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines are lost while it is full, and begin anew on a line when it is not."""
    path = tmp_path / "sparsity.jsonl"
    model = torch.nn.Linear(8, 8)
    monitor = SparsityMonitor(model, path=path)
    monitor.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))  # a line that is cut off
    try:
        assert [monitor.step() is not None for _ in range(3)] == [True] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monitor.step()
    (warning,) = warnings_of(caplog)
    assert "step 2: not written: " in warning
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["step"], len(torn), json.loads(last)["step"]) == (1, 20, 5)


def test_a_tracker_that_raises_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is called again at each measurement, and the file has them all."""
    calls: list[int] = []

    def track(scalars: dict[str, float], step: int) -> None:
        calls.append(step)
        raise RuntimeError(f"no connection at step {step}")

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    SparsityMonitor(optimizer, path=tmp_path / "sparsity.jsonl", log=track)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    assert calls == [1, 2, 3]
    assert warnings_of(caplog) == ["SparsityMonitor, step 1: log= failed: no connection at step 1"]
    assert len((tmp_path / "sparsity.jsonl").read_text().splitlines()) == 3


def test_a_measurement_that_is_cut_off_leaves_no_wrong_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption is raised; the baseline, half of it moved, is taken anew at the next step."""
    model = Tiny()
    monitor = SparsityMonitor(model)

    def interrupt(_: str) -> str:
        raise KeyboardInterrupt

    with torch.no_grad():
        model.mlp.weight += 1
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("pulse_rl.study.monitor.kind", interrupt)
        monitor.step()
    assert monitor.step() is None
    found = monitor.step()
    assert found is not None
    assert (found.since, found.step, found.changed) == (2, 3, 0)


def test_weights_that_cannot_be_read_stop_the_monitor(caplog: pytest.LogCaptureFixture) -> None:
    """As after sharding them; the training goes on, and nothing holds on to the model."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = SparsityMonitor(optimizer)
    optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(torch.zeros(2, 2, device="meta"))
    for _ in range(2):
        optimizer.step()
    assert [warning.split(":")[1] for warning in warnings_of(caplog)] == [
        " no count; the next one starts from step 1",
        " stopped",
    ]
    assert monitor.step() is None


def test_a_closed_monitor_lets_go(tmp_path: Path) -> None:
    """Of the model, of the optimizer's hook and of the tracker; a later step does nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitors = [SparsityMonitor(optimizer, path=tmp_path / "sparsity.jsonl"), SparsityMonitor(model)]
    gone = weakref.ref(model)
    for monitor in monitors:
        monitor.close()
        monitor.close()
        assert monitor.step() is None
    assert not optimizer._optimizer_step_post_hooks
    assert (tmp_path / "sparsity.jsonl").read_text() == ""
    del model, optimizer
    gc.collect()
    assert gone() is None
