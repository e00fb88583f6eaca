"""Where spans end: what all receivers of shares read is not in one span with what one of them reads."""

import re
from typing import Any

import numpy as np
import pytest

from pulse_rl.codecs.choose import CODECS
from pulse_rl.patch import format as patch_format
from pulse_rl.patch.encode import encode
from pulse_rl.patch.format import Patch
from pulse_rl.weights.layout import layout

LAYERS, HIDDEN = 4, 512


def model(changed: float) -> dict[str, Any]:
    """Layers of a norm before each matrix, by the order of names. changed: elements of 1000 that differ from 0."""
    random = np.random.default_rng(1)
    shapes = {"a_norm": (HIDDEN,), "b_matrix": (HIDDEN, HIDDEN), "c_norm": (HIDDEN,), "d_matrix": (HIDDEN, HIDDEN)}
    return {
        f"layers.{layer}.{name}": (random.random(shape) < changed / 1000).astype(np.uint16)
        for name, shape in shapes.items()
        for layer in range(LAYERS)
    }


def patch(codec: str, changed: float) -> Patch:
    (made,) = encode(layout(model(0)), layout(model(changed)), base=0, target=1, codecs=[CODECS[codec]])
    return patch_format.unpack(made.data)


def kinds(found: Patch) -> list[set[str]]:
    """The kinds of tensors that change in each span."""
    return [
        {re.sub(r"layers\.\d+\.", "", found.table[number].name) for number, _ in span.segments.changing()}
        for span in found.spans
    ]


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_a_norm_is_not_in_one_span_with_a_matrix(codec: str) -> None:
    """All receivers of shares need norms: with them they would read tiles of matrices that they do not hold."""
    spans = kinds(patch(codec, 20))
    assert {"a_norm"} in spans
    assert {"c_norm"} in spans
    assert all(len(each) == 1 for each in spans)


def test_few_changes_are_one_span() -> None:
    assert len(kinds(patch("gap", 0.1))) == 1
