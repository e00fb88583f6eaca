"""Of the changes of one step in a tensor, the share where the first version had an exact 0.

python -m bench.evidence.zeros STORE TENSOR VERSION ...
"""

import sys

import torch

import pulse_rl as pulse


def main(store: str, tensor: str, *versions: str) -> None:
    """Print a line for the step to each version."""
    subscriber = pulse.Subscriber(store)
    weights = subscriber.allocate()

    def bits(version: int) -> torch.Tensor:
        subscriber.sync(weights, version=version)
        return weights[tensor].view(torch.int16).clone()

    zero = bits(0).bitwise_and(0x7FFF) == 0
    print(f"zero in version 0: {zero.float().mean():.2%} of {tensor}")
    for version in map(int, versions):
        changed = bits(version - 1) != bits(version)
        print(
            f"version {version}: {changed.float().mean():.2%} changed, {zero[changed].float().mean():.1%} of them zeros"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
