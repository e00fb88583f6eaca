"""What a version costs by the number of tensors: `python -m bench.tensors [--tensors N]`.

The same 77 million BF16 elements as 300 tensors and as 18,867, which is the number of tensors of a mixture of experts
with 128 experts in 48 layers and three matrices each; 0.2 % of them change at random. Processor time, of all threads.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch

import pulse_rl as pulse
from pulse_rl.cli import output

T = TypeVar("T")

SHAPES = {300: (512, 503), 18_867: (64, 64)}  # of one tensor, by their number
DENSITY = 0.002
CODECS: tuple[Literal["gap", "context"], ...] = ("gap", "context")
VERSIONS = 4  # after one that compiles and one that looks at the weights first


class Cost(NamedTuple):
    """Processor seconds, medians."""

    publish: float
    stage: float
    apply: float


def measure(tensors: int, codec: Literal["gap", "context"]) -> Cost:
    """Publish and stage some versions of so many tensors in this process."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i // 384}.mlp.experts.{i % 128}.{'abc'[i // 128 % 3]}_proj.weight" for i in range(tensors)]
    weights = {name: torch.randn(SHAPES[tensors]).to(torch.bfloat16) for name in names}
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    found: list[Cost] = []
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as directory:
        publisher, subscriber = pulse.Publisher(directory, codec=codec), pulse.Subscriber(directory)
        for version in range(VERSIONS + 2):
            for tensor in weights.values() if version else ():
                bits = tensor.view(torch.int16).view(-1)
                bits[torch.from_numpy(rng.integers(0, len(bits), round(DENSITY * len(bits))))] += 1
            publish, _ = _timed(lambda version=version: publisher.publish(weights, version=version))  # type: ignore[misc]
            stage, staged = _timed(lambda: subscriber.stage(live))
            apply, _ = _timed(staged.apply)
            found.append(Cost(publish, stage, apply))
    if not all(torch.equal(live[name], weights[name]) for name in names):
        raise AssertionError("the live weights are not those that were published")
    return Cost(*(statistics.median(each) for each in zip(*found[2:], strict=True)))


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, choices=list(SHAPES), action="append", help="default: both")
    chosen = parser.parse_args().tensors or list(SHAPES)
    rows = []
    for codec in CODECS:
        for tensors in chosen:
            cost = measure(tensors, codec)
            rows.append((codec, f"{tensors:,}", *(f"{1e3 * seconds:,.1f} ms" for seconds in cost)))
    output.table(("codec", "tensors", "publish", "stage", "apply"), rows)


if __name__ == "__main__":
    main()
