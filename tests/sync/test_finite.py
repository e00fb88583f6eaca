"""Weights that are NaN or infinite: they are published bit for bit, and reports warn of them."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pulse_rl as pulse
from pulse_rl.cli.main import main
from pulse_rl.dtypes import DTYPES, UINTS
from pulse_rl.store.base import Store
from pulse_rl.weights import finite
from tests.loco.ranks import Ranks


@pytest.mark.parametrize("name", [name for name in DTYPES if "float" in name])
def test_what_is_not_finite_is_what_torch_says(name: str) -> None:
    """Every pattern of up to 16 bits, and random ones beside the borders of wider formats."""
    dtype, itemsize = DTYPES[name]
    if itemsize <= 2:
        bits = np.arange(1 << 8 * itemsize, dtype=np.uint64).astype(UINTS[itemsize])
    else:
        bits = np.random.default_rng(0).integers(0, 1 << 63, 10_000, np.uint64) >> np.uint64(64 - 8 * itemsize)
        borders = np.array([np.inf, -np.inf, np.nan, np.finfo(name).max, 0, -0.0], name).view(UINTS[itemsize])
        bits = np.concatenate([bits.astype(UINTS[itemsize]), borders])
    expected = ~torch.from_numpy(bits.view(np.dtype(f"i{itemsize}"))).view(getattr(torch, name)).double().isfinite()
    assert expected.any()
    assert finite.not_finite(bits, dtype).tolist() == expected.tolist()


def test_integers_are_finite() -> None:
    ones = np.full(8, 255, np.uint8)
    assert not finite.not_finite(ones, "U8").any()
    assert not finite.not_finite(ones.view(np.uint64), "C64").any()


def bad(weights: dict[str, torch.Tensor]) -> int:
    """How many published weights are NaN or infinite, by torch."""
    return sum(int((~tensor.bfloat16().isfinite()).sum()) for tensor in weights.values())


def test_a_report_the_log_and_status_say_what_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The count is compared with torch's over all weights, version for version, across a resume."""
    torch.manual_seed(0)
    weights = {"a": torch.randn(40, 7), "b": torch.randn(300), "c": torch.randn(40, 7)}
    changes: list[tuple[str, Any, float]] = [
        ("c", (slice(3, 5), 1), float("nan")),
        ("b", slice(0, 9), 3.4e38),  # finite in FP32, infinite in BF16
        ("c", (3, 1), 1.0),
        ("b", slice(None), 0.5),
        ("c", slice(None), 0.5),
    ]
    publisher = pulse.Publisher(tmp_path, cast="bfloat16")
    first = publisher.publish(weights)
    assert (first.nonfinite, first.warning) == (0, None)
    for name, where, value in changes:
        weights[name][where] = value
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pulse_rl"):
            report = publisher.publish(weights, background=True)
            flushed = publisher.flush()
        assert flushed is not None
        assert report.nonfinite == flushed.nonfinite == bad(weights)
        newest = publisher.history.head()
        assert newest is not None
        assert newest.nonfinite == report.nonfinite
        told = f"{bad(weights)} of 860 weights are NaN or infinite" if bad(weights) else "all weights are finite again"
        assert told in caplog.text
        assert (report.warning is None) == (not bad(weights))
        assert pulse.status(tmp_path).nonfinite == bad(weights)
        with pytest.raises(SystemExit):
            main(["status", str(tmp_path)])
        assert ("are NaN or infinite" in capsys.readouterr().out) == bool(bad(weights))
        if value not in (1.0, 0.5):
            assert report.warning == flushed.warning == f"{told}, as in '{name}'"
        live = {key: torch.zeros_like(tensor, dtype=torch.bfloat16) for key, tensor in weights.items()}
        pulse.Subscriber(tmp_path).sync(live)
        expected = {key: tensor.bfloat16() for key, tensor in weights.items()}  # torch's NaN may have other bits
        torch.testing.assert_close(live, expected, rtol=0, atol=0, equal_nan=True)
        publisher = pulse.Publisher(tmp_path, cast="bfloat16")


def test_a_first_version_and_an_anchor_alone_are_looked_at(store: Store) -> None:
    weights = {"x": torch.tensor([1.0, float("inf"), float("nan")]), "y": torch.zeros(0), "z": torch.zeros(2)}
    first = pulse.Publisher(store).publish(weights)
    assert (first.nonfinite, first.warning) == (2, "2 of 5 weights are NaN or infinite, as in 'x'")
    weights["x"][1] = 0
    assert pulse.Publisher(store).publish(weights, anchor=True).nonfinite == 1


def publish_shares(group: Any, rank: int, size: int, store: str) -> list[tuple[int, str | None]]:
    """Each rank holds half of `x`, and all of `y`."""
    half, whole = torch.zeros(6), torch.zeros(4)
    publisher = pulse.Publisher(store, group=group)
    found = []
    for at in (None, 1, 2):
        if at is not None:
            half[at + rank] = float("nan")
            whole[at] = float("inf")
        weights = {"x": pulse.Shard(half, shape=(12,), offset=(6 * rank,)), "y": whole}
        report = publisher.publish(weights)
        found.append((report.nonfinite, report.warning))
    return found


def test_ranks_count_together(ranks: Ranks, tmp_path: Path) -> None:
    """An element that all ranks hold counts once."""
    every = ranks(publish_shares, 2, str(tmp_path))
    assert every[0] == every[1]
    assert [count for count, _ in every[0]] == [0, 3, 6]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", torch.float8_e5m2, "float8_e8m0fnu"])
def test_a_cast_that_needs_scales_is_refused(store: Store, kind: Any) -> None:
    weights = {"x": torch.randn(8)}
    with pytest.raises(
        ValueError, match=r"without scales .* publish with cast='bfloat16'.*views=\{'fp8': pulse.Fp8\(\)\}"
    ):
        pulse.Publisher(store, cast=kind)
    with pytest.raises(ValueError, match="without scales"):
        pulse.Publisher(store).publish(weights, cast=kind)
    assert pulse.Subscriber(store).latest() is None
    already = {"x": weights["x"].to(torch.float8_e4m3fn)}
    assert pulse.Publisher(store).publish(already).nonfinite == 0  # what is in it already is published as it is
