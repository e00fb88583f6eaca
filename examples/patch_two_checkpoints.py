"""Diff two states of weights, send the patch anywhere, apply it; NumPy alone is enough.

Run it: python examples/patch_two_checkpoints.py
"""

import numpy as np

import pulse_rl as pulse


def main() -> None:
    random = np.random.default_rng(0)
    old = {"w": random.normal(0, 0.02, (1000, 1000)).astype(np.float16)}
    new = {"w": old["w"].copy()}
    new["w"][random.random(old["w"].shape) < 0.01] *= np.float16(1.01)

    patch = pulse.diff(old, new, base=3, target=4)
    info = pulse.inspect(patch)
    print(f"{info.changes} changes ({info.density:.2%}) in {info.nbytes} bytes, {info.reduction:.0f}× less")

    weights = {"w": old["w"].copy()}
    pulse.apply(weights, patch)
    assert pulse.digest(weights) == pulse.digest(new) == info.digests["target"]

    try:
        pulse.apply(weights, patch)  # they are at version 4 already
    except pulse.BaseMismatchError as error:
        print(f"refused, and nothing was written: {error}")


if __name__ == "__main__":
    main()
