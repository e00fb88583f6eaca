"""The weights that the suite publishes: which tensors, and how their bits change from version to version.

A state is the bits of every tensor, as unsigned integers in its shape. Tied names have the bits of the tensor that they
are tied to, and are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pulse_rl.dtypes import DTYPES, UINTS, UIntArray, torch_name
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.quantised import Quantised
from pulse_rl.weights.views.view import Fp4, Fp8, Int8, View

State: TypeAlias = dict[str, UIntArray]
Step: TypeAlias = Callable[[str, str, UIntArray, np.random.Generator, int], None]  # name, dtype, bits (n,), …, version

TORCH_DTYPES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
FLOATS = [name for name in TORCH_DTYPES if "float" in name]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PublishedModel(NamedTuple):
    """What is published."""

    name: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # torch's name of the dtype, and the shape
    step: Step  # changes the bits of one tensor to those of the next version
    tied: Mapping[str, str] = {}  # alias → the tensor that it is tied to
    ordinary: bool = True  # whether its floats are numbers, of the magnitude of weights

    def states(self, count: int, seed: int = 0) -> list[State]:
        """The states of the first versions."""
        random = np.random.default_rng(seed)
        state = {
            name: self._first(dtype, int(np.prod(shape)), random).reshape(shape)
            for name, (dtype, shape) in self.tensors.items()
        }
        found = []
        for version in range(count):
            for name, (dtype, _) in self.tensors.items():
                self.step(name, dtype, state[name].reshape(-1), random, version)
            found.append({name: bits.copy() for name, bits in state.items()})
        return found

    def _first(self, dtype: str, size: int, random: np.random.Generator) -> UIntArray:
        bits = random_bits(dtype, size, random)
        if self.ordinary:  # positive, below 2, and not so small that a step leads to zero
            bits = bits >> np.array(3, bits.dtype) | np.array(64, bits.dtype)
        return bits


def random_bits(dtype: str, size: int, random: np.random.Generator) -> UIntArray:
    """Any bits of a dtype, shape (size,)."""
    nbytes = DTYPES[dtype][1]
    most = 2 if dtype == "bool" else 1 << 8 * nbytes
    return random.integers(0, most - 1, size, UINTS[nbytes], endpoint=True)


def tensor_of(dtype: str, bits: UIntArray) -> torch.Tensor:
    """A new tensor of these bits, contiguous."""
    made = torch.empty(bits.shape, dtype=getattr(torch, dtype))
    put(made, bits)
    return made


def put(tensor: torch.Tensor, bits: UIntArray) -> None:
    """Write bits to a tensor of any strides. Integers are copied, as floats could lose the payload of a NaN."""
    integers = _INTEGERS[tensor.element_size()]
    data = torch.from_numpy(np.array(bits, copy=True).view(f"i{tensor.element_size()}"))
    with torch.no_grad():
        tensor.detach().view(integers).copy_(data)


def _few(size: int, random: np.random.Generator, share: float) -> NDArray[np.int64]:
    return random.choice(size, min(size, max(1, round(size * share))), replace=False) if size else np.empty(0, np.int64)


def redraw(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Some elements get any other bits."""
    where = _few(len(bits), random, 0.07)
    bits[where] = random_bits(dtype, len(where), random)


def nudge(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """A few elements move by one, as in a training run; some of them move back in the next version."""
    where = _few(len(bits), random, 0.01)
    bits[where] += random.choice(np.array([1, -1]).astype(bits.dtype), len(where))
    bits[: min(3, len(bits))] ^= np.array(1, bits.dtype)


def flip_zeros(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Every third element is a zero, whose sign changes."""
    sign = np.array(1 << 8 * bits.itemsize - 1, bits.dtype)
    if version == 0:
        bits &= ~sign  # numbers that are no NaN in any dtype
        bits &= ~(sign >> np.array(1, bits.dtype))
        bits[::3] = 0
    else:
        bits[::3] ^= np.where(np.arange(len(bits[::3])) % 2 == version % 2, sign, np.array(0, bits.dtype))


def turn_nans(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """NaNs of several payloads take each other's place, and that of numbers, infinities and zeros."""
    sign = 8 * bits.itemsize - 1
    exponent = _INFINITY[dtype]
    patterns = [exponent | 1, exponent | 3, 0, exponent | 1 << sign | 1, 1 << sign, exponent, 1, exponent | 2]
    if version == 0:
        bits[:] = np.arange(len(bits)) % 100 + 5
    at = np.arange(0, len(bits), 3)
    bits[at] = np.array(patterns, bits.dtype)[(at // 3 + version) % len(patterns)]


def roll(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Every bit pattern of the dtype is an old and a new one."""
    stride = 4099 * (version + 1)
    bits[:] = ((np.arange(len(bits)) + stride) % (1 << 8 * bits.itemsize)).astype(bits.dtype)


def spread(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Few elements move, all over the tensor: the ends, those around powers of two, and one in some 50,000."""
    powers = 1 << np.arange(8, 32)
    near = np.concatenate([powers - 1, powers, powers + 1, [0, len(bits) - 1], np.arange(version, len(bits), 50_021)])
    bits[np.unique(near[near < len(bits)])] += np.array(1, bits.dtype)


def leap(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Changes lie 2^16 - 1, 2^16, 2^16 + 1 and 2^17 elements apart; in `down` the first lies as far from the start."""
    first = [version] if ".up." in name else []
    bits[np.cumsum([*first, 0xFFFF, 0x1_0000, 2 + version, 0x1_0001, 3, 0x2_0000])] += np.array(1, bits.dtype)


def keep(name: str, dtype: str, bits: UIntArray, random: np.random.Generator, version: int) -> None:
    """Nothing changes, but in every third version."""
    if version % 3 == 2:
        nudge(name, dtype, bits, random, version)


_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000, "float64": 0x7FF0 << 48}


def _model(name: str, dtypes: Iterable[str], shape: tuple[int, ...], step: Step) -> PublishedModel:
    return PublishedModel(name, {f"{dtype}.weight": (dtype, shape) for dtype in dtypes}, step)


def of_size(nbytes: int) -> PublishedModel:
    """A tensor of every dtype whose elements have this many bytes."""
    dtypes = [name for name in TORCH_DTYPES if DTYPES[name][1] == nbytes]
    return _model(str(nbytes), dtypes, (37, 5), redraw)._replace(ordinary=False)


ZEROS = _model("zeros", [name for name in FLOATS if name not in ("float8_e8m0fnu",)], (33, 6), flip_zeros)
NANS = _model("nans", _INFINITY, (40, 6), turn_nans)
PATTERNS = PublishedModel(
    "patterns",
    {"all.16": ("bfloat16", (256, 256)), "all.8": ("uint8", (2, 128)), "half": ("float16", (1 << 16,))},
    roll,
)
SHAPES = PublishedModel(
    "shapes",
    {
        "scale": ("bfloat16", ()),
        "count": ("int64", ()),
        "one": ("float32", (1,)),
        "ones": ("uint8", (1, 1, 1)),
        "nothing": ("float32", (0, 3)),
        "no.columns": ("bfloat16", (3, 0)),
        "odd": ("bfloat16", (7, 11, 3)),
        "flat": ("float16", (129,)),
    },
    nudge,
)
SCALARS = PublishedModel("scalars", {name: SHAPES.tensors[name] for name in ("scale", "count", "flat")}, nudge)
EMPTY = PublishedModel("empty", {name: SHAPES.tensors[name] for name in ("nothing", "no.columns", "flat")}, nudge)
DIMENSIONS = PublishedModel(
    "dimensions", {"video": ("bfloat16", (4, 3, 2, 3, 5)), "image": ("bfloat16", (6, 3, 5, 7))}, nudge
)
GAPS = PublishedModel(
    "gaps", {f"model.layers.0.{part}.weight": ("bfloat16", (577, 601)) for part in ("up", "down")}, leap
)
MANY = PublishedModel(
    "many", {f"model.layers.{number}.up.weight": ("bfloat16", (3, 5)) for number in range(300)}, nudge
)
NAMES = PublishedModel(
    "names",
    {
        f"model.{name}.weight": ("bfloat16", (6, 5))
        for name in (
            *("größe", "слой", "層", "🧠", "\u00e9", "e\u0301"),  # the last two look alike
            *('with "quotes"', "back\\slash", "a/path", "層" * 100),
        )
    },
    nudge,
)
_BEYOND: dict[int, dict[str, tuple[int, ...]]] = {  # bits of an index → tensors with more elements than these count
    16: {"embed": (70_001, 3), "layers.0.up": (3, 70_001), "layers.0.norm": (70_001,)},  # also more rows, or columns
    20: {"embed": (1031, 1033)},
    24: {"embed": (4099, 4103)},
}


def beyond(bits: int) -> PublishedModel:
    """Tensors with more elements than so many bits count."""
    tensors = {f"model.{name}.weight": ("bfloat16", shape) for name, shape in _BEYOND[bits].items()}
    return PublishedModel(f"beyond {bits}", tensors, spread)


def _transformer(step: Step, name: str, tied: bool = False) -> PublishedModel:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed.weight": ("bfloat16", (96, 32))}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes = {"q": (32, 32), "v": (8, 32), "up": (48, 32)}
        tensors |= {f"{at}.{part}.weight": ("bfloat16", shape) for part, shape in shapes.items()}
        tensors |= {f"{at}.down.weight": ("bfloat16", (32, 48)), f"{at}.norm.weight": ("bfloat16", (32,))}
    if not tied:
        tensors["lm_head.weight"] = ("bfloat16", (96, 32))
    return PublishedModel(name, tensors, step, {"lm_head.weight": "model.embed.weight"} if tied else {})


LLM = _transformer(nudge, "llm")
TIED = _transformer(nudge, "tied", tied=True)
STILL = _transformer(keep, "still")


_VIEWS: dict[str, View] = {
    "quantised": Fp8(),
    "quantised-int8": Int8(),
    "quantised-mxfp4": Fp4(format="mxfp4"),
    "quantised-nvfp4": Fp4(format="nvfp4"),
}
# Blocks of 128 × 128 are cut off at both edges of the first.
_SOURCE = {"out.weight": (260, 160), "experts.up": (11, 40, 64), "norm.weight": (64,)}


class _View(PublishedModel):
    """One of _VIEWS of _SOURCE in bfloat16, by its name. tensors: those of the view."""

    def states(self, count: int, seed: int = 0) -> list[State]:
        """Of weights some of which move by a tenth; one in each tensor grows and shrinks, and takes a scale along."""
        random = np.random.default_rng(seed)
        live = {name: torch.from_numpy(random.normal(size=shape)).bfloat16() for name, shape in _SOURCE.items()}
        found = []
        for version in range(count):
            for tensor in live.values():
                flat, where = tensor.view(-1), torch.from_numpy(_few(tensor.numel(), random, 0.05))
                flat[where] *= 1 + 0.1 * torch.from_numpy(random.normal(size=len(where))).bfloat16()
                flat[-1] = (8, 6, 16)[version % 3]
            view = Quantised(_VIEWS[self.name], live).look()
            found.append({name: bits.read(0, bits.size).copy().reshape(bits.shape) for name, bits in view.items()})
        return found


def _view(name: str, view: View) -> _View:
    form, tensors = ViewFormat(view), dict[str, tuple[str, tuple[int, ...]]]()
    for tensor, shape in _SOURCE.items():
        made = form.tensors(tensor, shape) if form.quantises(tensor, shape) else {tensor: ("BF16", shape)}
        tensors |= {key: (torch_name(dtype), of_view) for key, (dtype, of_view) in made.items()}
    return _View(name, tensors, keep)  # `keep` is not asked for: `states` changes bits


SCALE = ViewFormat(Fp8()).scale_name("")
QUANTISED = {name: _view(name, view) for name, view in _VIEWS.items()}


def torch_tensors(model: PublishedModel, state: Mapping[str, UIntArray]) -> dict[str, Any]:
    """New tensors of a state; tied names have the same tensor."""
    made = {name: tensor_of(model.tensors[name][0], bits) for name, bits in state.items()}
    return made | {alias: made[owner] for alias, owner in model.tied.items()}
