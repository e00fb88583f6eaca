"""Products in bfloat16 that are made in float32, against products in float64 and against torch's own."""

import pytest
import torch

from pulse_rl.flow import products

SHAPES = [((5,), 3), ((2, 7), 1), ((2, 3, 33), 17)]  # of x without its last dimension's size, and outputs
ROUNDED = 2.0**-8  # how far rounding to bfloat16 takes a number from itself, as a part of it


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for bfloat16."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def layers(inputs: int, outputs: int, bias: bool) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Twice the same, the second one widened."""
    torch.manual_seed(inputs)
    one, other = (torch.nn.Linear(inputs, outputs, bias=bias) for _ in range(2))
    other.load_state_dict(one.state_dict())
    products.widen(other)
    assert type(other) is products.WideLinear
    return one, other


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("block", [products.BLOCK, 100, 1])  # all rows at once; some, with a rest; one by one
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_a_product_and_its_gradients_are_those_of_float64_rounded(
    shape: tuple[int, ...], outputs: int, autocast: bool, bias: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters in float32 under autocast, as a trainer's; or all in bfloat16, as a rollout worker's."""
    monkeypatch.setattr(products, "BLOCK", block)
    torch_own, wide = layers(shape[-1], outputs, bias)
    exact = torch.nn.Linear(shape[-1], outputs, bias=bias, dtype=torch.float64)
    exact.load_state_dict({name: tensor.bfloat16().double() for name, tensor in wide.state_dict().items()})
    given = torch.randn(shape).bfloat16()
    gradient = torch.randn(*shape[:-1], outputs).bfloat16()
    results = []
    for layer in (exact, torch_own, wide):
        if layer is not exact and not autocast:
            layer.bfloat16()
        x = given.to(torch.float64 if layer is exact else torch.bfloat16, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and layer is not exact):
            out = layer(x)
        out.backward(gradient.to(out.dtype))
        results.append([out, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for true, own, found in zip(*results, strict=True):
        assert found.dtype == own.dtype
        assert torch.allclose(found.double(), true, rtol=ROUNDED, atol=1e-5)


@pytest.mark.usefixtures("slow")
def test_what_is_not_multiplied_in_bfloat16_is_torchs() -> None:
    one, other = layers(33, 17, True)
    x = torch.randn(4, 33)
    assert torch.equal(one(x), other(x))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(one(x), other(x))


def test_a_cpu_that_has_instructions_for_bfloat16_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    layer = torch.nn.Linear(2, 2)
    products.widen(layer)
    assert type(layer) is torch.nn.Linear
