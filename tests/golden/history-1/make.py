"""The golden history of format 1; run with the package that is to write it, as README.md says."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def weights(version: int) -> dict[str, Any]:
    """The weights of the n-th version."""
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {
        "layers.0.weight": rng.integers(0, 1 << 16, (64, 24), dtype=np.uint16),
        "norm": rng.integers(0, 1 << 32, 32, dtype=np.uint32),
    }
    found["head"] = found["layers.0.weight"]
    for step in range(1, version + 1):
        rng = np.random.default_rng(step)
        found["layers.0.weight"].reshape(-1)[rng.integers(0, 1536, 9)] ^= 1
        found["norm"][step % 32] += 1
    return found


def make(directory: Path) -> None:
    publisher = pulse.Publisher(directory, anchor_every=5, sign_with=KEY)
    for version in range(6):
        publisher.publish(weights(version), version=version * 10, assets={"note.txt": b"golden"})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
