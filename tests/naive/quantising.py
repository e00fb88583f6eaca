"""The naive twins of `cpu/quantising.py`: block by block, value by value, in exact fractions but for one operation."""

from fractions import Fraction
from typing import Any

import numpy as np

from tests.naive.loco import cast_one


def blocks(shape: Any, grid: Any) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Each block's place in the grid, and the elements of it, of a whole stack (rows, columns)."""
    rows, columns = shape
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    per_matrix = -(-grid.height // grid.rows)
    for row in range(rows):
        matrix, inner = divmod(row, grid.height)
        for column in range(columns):
            place = matrix * per_matrix + inner // grid.rows, column // grid.columns
            found.setdefault(place, []).append((row, column))
    return [(*place, elements) for place, elements in found.items()]


def largest(bits: Any, grid: Any) -> Any:
    rows = [down for down, _, _ in blocks(bits.shape, grid)]
    found = np.zeros((max(rows) + 1, -(-bits.shape[1] // grid.columns)), np.uint16)
    for down, across, elements in blocks(bits.shape, grid):
        found[down, across] = max(int(bits[at]) & 0x7FFF for at in elements)
    return found


def code(bits: Any, factor: Any, how: int) -> int:
    value = (np.asarray(bits, np.uint32) << 16).view(np.float32)
    result = value * factor if how == 0 else value / factor
    if how in (2, 3, 5):
        narrow = cast_one(result, "bfloat16")
        result = (np.asarray(narrow, np.uint32) << 16).view(np.float32)
    if how >= 2:
        result = result + np.float32(0)
    if how == 3:
        whole = round(Fraction(float(result))) if np.isfinite(result) else int(np.copysign(128, result))
        return min(max(whole, -128), 127) & 0xFF
    return cast_one(np.float32(result), "float8_e4m3fn" if how < 4 else "float4_e2m1fn")


def quantise(bits: Any, grid: Any, factors: Any, how: int) -> Any:
    """Codes, of FP4 two a byte."""
    codes = np.zeros(bits.shape, np.uint8)
    for down, across, elements in blocks(bits.shape, grid):
        for at in elements:
            codes[at] = code(bits[at], factors[down, across], how)
    return codes[:, ::2] | codes[:, 1::2] << 4 if how >= 4 else codes
