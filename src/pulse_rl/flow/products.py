"""Products of bfloat16 matrices on a CPU that has no instructions for them, as those without AVX-512.

There torch multiplies bfloat16 6 to 80 times as slowly as float32. So operands are widened, which changes none of them,
multiplied in float32, and the product is rounded to bfloat16, as where a CPU has such instructions.
"""

from typing import Any

import torch

# Rows of a matrix that are widened at once have at most so many elements. They stay in the cache, and are written to
# memory that is used again: pages that are new cost more than a product with few rows of x.
BLOCK = 1 << 20


def widen(model: torch.nn.Module) -> None:
    """Have a model's linear layers widen the bfloat16 that they multiply, if this CPU has no instructions for it."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = WideLinear


class WideLinear(torch.nn.Linear):
    """A linear layer. On a CPU it multiplies bfloat16, which it is given or autocast asks for, in float32."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        asked = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        if input.device.type != "cpu" or asked != torch.bfloat16:
            return super().forward(input)
        product: torch.Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """x · wᵀ + b in bfloat16. x: (…, n). w: (m, n). b: (m,) or None. Autograd rounds gradients to their dtypes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        x = x.float()
        product = x.new_empty((*x.shape[:-1], len(w)), dtype=torch.bfloat16)
        rows = max(1, BLOCK // w.shape[1])
        wide = torch.empty_like(w[:rows], dtype=torch.float32)
        for start in range(0, len(w), rows):
            some = slice(start, start + rows)
            bias = None if b is None else b[some].float()
            product[..., some] = torch.nn.functional.linear(x, wide[: len(w[some])].copy_(w[some]), bias)
        return product

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_x, of_w, of_b = ctx.needs_input_grad
        gradient = gradient.float()
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ w.float() if of_x else None,
            rows.T @ x.float().reshape(-1, x.shape[-1]) if of_w else None,
            rows.sum(0) if of_b else None,
        )
