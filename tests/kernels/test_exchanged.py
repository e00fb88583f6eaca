"""What is asked of tensors through DLPack's functions, compared with what torch's methods tell of each."""

from collections.abc import Callable

import pytest
import torch

from pulse_rl.kernels.cpu import exchanged
from pulse_rl.weights.places import Holders, MemoryPlaces

SET: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other memory": torch.Tensor.clone,
    "other dtype of one width": lambda tensor: tensor.view(torch.float16),
    "other dtype": torch.Tensor.float,
    "transposed": torch.t,
    "fewer": lambda tensor: tensor[:2],
    "further on": lambda tensor: tensor[1:],
    "another shape": lambda tensor: tensor.reshape(2, 2, *tensor.shape[1:]),
    "one more dimension": lambda tensor: tensor[None],
}


def weights() -> list[torch.Tensor]:
    whole = torch.zeros(8, 8, dtype=torch.bfloat16)
    return [torch.nn.Parameter(whole[:4, :4]), torch.ones(()), torch.empty(0, 3), whole[5:, ::2], torch.eye(4)]


@pytest.mark.skipif(exchanged.asker(torch.Tensor) is None, reason="torch before 2.10 has no such functions")
def test_a_description_is_what_torch_tells() -> None:
    function = exchanged.asker(torch.Tensor)
    assert function is not None
    tensors = weights()
    data = exchanged.describe(function, tensors)
    assert data is not None
    words = memoryview(data).cast("q").tolist()
    for tensor in tensors:
        address, device, kind, *rest = words
        assert (address, device) == (tensor.data_ptr(), 1)  # kDLCPU, number 0
        assert (kind & 0xFFFFFFFF, kind >> 40 & 0xFF) == (tensor.dim(), 8 * tensor.itemsize)
        dims, words = rest[: 2 * tensor.dim()], rest[2 * tensor.dim() :]
        assert tuple(dims[::2]) == tuple(tensor.shape)
        if tensor.numel():
            assert tuple(dims[1::2]) == tensor.stride()
    assert not words
    assert exchanged.describe(function, [*tensors, torch.empty(3, device="meta")]) is None  # and no error is left
    assert exchanged.describe(function, [torch.empty((1,) * 60)]) is None  # more dimensions than there is room for


@pytest.mark.parametrize("torch_has_them", [True, False])
@pytest.mark.parametrize("change", SET)
def test_places_are_others_after_any_change(change: str, torch_has_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch_has_them:
        monkeypatch.setattr(exchanged, "asker", lambda kind: None)
    tensors = weights()
    holders = Holders.of(tensors)
    known = MemoryPlaces.of(holders)
    assert known is not None
    assert MemoryPlaces.of(Holders.of(tensors), known) is known
    tensors[0].data = SET[change](tensors[0].data)
    found = MemoryPlaces.of(Holders.of(tensors), known)
    assert found is not None
    assert found is not known
    assert not found.is_as(known)
    assert found.are_these(holders)  # the same objects, elsewhere
