"""What the fuzzer mutates: valid patches of several kinds, and a small signed history with all its objects."""

import json
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.log.beginning import encode_first
from pulse_rl.store.base import Store
from tests.history.mutations import compress, decompressed, dumps, members, sealed_manifest
from tests.patch.tools import changed, random_tensor, snapshot

VERSIONS = 10  # of the history: a skip patch leads from 0 to 4, and from 4 to 8
BIG = 4 * len(CODECS)  # the patches from here on are of tensors of several segments
TIED = "a.tied"  # to a
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "a": ("bfloat16", (30, 40)),
    "b": ("int8", (77,)),
    "c": ("float32", (3, 5)),
    "d": ("float8_e4m3fn", (64,)),
    "empty": ("float32", (0, 3)),
    "s": ("float64", ()),
    "twin": ("int8", (77,)),  # like b, in case a mutation ties them
}


class Subject(NamedTuple):
    """A valid patch, its base and its target."""

    patch: bytes
    weights: Callable[[], dict[str, Any]]  # a copy of the base
    target: dict[str, bytes]
    target_digest: str


def _clone(weights: dict[str, Any]) -> dict[str, Any]:
    """A copy with the same tensors tied."""
    copies = {id(tensor): tensor.clone() for tensor in weights.values()}
    return {name: copies[id(tensor)] for name, tensor in weights.items()}


def _subject(old: dict[str, Any], new: dict[str, Any], codec: Any) -> Subject:
    made = pulse.diff(old, new, base=3, target=4, codec=codec)
    return Subject(made, lambda: _clone(old), snapshot(new), pulse.digest(new))


def _state(rng: np.random.Generator, names: str) -> dict[str, Any]:
    state = {name: random_tensor("torch", *SHAPES[name], rng) for name in names.split()}
    if "a" in state:
        drawn = torch.from_numpy(rng.normal(0, 0.02, (30, 40)).astype(np.float32))
        state["a"] = drawn.bfloat16()
        state[TIED] = state["a"]
    return state


def _stepped(state: dict[str, Any], rng: np.random.Generator, share: float) -> dict[str, Any]:
    """A later state, in which this share of each tensor's elements has other bits; tied tensors stay tied."""
    made: dict[int, Any] = {}
    for tensor in state.values():
        some = max(1, int(share * tensor.numel())) if tensor.numel() else 0
        made.setdefault(id(tensor), changed(tensor, some, rng))
    return {name: made[id(tensor)] for name, tensor in state.items()}


@cache
def patches() -> list[Subject]:
    """Patches of each codec, of few and of all elements, of one dtype and several; large ones from BIG on."""
    rng = np.random.default_rng(5)
    found = []
    for codec in CODECS:
        for names, share in (("a b c d empty s twin", 0.05), ("a b c d empty s", 0.7), ("a", 0.02), ("b c empty", 0.2)):
            old = _state(rng, names)
            found.append(_subject(old, _stepped(old, rng, share), codec))
    assert len(found) == BIG
    size = (2 << 20) + 300
    for codec in CODECS:
        drawn = torch.from_numpy(rng.normal(0, 0.02, size).astype(np.float32)).bfloat16()
        old = {"w": drawn.reshape(4, -1), "n": torch.arange(9)}
        found.append(_subject(old, _stepped(old, rng, 0.002), codec))
    return found


@cache
def keys() -> tuple[Ed25519PrivateKey, Ed25519PublicKey]:
    """The keys of the history, always the same, so that a case can be repeated."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    return private, private.public_key()


class History:
    """A signed history in memory, and its objects; versions are three apart."""

    def __init__(self, codec: Any) -> None:
        rng = np.random.default_rng(6)
        self.store: Store = pulse.open_store("memory://")
        self.versions = [3 * n for n in range(VERSIONS)]
        self.states: dict[int, dict[str, bytes]] = {}
        self._weights: list[dict[str, Any]] = []
        index = dumps({"metadata": {}, "weight_map": {"a": "model.safetensors"}})
        tokens = count(1)
        # Tokens and the time are always the same, so that a case can be repeated.
        with (
            patch("pulse_rl.log.objects.secrets.token_hex", lambda nbytes: f"{next(tokens):016x}"),
            patch("time.time", lambda: 1.75e9),
            patch("pulse_rl.sync.publish.intake.check_assets"),  # so that an index is read too, as of several files
            pulse.Publisher(self.store, anchor_every=6, codec=codec, sign_with=keys()[0]) as publisher,
        ):
            weights = _state(rng, "a b c d empty s twin")
            for version in self.versions:
                publisher.publish(weights, version=version, assets={"model.safetensors.index.json": index})
                self._weights.append(weights)
                self.states[version] = snapshot(weights)
                weights = _stepped(weights, rng, 0.03)
        self.store.put("first.json", encode_first(0))
        names = [o.name for p in ("manifests", "patches", "trails", "anchors") for o in self.store.list(p)]
        self.objects = {name: bytes(self.store.get(name)) for name in [*names, "first.json"]}

    def weights(self, held: int | None, *, copied: bool) -> dict[str, Any]:
        """Live weights of a version, by its number, or zeros. copied: tied tensors are separate copies."""
        source = self._weights[0 if held is None else held]
        live = {name: tensor.clone() for name, tensor in source.items()} if copied else _clone(source)
        if held is None:
            for tensor in live.values():
                tensor.zero_()
        return live

    def step_to(self, name: str) -> int | None:
        """The number of the version that a patch leads to from the one before; None for any other object."""
        sequence = int(name.split("/")[1][:12]) if name.startswith("patches/") else 0
        if not sequence:
            return None
        document, _ = members(self.objects[f"manifests/{sequence:012d}.json"])
        return sequence if document["patch"]["name"] == name else None

    def like(self, kind: str) -> list[str]:
        """The objects of a kind, which is the first part of their names."""
        return [name for name in self.objects if name.split("/")[0] == kind]

    def repaired(self, name: str, new: bytes, digest: str | None = None) -> dict[str, bytes]:
        """The objects that change if one is replaced and all that refers to its hash is updated, by name.

        name: of a patch, a trail or an anchor's file. digest: a new digest of its version, if that changes too.
        Manifests are sealed again; their signatures are then wrong.
        """
        sequence = int(name.split("/")[1][:12])
        bound = {"nbytes": len(new), "blake3": blake3(new).hexdigest()}
        token = name.removesuffix(".safetensors")[-16:]
        result = {name: new}
        for path, data in self.objects.items():
            if not path.startswith("manifests/"):
                continue
            document, signature = members(data)
            refs = [document["patch"], document["trail"], *document["anchor"]]
            for ref in refs:
                if ref is not None and ref["name"] == name:
                    ref.update(bound)
            if digest is not None and document["sequence"] == sequence:
                document["digest"] = digest
            if document["trail"] is not None and name.startswith("patches/"):
                trail = json.loads(decompressed(self.objects[document["trail"]["name"]]))
                before = dumps(trail)
                for number, (base, target, version, old, other, *hashed) in enumerate(trail["patches"]):
                    now = digest if digest is not None and target == sequence else old
                    new_hash = bound.values() if other == token else hashed
                    trail["patches"][number] = [base, target, version, now, other, *new_hash]
                if dumps(trail) != before:
                    new_trail = result[document["trail"]["name"]] = compress(dumps(trail))
                    document["trail"].update(nbytes=len(new_trail), blake3=blake3(new_trail).hexdigest())
            sealed = sealed_manifest(document, signature)
            if sealed != data:
                result[path] = sealed
        return result


@cache
def history(codec: str) -> History:
    """A history of one codec."""
    return History(codec)
