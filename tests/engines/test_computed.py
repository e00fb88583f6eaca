"""Small tensors that an engine's loader computes with: kept beside it, and given to the loader again after a write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import pulse_rl as pulse
from pulse_rl.engines import derived
from pulse_rl.engines.views import LiveViews

Weights = dict[str, torch.Tensor]
Load = Callable[[Any, torch.Tensor], None]


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _decay(model: Engine, weight: torch.Tensor) -> None:
    """As vLLM's loader of a state space: the tensor first, then what is computed from it there."""
    model.decay.data.copy_(weight)
    model.decay.data.copy_(-torch.exp(model.decay))


class Engine(torch.nn.Module):
    """A projection as it is published, and two vectors in FP32. loads: what its loader does instead with a name."""

    def __init__(self, published: Weights, **loads: Load) -> None:
        super().__init__()
        self.projection = _parameter(6, 4, dtype=torch.bfloat16)
        self.decay, self.skip = _parameter(8), _parameter(8)
        self.loads: dict[str, Load] = {
            "projection": lambda model, weight: model.projection.data.copy_(weight),
            "decay": _decay,
            "skip": lambda model, weight: model.skip.data.copy_(weight),
            **loads,
        }
        self.load_weights(published.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.loads[name](self, weight)

    def bits(self) -> dict[str, list[int]]:
        return {name: tensor.view(torch.uint8).flatten().tolist() for name, tensor in self.named_parameters()}


def _published(step: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(step)
    shapes = {"projection": (6, 4), "decay": (8,), "skip": (8,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def run(tmp_path: Path) -> pulse.Publisher:
    save_file(_published(), tmp_path / "model.safetensors")
    publisher = pulse.Publisher(tmp_path / "history")
    publisher.publish(_published(), version=0)
    return publisher


def _views(engine: Engine, run: pulse.Publisher, **options: Any) -> tuple[pulse.Subscriber, LiveViews]:
    subscriber = pulse.Subscriber(run.history.store, overwrite=False)
    return subscriber, LiveViews.of(engine, engine.load_weights, subscriber.tensors(), **options)


@pytest.mark.parametrize("by", ["files", "digest"])
def test_what_a_loader_computes_is_computed_again_by_it(run: pulse.Publisher, tmp_path: Path, by: str) -> None:
    engine = Engine(_published())
    with pytest.raises(pulse.UnmappedError, match="float32") as raised:
        _views(engine, run)
    assert raised.value.name == "decay"
    subscriber, views = _views(engine, run, alone=True)
    assert views.ignored == ()
    assert sum(tensor.nbytes for tensor in views._kept.values()) == 2 * 2 * 8
    assert views.prove(subscriber.history, tmp_path if by == "files" else None) == (None if by == "files" else 0)
    before = engine.bits()
    views.prove_derived()
    assert engine.bits() == before
    assert views.refresh() == 0
    for version in (1, 2):
        new = _published(version)
        if version == 2:
            new["skip"] = _published(1)["skip"]  # is not computed again
        run.publish(new, version=version)
        subscriber.sync(views.weights())
        assert views.refresh() == (2 if version == 1 else 1)
        assert engine.bits() == Engine(new).bits()
        assert subscriber.verify(views.weights()) == pulse.digest(new)


def test_a_loader_that_does_not_give_what_the_engine_has_is_refused(run: pulse.Publisher, tmp_path: Path) -> None:
    """One that adds up, and an engine whose memory is not what was loaded."""
    adding = Engine(_published(), skip=lambda model, weight: model.skip.data.add_(weight.float()))
    other = Engine(_published())
    other.decay.data[3] += 1
    for engine, name in ((adding, "skip"), (other, "decay")):
        subscriber, views = _views(engine, run, alone=True)
        views.prove(subscriber.history, tmp_path)
        before = engine.bits()
        with pytest.raises(pulse.UnmappedError) as raised:
            views.prove_derived()
        assert raised.value.name == name
        assert engine.bits() == before


def test_memory_that_two_tensors_make_is_refused(run: pulse.Publisher) -> None:
    engine = Engine(_published(), skip=lambda model, weight: model.decay.data.mul_(weight.float()))
    with pytest.raises(pulse.UnmappedError) as raised:
        _views(engine, run, alone=True)
    assert raised.value.name in ("decay", "skip")


def test_a_part_that_nothing_feeds_is_still_refused(run: pulse.Publisher) -> None:
    engine = Engine(_published(), skip=lambda model, weight: model.skip.data[:4].copy_(weight[:4]))
    with pytest.raises(pulse.UnmappedError, match="4 elements") as raised:
        _views(engine, run, alone=True)
    assert raised.value.name == "skip"


def test_a_large_tensor_is_refused(run: pulse.Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "LARGEST_NBYTES", 15)
    with pytest.raises(pulse.UnmappedError, match="float32"):
        _views(Engine(_published()), run, alone=True)


def test_what_is_half_rebuilt_is_rebuilt_whatever_version_comes_next() -> None:
    """Also where that is the version before, from whose weights it was built last; and a proof that fails leaves it."""
    source, results = torch.arange(4.0), torch.arange(4.0).neg()
    fails = False

    def rebuild() -> None:
        results[:2] = -source[:2]
        if fails:
            raise MemoryError
        results[2:] = -source[2:]

    rebuilding = derived.Rebuilding([derived.Derived("layer", (source,), (results,), rebuild)])
    rebuilding.prove()
    before = source.clone()
    source += 1
    fails = True
    with pytest.raises(MemoryError):
        rebuilding.prove()
    assert torch.equal(results, -before)
    with pytest.raises(MemoryError):
        rebuilding.refresh()
    fails = False
    source.copy_(before)
    assert rebuilding.refresh() == 1
    assert torch.equal(results, -before)
