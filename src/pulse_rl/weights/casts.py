"""The floating-point dtypes that weights can be cast to while they are published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_rl.dtypes import DTYPES

if TYPE_CHECKING:
    import torch

CASTS = tuple(name for name in DTYPES if "float" in name)


def cast_name(cast: str | torch.dtype) -> str:
    """The name of a floating-point dtype, given as torch.bfloat16 or "bfloat16". Raises ValueError for another one."""
    name = str(cast).removeprefix("torch.")
    if name not in CASTS:
        raise ValueError(
            f"cast: expected a floating-point dtype, torch.bfloat16 or 'bfloat16' ({', '.join(CASTS)}), found {cast!r}"
        )
    return name
