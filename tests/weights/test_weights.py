"""Weights as bits: layouts, their copies and comparison, and Bits that are not ours."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pulse_rl as pulse
from pulse_rl.weights.bits import Bits, HostBits, as_bits
from pulse_rl.weights.layout import Layout, Sides, compare_layouts, layout
from pulse_rl.weights.torch_bits import TorchBits


class Remote:
    """Bits of somebody else's making: an adapter's, that keeps its elements where no tensor is."""

    dtype, itemsize, writable = "BF16", 2, True

    def __init__(self, elements: Any) -> None:
        self.elements = elements
        self.shape, self.size = elements.shape, elements.size
        self.storage = self
        self.extent = (self, 0, 12)
        self.contiguous = False

    def read(self, start: int, stop: int) -> Any:
        return self.elements.flat[start:stop]

    def gather(self, start: int, indices: Any) -> Any:
        return self.elements.flat[start + indices]

    def scatter(self, start: int, indices: Any, values: Any) -> None:
        self.elements.flat[start + indices] = values

    def write(self, start: int, values: Any) -> None:
        self.elements.flat[start : start + len(values)] = values

    def view(self, slices: Any) -> Bits:
        return Remote(self.elements[slices])


def test_any_bits_are_weights() -> None:
    """What fulfils the protocol is read, digested and patched like a tensor of the same bits."""
    remote: Bits = Remote(np.arange(6, dtype=np.uint16).reshape(2, 3))
    assert as_bits(remote) is remote
    old = torch.arange(6, dtype=torch.int16).view(torch.bfloat16).reshape(2, 3)
    assert pulse.digest({"w": remote}) == pulse.digest({"w": old})
    new = old.clone()
    new.view(torch.int16)[1, 2] = 77
    pulse.apply({"w": remote}, pulse.diff({"w": old}, {"w": new}))
    assert pulse.digest({"w": remote}) == pulse.digest({"w": new})


@pytest.mark.parametrize("other", [object(), b"bits", 1.5, "w", [1, 2]])
def test_other_objects_are_not_weights(other: Any) -> None:
    with pytest.raises(TypeError, match="expected a torch tensor or a NumPy array"):
        as_bits(other)


class WithoutStorage(torch.Tensor):
    """As quantised tensors are made: torch knows its shape, and nothing else."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *call: Any) -> Any:
        raise NotImplementedError("one\nof these")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cast", [None, "bfloat16"])
def test_tensors_that_hold_no_data_are_named_in_one_line(cast: str | None) -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    without: dict[str, Any] = {
        "fake": fake,
        "wrapper": WithoutStorage(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "lazy": torch.nn.LazyLinear(3).weight,
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.ones(3).to_sparse(),
    }
    for name, tensor in without.items():
        with pytest.raises(TypeError, match=f"tensor '{name}': expected a") as caught:
            layout({"w": torch.ones(3), name: tensor}, cast)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="tensor '0.weight': .* lazy module's: run a forward pass first"):
        pulse.digest(torch.nn.Sequential(torch.nn.LazyLinear(3)))


def test_a_clone_has_the_same_bits_and_ties_in_other_memory() -> None:
    shared = torch.arange(12, dtype=torch.int16).view(torch.bfloat16)
    live = layout({"b": shared[::2], "a": shared, "tied": shared, "c": torch.tensor(1.5), "e": torch.zeros(0, 3)})
    copy = live.clone()
    assert list(copy) == list(live) == ["a", "b", "c", "e"]
    assert copy.tied == live.tied == {"tied": "a"}
    assert (copy.elements, copy.nbytes) == (live.elements, live.nbytes)
    assert pulse.digest(copy) == pulse.digest(live)
    shared.view(torch.int16)[3] = 99
    assert pulse.digest(copy) != pulse.digest(live)
    assert all(bits.writable and bits.shape == live[name].shape for name, bits in copy.items())


def test_a_layout_without_ties() -> None:
    assert Layout().tied == {}
    assert Layout({"a": HostBits("U8", np.zeros(3, np.uint8))}).all_names().keys() == {"a"}


def test_a_mismatch_names_the_tensors() -> None:
    expected = layout({name: np.zeros(4, np.float16) for name in ("gone", "shape", "dtype", "both", "same")})
    found = layout(
        {
            "new": np.zeros(4, np.float16),
            "shape": np.zeros((2, 2), np.float16),
            "dtype": np.zeros(4, np.int16),
            "both": np.zeros(3, np.int16),
            "same": np.zeros(4, np.float16),
        }
    )
    with pytest.raises(pulse.BaseMismatchError) as raised:
        compare_layouts(expected, found, Sides("these are not those", "A", "B", "do this", "do that"))
    error = raised.value
    assert (error.missing, error.unexpected) == (("gone",), ("new",))
    assert (error.reshaped, error.retyped) == (("both", "shape"), ("both", "dtype"))
    assert str(error) == (
        "these are not those: the tensors differ: 1 missing in B: gone; 1 unexpected in B: new; 2 of another shape: "
        "both (F16 [4] in A, I16 [3] in B), shape (F16 [4] in A, F16 [2, 2] in B); 1 I16 in B and F16 in A: dtype; "
        "do this"
    )
    compare_layouts(expected, expected, Sides("the same", "A", "B"))


def test_elements_that_share_memory_cannot_be_written() -> None:
    """Against all addresses, of every shape and stride of few elements: a load over such a tensor was half written."""
    memory = np.zeros(64, np.float32)
    for shape in itertools.product((1, 2, 3), repeat=2):
        for strides in itertools.product(range(-4, 8), repeat=2):
            start = 32
            at = [start + i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])]
            array = np.lib.stride_tricks.as_strided(memory[start:], shape, [4 * stride for stride in strides])
            found = [as_bits(array)]
            if min(strides) >= 0:
                found.append(TorchBits(torch.from_numpy(memory).as_strided(shape, strides)))
            assert {bits.writable for bits in found} == {len(set(at)) == len(at)}, (shape, strides)
    unaligned = np.ndarray((3,), np.float32, memory, 0, (2,))
    assert not as_bits(unaligned).writable
    live = torch.full((5,), 5.0)
    store = pulse.open_store("memory://")
    pulse.Publisher(store).publish({"w": torch.arange(9.0).reshape(3, 3)}, version=0)
    with pytest.raises(ValueError, match="share memory"):
        pulse.Subscriber(store).sync({"w": live.as_strided((3, 3), (1, 1))})
    assert live.tolist() == [5.0] * 5


def test_bits_of_a_tensor_stay_those_of_its_memory() -> None:
    """A parameter that gets other data, compared with what it held: an array is made only when elements are read."""
    held = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    bits = as_bits(held)
    held.data = torch.zeros(2, 3)
    assert bits.read(0, 6).view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert bits.storage != as_bits(held).storage
