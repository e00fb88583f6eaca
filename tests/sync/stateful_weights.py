"""The tensors of a stateful fuzzer: what they are, and how a trainer changes their bits."""

from random import Random
from typing import Any

import torch

import pulse_rl as pulse
from pulse_rl.dtypes import DTYPES, torch_name
from pulse_rl.weights.layout import layout
from tests.patch.tools import from_bytes, raw_bytes

Bits = dict[str, bytes]  # every tensor's bytes, by name
BIG = "big.weight"
VIEWS: dict[str, Any] = {
    "fp8": pulse.Fp8(),
    "rows": pulse.Fp8(block="channel", rule="vllm"),
    "int8": pulse.Int8(),
    "sticky": pulse.Fp8(scales="sticky"),
}
SPECIAL = {  # little-endian bit patterns of both zeros, NaNs of several payloads and both signs, infinity, subnormal
    "bfloat16": (0x0000, 0x8000, 0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 0x0001),
    "float16": (0x0000, 0x8000, 0x7E00, 0xFE01, 0x7C01, 0x7C00, 0x0001),
    "float32": (0x00000000, 0x80000000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F800000, 0x00000001),
    "float64": (0, 1 << 63, 0x7FF8 << 48, (0xFFF8 << 48) + 1, (0x7FF0 << 48) + 1, 0x7FF0 << 48, 1),
}


class Wrong(AssertionError):
    """Something was done that must not be."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Tensors:
    """Some tensors: their dtypes and shapes by name, and which further names are tied to which."""

    def __init__(self, shapes: dict[str, tuple[str, tuple[int, ...]]], tied: dict[str, str]) -> None:
        self.shapes, self.tied = shapes, tied

    def drawn(self, random: Random) -> Bits:
        """Any state."""
        made = {}
        for name, (dtype, shape) in self.shapes.items():
            nbytes = DTYPES[dtype][1]
            for size in shape:
                nbytes *= size
            data = random.randbytes(nbytes)
            made[name] = bytes(byte & 1 for byte in data) if dtype == "bool" else data
        return made

    def tensors(self, bits: Bits) -> dict[str, torch.Tensor]:
        """New torch tensors of a state; tied names have the same tensor."""
        made = {name: from_bytes("torch", dtype, shape, bits[name]) for name, (dtype, shape) in self.shapes.items()}
        return made | {alias: made[owner] for alias, owner in self.tied.items()}

    def read(self, tensors: Any) -> Bits:
        """The bits of live weights. Raises Wrong if tied ones differ."""
        for alias, owner in self.tied.items():
            expect(raw_bytes(tensors[alias]) == raw_bytes(tensors[owner]), f"the tied {alias} and {owner} differ")
        return {name: raw_bytes(tensors[name]) for name in self.shapes}


class Model(Tensors):
    """The tensors of a run, how a trainer changes their bits, and what views of them its publishers may publish."""

    def __init__(self, random: Random) -> None:
        dtypes = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
        big = random.choice(("bfloat16", "bfloat16", "float32", "uint8"))
        super().__init__({BIG: (big, (random.randint(40, 90), 257))}, {})
        for number in range(random.randint(0, 4)):
            shape: tuple[int, ...] = random.choice(
                ((), (0, 3), (1,), (random.randint(2, 300),), (random.randint(2, 20), 7))
            )
            self.shapes[f"w{number}"] = (random.choice(dtypes), shape)
        if random.random() < 0.3:
            self.tied = {random.choice(("a.weight", "z.weight")): random.choice(list(self.shapes))}
        some = random.sample(list(VIEWS), random.choice((0, 1, 1, 2)) if big == "bfloat16" else 0)
        self.views = {name: VIEWS[name] for name in some}
        self.forms: dict[str | None, Tensors] = {None: self}  # the tensors by view
        for name in some:
            made = pulse.Quantised(VIEWS[name], self.tensors(self.drawn(Random(0)))).layout
            shapes = {one: (torch_name(bits.dtype), tuple(bits.shape)) for one, bits in made.items()}
            self.forms[name] = Tensors(shapes, dict(made.tied))

    def seen(self, view: str, bits: Bits, before: Bits | None) -> Bits:
        """A state in a view, quantised anew. before: the version before in it, from whose scales sticky ones go on."""
        made = pulse.Quantised(VIEWS[view], self.tensors(bits))
        if before is not None:
            made.go_on(layout(self.forms[view].tensors(before)))
        return {name: one.read(0, one.size).tobytes() for name, one in made.look().layout.items()}

    def changed(self, random: Random, bits: Bits) -> Bits:
        """The state after a step: of few changes, many, all, none, or of special values only."""
        kind = random.choice(("few", "few", "few", "some", "many", "all", "none", "special"))
        if kind == "all":
            return self.drawn(random)
        share = {"few": 0.001, "some": 0.02, "many": 0.5, "none": 0, "special": 0.01}[kind]
        made = {}
        for name, data in bits.items():
            dtype, size = self.shapes[name][0], DTYPES[self.shapes[name][0]][1]
            other, count = bytearray(data), len(data) // size
            for place in random.sample(range(count), min(count, -(-int(count * share * 1000) // 1000))):
                at = place * size
                if kind == "special" and dtype in SPECIAL:
                    other[at : at + size] = random.choice(SPECIAL[dtype]).to_bytes(size, "little")
                else:
                    other[at + random.randrange(size)] ^= 1 if dtype == "bool" else 1 << random.randrange(8)
            made[name] = bytes(other)
        return made
