"""Casts of NumPy arrays against torch's, bit for bit, and publishing from arrays."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.kernels import cpu
from pulse_rl.kernels.cpu import loco
from pulse_rl.weights.bits import ArrayCastBits, TorchBits, as_bits
from pulse_rl.weights.casts import ARRAY_CASTS, CASTS, cast_array
from pulse_rl.weights.changes import find_changes
from tests.naive import loco as reference

SOURCES = ["float16", "float32", "float64"]


def numbers(source: str) -> Any:
    """Of every magnitude, with halves between two values of the narrower formats, zeros, subnormals and infinities."""
    random = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        if source == "float16":
            return np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        lower = [0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
        single = np.concatenate([*(upper | low for low in lower), random.integers(0, 1 << 32, 1 << 16, np.uint32)])
        if source == "float32":
            return single.view(np.float32)
        wide = single.view(np.float32).astype(np.float64)
        neighbours = np.nextafter(wide, np.inf), np.nextafter(wide, -np.inf)  # rounded twice: first to the half
        return np.concatenate([wide, *neighbours, random.integers(0, 1 << 64, 1 << 16, np.uint64).view(np.float64)])


def torch_bits(values: Any, cast: str) -> Any:
    narrow = torch.from_numpy(values).to(getattr(torch, cast))
    return narrow.view(getattr(torch, f"uint{8 * narrow.itemsize}")).numpy()


@pytest.mark.parametrize("cast", ARRAY_CASTS)
@pytest.mark.parametrize("source", SOURCES)
def test_casts_of_arrays_are_torchs(source: str, cast: str) -> None:
    """All bits; of NaN, whose bits differ between processors, that it is a quiet NaN of the same sign."""
    values = numbers(source)
    nan = np.isnan(values)
    found = cast_array(values, cast)
    assert np.array_equal(found[~nan], torch_bits(values[~nan], cast))
    back = torch.from_numpy(found[nan]).view(getattr(torch, cast)).to(torch.float64).numpy()
    assert np.isnan(back).all()
    top = 8 * found.itemsize - 1
    assert np.array_equal(found[nan] >> top, np.signbit(values[nan]))
    if cast in ("bfloat16", "float16"):
        assert set(found[nan].tolist()) <= ({0x7FC0, 0xFFC0} if cast == "bfloat16" else {0x7E00, 0xFE00})


@pytest.mark.parametrize("cast", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("source", SOURCES)
def test_casts_of_arrays_are_those_of_the_naive_twin(source: str, cast: str) -> None:
    """Exact fractions, rounded to float32 and then to the narrower format."""
    values = numbers(source)
    values = values[~np.isnan(values)]
    values = values[np.random.default_rng(1).integers(0, len(values), 300)]
    expected = np.zeros(len(values), np.uint8 if "float8" in cast else np.uint16)
    with np.errstate(all="ignore"):
        reference.cast(values.astype(np.float32), cast, expected)
    assert np.array_equal(cast_array(values, cast), expected)


@pytest.mark.parametrize("source", SOURCES)
def test_arrays_of_any_strides_are_cast_as_they_are_read(source: str) -> None:
    values = np.random.default_rng(0).normal(size=(7, 10)).astype(source)
    for view in (values, values.T, values[::2, ::-3], values[:0], values[3, 4], values[3, 4:5].reshape(())):
        bits = as_bits(view, "bfloat16")
        expected = torch_bits(np.array(view).reshape(-1), "bfloat16")
        assert (bits.dtype, bits.itemsize, bits.shape, bits.writable) == ("BF16", 2, view.shape, False)
        assert np.array_equal(bits.read(0, bits.size), expected)
        assert np.array_equal(bits.read(1, bits.size), expected[1:])
        some = np.arange(0, max(0, bits.size - 2), 3, dtype=np.uint32)
        assert np.array_equal(bits.gather(2, some), expected[2 + some])
    with pytest.raises(TypeError, match="cannot be written"):
        bits.write(0, expected)
    with pytest.raises(TypeError, match="cannot be written"):
        bits.scatter(0, np.zeros(1, np.uint32), expected)


def test_only_floats_of_another_dtype_are_cast() -> None:
    whole, same = np.arange(3), np.ones(3, np.float32)
    assert as_bits(whole, "bfloat16").dtype == "I64"
    assert as_bits(same, "float32").writable
    assert as_bits(np.ones(3, np.complex64), "bfloat16").dtype == "C64"
    for cast in set(CASTS) - set(ARRAY_CASTS):
        with pytest.raises(TypeError, match=f"cast='{cast}' needs torch tensors, found a NumPy array of float32"):
            as_bits(same, cast)


def test_arrays_are_published_as_tensors_of_the_same_numbers_are() -> None:
    """Version by version, from one view of two names too; a worker in BF16 follows."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "a": random.normal(size=(300, 70)).astype(np.float32),
        "b": random.normal(size=5),
        "n": np.arange(3),
    }
    arrays["tied"] = arrays["a"]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    store = pulse.open_store("memory://")
    from_arrays = pulse.Publisher(store, cast="bfloat16")
    from_tensors = pulse.Publisher("memory://", cast="bfloat16")
    worker = {name: (t.bfloat16() if t.is_floating_point() else t.clone()) for name, t in tensors.items()}
    for version in range(3):
        arrays["a"] += random.normal(size=(300, 70)).astype(np.float32) * 1e-3
        report = from_arrays.publish(arrays, version=version)
        assert report.digest == from_tensors.publish(tensors, version=version).digest
        assert pulse.Subscriber(store).sync(worker).digest == report.digest
    assert torch.equal(worker["a"], tensors["a"].bfloat16())
    assert torch.equal(worker["tied"], worker["a"])


def test_arrays_are_cast_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport numpy as np, pulse_rl as pulse\n"
        "publisher = pulse.Publisher('memory://', cast='bfloat16')\n"
        "publisher.publish({'w': np.linspace(0, 1, 9)}, version=0)\n"
        "live = {'w': np.zeros(9, np.uint16)}\n"
        "print(publisher.publish({'w': np.linspace(0, 2, 9)}, version=1).changes)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "8"


@pytest.mark.parametrize("cast", ["bfloat16", "float16"])
def test_a_cast_can_be_read_into_memory_that_is_used_again(cast: str) -> None:
    """The same bits as `read`, in the memory that was given; elements that lie apart are read as ever."""
    values = torch.randn(6, 50)
    bits, memory = as_bits(values, cast), np.empty(300, np.uint64)
    assert isinstance(bits, ArrayCastBits)
    for start, stop in ((0, 300), (7, 107), (5, 5)):
        found = bits.read_into(memory, start, stop)
        assert found.tolist() == bits.read(start, stop).tolist()
        assert np.shares_memory(found, memory) == (stop > start)
    apart = as_bits(values.t(), cast)
    assert isinstance(apart, ArrayCastBits)
    assert apart.read_into(memory, 0, 300).tolist() == apart.read(0, 300).tolist()


NANS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F812345, 0xFFEABCDE]  # both signs


@pytest.mark.parametrize("cast", loco.FORMATS)
@pytest.mark.parametrize("source", ["float32", "float64", "float16", "bfloat16", "float8_e5m2"])
def test_a_tensor_that_is_cast_reads_as_an_array_of_it_however_it_is_read(source: str, cast: str) -> None:
    """Quiet and signalling NaN with payloads too, of which torch's own bits depend on how many it casts at once."""
    patterns = np.array([*NANS, 0, 1 << 31, 0x3F808000, 0x7F800000, 0xFF800000] * 11, np.uint32)
    wide = patterns.view(np.float32)
    narrow = (patterns >> 16 | (patterns & 1)).astype(np.uint16)  # torch's and NumPy's own cast keep few payloads
    if source == "float16":
        narrow = np.where(np.isnan(wide), narrow, wide.astype(np.float16).view(np.uint16))
    tensor = torch.from_numpy(narrow if source in ("float16", "bfloat16") else wide)
    tensor = tensor.to(getattr(torch, source)) if tensor.dtype == torch.float32 else tensor.view(getattr(torch, source))
    assert int(tensor.isnan().sum()) == 8 * 11
    expected = cast_array(np.where(np.isnan(wide), wide, tensor.double().numpy()), cast)
    if source == cast:
        return
    whole = TorchBits(tensor, getattr(torch, cast))
    assert np.array_equal(whole.read(0, 143), expected)
    for start, stop in ((1, 2), (3, 11), (5, 72), (9, 9)):
        assert np.array_equal(whole.read(start, stop), expected[start:stop])
    some = np.array([0, 2, 3, 40], np.uint32)
    assert np.array_equal(whole.gather(7, some), expected[7 + some])
    apart = TorchBits(tensor.reshape(11, 13).t(), getattr(torch, cast))
    across = expected.reshape(11, 13).T.reshape(-1)
    assert np.array_equal(apart.read(0, 143), across)
    assert np.array_equal(apart.read(2, 30), across[2:30])
    assert np.array_equal(apart.gather(1, some), across[1 + some])
    assert np.array_equal(apart.view((slice(2, 9), slice(1, 3))).read(0, 14), across.reshape(13, 11)[2:9, 1:3].ravel())
    assert np.array_equal(as_bits(tensor, cast).read(0, 143), expected)


@given(
    st.lists(
        st.integers(0, 2**32 - 1) | st.sampled_from([0x7F800000, 0x7F800001, 0xFFFFFFFF, 0x3F808000]), max_size=200
    ),
    st.data(),
)
def test_changes_of_cast_floats_are_those_of_their_bits(patterns: list[int], data: st.DataObject) -> None:
    """Compared as they are read, or cast first by the naive twin: the same changes, for any bits and any number."""
    floats, new = np.array(patterns, np.uint32).view(np.float32), np.zeros(len(patterns), np.uint16)
    nan = np.isnan(floats)
    with np.errstate(all="ignore"):
        reference.cast(np.where(nan, np.float32(0), floats), "bfloat16", new)
    new[nan] = [0xFFC0 if pattern >> 31 else 0x7FC0 for pattern in np.array(patterns, np.uint32)[nan].tolist()]
    assert np.array_equal(cast_array(floats, "bfloat16"), new)
    same = np.array(data.draw(st.lists(st.booleans(), min_size=len(new), max_size=len(new))), bool)
    old = np.where(same, new, new ^ 1).astype(np.uint16)
    if len(new):
        one, size = np.ones(1, np.int64), np.array([len(new)])
        addresses = (np.array([elements.ctypes.data], np.uint64) for elements in (old, floats))
        before, after = (cpu.Spots(at, size, 0 * one, size, size, 0 * at, one) for at in addresses)
        found, expected = cpu.find_in_spots(before, after, size, 2, cast=True), find_changes(old, new)
        assert np.array_equal(found.indices, expected.indices)
        assert np.array_equal(found.values, expected.values)
