"""One side of two releases that meet, by public names of 0.1.0 alone: what one writes, the other reads and continues.

PYTHONPATH=WHEEL python tests/golden/releases/side.py write DIRECTORY      # or read; WHEEL is unpacked
"""

import sys
from pathlib import Path
from typing import Literal

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pulse_rl as pulse

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
Codec = Literal["gap", "context"]
CODECS: tuple[Codec, ...] = ("gap", "context")
LAST = 6


def weights(step: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps."""
    bits = torch.arange(64 * 48, dtype=torch.int16).view(64, 48) + 15_000  # bfloat16 of about 0.01
    for done in range(1, step + 1):
        bits.view(-1)[done::97] += 1
    return {"layers.0.weight": bits.view(torch.bfloat16), "norm": torch.arange(17, dtype=torch.float32) + step}


def publisher(place: Path, codec: Codec) -> pulse.Publisher:
    return pulse.Publisher(place / codec, codec=codec, anchor_every=4, sign_with=KEY, views={"fp8": pulse.Fp8()})


def write(place: Path) -> None:
    for codec in CODECS:
        history = publisher(place, codec)
        for step in range(LAST + 1):
            history.publish(weights(step), version=10 * step, metadata={"step": step}, assets={"note.txt": b"a note"})
        patch = pulse.diff(weights(0), weights(1), codec=codec)
        (place / f"{codec}.safetensors").write_bytes(patch)


def read(place: Path) -> None:
    for codec in CODECS:
        live = weights(0)
        pulse.apply(live, (place / f"{codec}.safetensors").read_bytes())
        same(live, weights(1))
        url, public = place / codec, KEY.public_key()
        subscriber = pulse.Subscriber(url, public_key=public)
        quantised = pulse.Subscriber(url, public_key=public, view="fp8")
        rollout = quantised.allocate()
        for step in (0, 3, LAST):  # by an anchor, by patches, by a skip patch
            found = subscriber.sync(live, version=10 * step)
            assert (found.recovered, found.metadata) == (None, {"step": step}), found
            same(live, weights(step))
            assert quantised.sync(rollout, version=10 * step).recovered is None
        publisher(place, codec).publish(weights(LAST + 1), version=10 * LAST + 1)
        assert subscriber.sync(live).patches == 1
        same(live, weights(LAST + 1))
        report = pulse.verify(url, public_key=public, deep=live)
        assert report.ok, report


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert pulse.digest(found) == pulse.digest(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    print(pulse.__file__)
