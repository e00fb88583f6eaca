"""What a version costs by the number of tensors: `python -m bench.tensors [--tensors N]`.

The same 77 million BF16 elements as 3 tensors of 16 experts each, as 300 matrices, and as 18,867, which is the number
of matrices of a mixture with 128 experts in 48 layers and three of each; 0.2 % of the elements change at random.
Processor time, of all threads.
"""

import argparse
import statistics
import tempfile
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import pulse_rl as pulse
from bench.report import CODECS, PatchCodec, processor_time
from pulse_rl.cli import output

SHAPES = {3: (16, 1024, 1572), 300: (512, 503), 18_867: (64, 64)}  # of one tensor, by their number
DENSITY = 0.002
VERSIONS = 13  # the first compiles kernels, the next looks at the weights


class Cost(NamedTuple):
    """Processor seconds, medians."""

    publish: float
    with_skip: float  # of a version after which a skip patch is due too
    stage: float  # of one patch
    stage_three: float  # of three patches at once
    apply: float  # of one patch
    first: float  # publish of a first version, kernels loaded
    first_sync: float  # of it


def measure(tensors: int, codec: PatchCodec) -> Cost:
    """Publish and stage some versions of so many tensors in this process."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i // 384}.mlp.experts.{i % 128}.{'abc'[i // 128 % 3]}_proj.weight" for i in range(tensors)]
    weights = {name: torch.randn(SHAPES[tensors]).to(torch.bfloat16) for name in names}
    live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    found: dict[str, list[float]] = {name: [] for name in Cost._fields}
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as directory:
        publisher, subscriber = pulse.Publisher(directory, codec=codec), pulse.Subscriber(directory)
        for version in range(VERSIONS):
            for tensor in weights.values() if version else ():
                bits = tensor.view(torch.int16).view(-1)
                bits[torch.from_numpy(rng.integers(0, len(bits), round(DENSITY * len(bits))))] += 1
            publish, _ = processor_time(partial(publisher.publish, weights, version=version))
            found["publish" if version % 4 else "with_skip"].append(publish)
            if version > 4 and version % 4 in (1, 2):
                continue
            stage, staged = processor_time(lambda: subscriber.stage(live))
            apply, report = processor_time(staged.apply)
            found["stage_three" if report.patches == 3 else "stage"].append(stage)
            if report.patches == 1:
                found["apply"].append(apply)
        path = f"{directory}/again"
        first, _ = processor_time(lambda: pulse.Publisher(path, codec=codec).publish(weights, version=0))
        found["first"].append(first)
        live = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        found["first_sync"].append(processor_time(lambda: pulse.Subscriber(path).sync(live))[0])
    if not all(torch.equal(live[name], weights[name]) for name in names):
        raise AssertionError("the live weights are not those that were published")
    warm_up = {"publish": 1, "with_skip": 2, "stage": 2, "apply": 1}  # how many of the first are not counted
    return Cost(*(statistics.median(found[name][warm_up.get(name, 0) :]) for name in Cost._fields))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, choices=list(SHAPES), action="append", help="default: each")
    chosen = parser.parse_args().tensors or list(SHAPES)
    rows = []
    for codec in CODECS:
        for tensors in chosen:
            cost = measure(tensors, codec)
            rows.append((codec, f"{tensors:,}", *(f"{1e3 * seconds:,.1f} ms" for seconds in cost)))
    output.table(("codec", "tensors", *(name.replace("_", " ") for name in Cost._fields)), rows)


if __name__ == "__main__":
    main()
