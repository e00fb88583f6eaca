"""Weights of random layouts, published and synced, against a naive overwrite.

    python -m tests.sync.fuzz_layout [--seed N] [--cases N]     without --cases: without end

Trainer and worker hold the same names in different layouts: every dtype, strided, transposed, in a larger buffer,
expanded, 0-dim, empty, read-only, tied, shared, overlapping in part, leaf parameters that require grad, under torch or
NumPy. Between versions either side may come with other memory, in another layout. Each sync ends in the bits of a naive
overwrite of a twin; or, where no overwrite gives these bits, in an error that leaves the weights as they were, or at a
version in between. Now and then something else writes to the worker's weights.
"""

import argparse
import itertools
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import torch

import pulse_rl as pulse
from tests.patch.tools import NUMPY_DTYPES, TORCH_DTYPES, changed, from_bytes, random_tensor, raw_bytes, snapshot

SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (5, 13), (2, 3, 5, 7), (70_000,)]
PLANS = ["plain", "plain", "strided", "transposed", "inside", "expanded", "parameter", "read-only"]
Specs = dict[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


def allocate(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, dtype) if kind == "numpy" else torch.zeros(shape, dtype=getattr(torch, dtype))


def place(kind: str, plan: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor of zeros in memory of this plan."""
    count = int(np.prod(shape))
    if plan == "strided" and shape:
        return allocate(kind, dtype, (*shape[:-1], 3 * shape[-1]))[..., 1::3]
    if plan == "transposed" and len(shape) > 1:
        tensor, order = allocate(kind, dtype, shape[::-1]), tuple(range(len(shape)))[::-1]
        return tensor.transpose(order) if kind == "numpy" else tensor.permute(order)
    if plan == "inside":
        return allocate(kind, dtype, (count + 5,))[3 : 3 + count].reshape(shape)
    if plan == "expanded" and count > 1:
        single = allocate(kind, dtype, (1,) * len(shape))
        return (
            np.lib.stride_tricks.as_strided(single, shape, (0,) * len(shape))
            if kind == "numpy"
            else single.expand(shape)
        )
    tensor = allocate(kind, dtype, shape)
    if plan == "parameter" and kind == "torch" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    if plan == "read-only" and kind == "numpy":
        tensor.flags.writeable = False
    return tensor


def build(specs: Specs, kind: str, plain: bool, rng: np.random.Generator, *, apart: bool = False) -> dict[str, Any]:
    """Weights of zeros in a random layout. plain: without what cannot be written. apart: without common memory."""
    weights: dict[str, Any] = {}
    for name, (dtype, shape) in specs.items():
        alike = [other for other in weights if specs[other] == (dtype, shape)]
        before = [
            other for other in weights if specs[other][0] == dtype and weights[other].ndim == 1 and len(shape) == 1
        ]
        chance = 1.0 if apart else rng.random()
        if alike and chance < 0.25:  # tied: the same object
            weights[name] = weights[alike[0]]
        elif alike and chance < 0.4:  # shared: another view of the same memory
            weights[name] = weights[alike[-1]][...]
        elif before and shape[0] <= len(weights[before[0]]) and chance < 0.6:  # a slice of another one
            start = int(rng.integers(0, len(weights[before[0]]) - shape[0] + 1))
            weights[name] = weights[before[0]][start : start + shape[0]]
        else:
            plan = str(rng.choice(PLANS))
            rare = plan in ("expanded", "read-only") and (plain or rng.random() < 0.7)
            weights[name] = place(kind, "plain" if rare else plan, dtype, shape)
    return weights


def overwrite(tensor: Any, value: Any) -> None:
    """All elements of a tensor, bit for bit. Raises where it cannot be written."""
    if isinstance(tensor, np.ndarray):
        if tensor.size and any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.strides, strict=True)):
            raise ValueError("expanded")
        tensor[...] = value
    else:
        with torch.no_grad():
            tensor.copy_(value)


def naive(twin: dict[str, Any], state: dict[str, bytes], specs: Specs, kind: str) -> bool:
    """Overwrite every tensor in turn. Returns whether they then hold the state."""
    for name, tensor in twin.items():
        try:
            overwrite(tensor, from_bytes(kind, *specs[name], state[name]))
        except (RuntimeError, ValueError):
            return False
    return snapshot(twin) == state


def case(seed: int) -> str:
    """One history. Returns how it ended, for statistics."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(["torch", "numpy"]))
    dtypes = rng.choice(TORCH_DTYPES if kind == "torch" else NUMPY_DTYPES, 2)
    shapes = [SHAPES[i] for i in rng.choice(len(SHAPES), 3, p=[0.13] * 3 + [0.12, 0.14, 0.14, 0.14, 0.07])]
    names = [f"t{i}" for i in range(int(rng.integers(1, 7)))]
    specs = {name: (str(rng.choice(dtypes)), shapes[int(rng.integers(3))]) for name in names}
    opened = rng.random() < 0.5  # whether a side may come with other memory; which tensors are tied must stay
    trainer = build(specs, kind, True, rng, apart=opened)
    layout_seed = int(rng.integers(1 << 30))
    live, twin = (build(specs, kind, False, np.random.default_rng(layout_seed)) for _ in range(2))
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, anchor_every=int(rng.integers(1, 4)))
    subscriber = pulse.Subscriber(store, verify_live=kind == "numpy")
    states: dict[int | None, dict[str, bytes]] = {}  # by version
    if rng.random() < 0.7:
        for name, tensor in trainer.items():
            overwrite(tensor, random_tensor(kind, *specs[name], rng))
    for version in range(4):
        if opened and version and rng.random() < 0.5:
            bits, trainer = snapshot(trainer), build(specs, kind, True, rng, apart=True)
            assert naive(trainer, bits, specs, kind)
        if opened and version and rng.random() < 0.5:
            layout_seed = int(rng.integers(1 << 30))
            other, twin = (build(specs, kind, False, np.random.default_rng(layout_seed)) for _ in range(2))
            if rng.random() < 0.7:  # with the bits of before, as far as they fit in; else with none
                naive(other, snapshot(live), specs, kind)
            live = other
        report = publisher.publish(trainer, version=version)
        states[version] = snapshot(trainer)
        if version == 3 or rng.random() < 0.8:
            if version and rng.random() < 0.3:  # something else writes
                name = str(rng.choice(names))
                with suppress(RuntimeError, ValueError):
                    overwrite(live[name], random_tensor(kind, *specs[name], rng))
            state, before = snapshot(trainer), snapshot(live)
            possible = naive(twin, state, specs, kind)
            refused = None
            try:
                subscriber.sync(live)
            except (pulse.BaseMismatchError, ValueError) as error:
                refused = error
            if refused is not None:
                assert not possible, f"refused: {refused}"
                # A sync that was refused on the way may have come to a version in between, and then says so.
                held = states.get(subscriber.version)
                assert snapshot(live) in (before, held), f"refused and altered: {refused}"
                return type(refused).__name__
            assert snapshot(live) == state
            assert subscriber.digest == report.digest == pulse.digest(trainer)
            assert subscriber.verify(live) == report.digest
            assert subscriber.sync(live).route == "none"
        for name in rng.choice(names, int(rng.integers(0, 3))):
            tensor = trainer[name]
            if raw_bytes(tensor):
                size = int(np.prod(tensor.shape))
                overwrite(
                    tensor,
                    changed(tensor, min(size, int(rng.integers(1, 40))), rng)
                    if specs[name][0] != "bool"
                    else random_tensor(kind, *specs[name], rng),
                )
    return "synced"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int)
    arguments = parser.parse_args()
    ends: dict[str, int] = {}
    for number, seed in enumerate(itertools.count(arguments.seed), 1):
        try:
            end = case(seed)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        ends[end] = ends.get(end, 0) + 1
        if number == arguments.cases or number % 1000 == 0:
            print(f"{number} cases: {ends}", flush=True)
        if number == arguments.cases:
            return


if __name__ == "__main__":
    main()
