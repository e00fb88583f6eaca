"""Weights with elements laid over them: what is read of plain memory in columns, against what is read tensor by tensor.

A skip patch is found in an overlay, and a patch of a chain is proved over those before it; both know a way for any
memory, which here is the reference.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.codecs.choose import CODECS
from pulse_rl.patch import encode, laid_over
from pulse_rl.patch.apply import Application
from pulse_rl.patch.format import unpack
from pulse_rl.patch.live import resolve
from pulse_rl.patch.overlay import Older, Overlay, Recorder
from pulse_rl.patch.since import Since
from pulse_rl.weights import digests
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.memory import live_layout

Arrays = dict[str, np.ndarray[Any, Any]]

# Tiles and rows that do not divide evenly, elements of all widths, no elements, no dimensions.
SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "layers.0.w": ((300, 257), np.uint16),
    "layers.1.w": ((300, 257), np.uint16),
    "bytes": ((5, 7, 11), np.uint8),
    "empty": ((0, 4), np.uint16),
    "long": ((70_001,), np.uint32),
    "scalar": ((), np.uint64),
}


def states(seed: int, versions: int) -> list[Arrays]:
    """Some versions; from one to the next elements change, some of which have their first bits again later."""
    random = np.random.default_rng(seed)
    found = [
        {
            name: np.frombuffer(random.bytes(int(np.prod(shape)) * np.dtype(kind).itemsize), kind).reshape(shape).copy()
            for name, (shape, kind) in SHAPES.items()
        }
    ]
    for _ in range(versions - 1):
        found.append({name: array.copy() for name, array in found[-1].items()})
        for name, array in found[-1].items():
            flat, first = array.reshape(-1), found[0][name].reshape(-1)
            for _ in range(int(random.integers(0, 60)) if flat.size else 0):
                at = int(random.integers(max(0, flat.size - 500), flat.size))
                flat[at] = first[at] if random.integers(3) == 0 else flat[at] ^ flat.dtype.type(random.integers(1, 256))
    return found


def what_was_overwritten(versions: list[Arrays]) -> Overlay:
    """What the first version held, as a publisher collects it from version to version."""
    overlay = None
    for old, new in zip(versions, versions[1:], strict=False):
        with Recorder() as recorder:
            encode.find(layout(old), layout(new), codecs=[CODECS["gap"]], recorder=recorder)
            later = recorder.overlay()
        assert later is not None
        overlay = later if overlay is None else overlay.and_later(later)
    assert overlay is not None
    return overlay


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(["gap", "context"]), st.integers(2, 5))
def test_what_changed_since_a_version_is_what_a_comparison_finds(seed: int, codec: str, count: int) -> None:
    versions = states(seed, count)
    newest = layout(versions[-1])
    overlay = what_was_overwritten(versions)
    since = Since.of(overlay, newest)
    assert since is not None
    (found,) = encode.find(newest, newest, codecs=[CODECS[codec]], scan=since).code()
    (slow,) = encode.find(overlay.over(newest), newest, codecs=[CODECS[codec]]).code()
    (plain,) = encode.find(layout(versions[0]), newest, codecs=[CODECS[codec]]).code()
    for other in (slow, plain):
        assert found.blocks == other.blocks
        mine, its = found.found, other.found
        assert mine.counts.tolist() == its.counts.tolist()
        assert (mine.delta, mine.nonfinite, mine.table) == (its.delta, its.nonfinite, its.table)


def test_only_weights_in_plain_memory_that_are_cut_alike_are_looked_at_in_columns() -> None:
    versions = states(1, 2)
    overlay, newest = what_was_overwritten(versions), layout(versions[-1])
    assert Since.of(overlay, newest) is not None
    assert Since.of(overlay, layout({**versions[-1], "more": np.zeros(4, np.uint16)})) is None
    apart = np.zeros((300, 600), np.uint16)[:, ::2][:, :257]
    assert Since.of(overlay, layout({**versions[-1], "layers.0.w": apart})) is None


def patches(versions: list[Mapping[str, Any]], codec: Any) -> list[bytes]:
    return [
        pulse.diff(old, new, base=number, target=number + 1, codec=codec)
        for number, (old, new) in enumerate(zip(versions, versions[1:], strict=False))
    ]


def deltas(weights: Layout, several: list[bytes], *, by_name: bool) -> list[int]:
    """What the digest gains by each patch of a chain of which nothing is written. by_name: as for any memory."""
    found, overlay, changes = [], None, list[Application]()
    for data in several:
        patch = unpack(data)
        live = resolve(patch.by_name(), patch.tied, weights)

        def older(live: Any = live, changes: Any = tuple(changes)) -> Any:
            for application in changes:
                by_tensor: dict[str, Any] = {}
                for name, place, one in application.changes():
                    by_tensor.setdefault(name, {})[place] = one
                live = {
                    name: [laid_over.laid_over(bits, by_tensor.get(name, {})) for bits in copies]
                    for name, copies in live.items()
                }
            return live

        def laid(overlay: Overlay | None = overlay) -> Overlay | None:
            return None if by_name else overlay

        application = Application(patch, live, before=Older(laid, older) if changes else None)
        found.append(application.own_delta())
        changes.append(application)
        own = application.overlay()
        overlay = own if overlay is None else own.and_later(overlay)
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(["gap", "context"]), st.integers(2, 5))
def test_a_chain_is_proved_over_what_is_not_written_yet(seed: int, codec: str, count: int) -> None:
    versions = states(seed, count)
    chain = patches(list(versions), codec)
    expected = [int(pulse.digest(one), 16) for one in versions]
    gains = [(b - a) & digests.MASK for a, b in zip(expected, expected[1:], strict=False)]
    for by_name in (False, True):
        assert deltas(live_layout(versions[0]), chain, by_name=by_name) == gains


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_plain_memory_is_not_read_tensor_by_tensor(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = states(3, 5)
    store = pulse.open_store("memory://")
    publisher, subscriber = pulse.Publisher(store, codec=codec), pulse.Subscriber(store)  # type: ignore[arg-type]
    live = {name: array.copy() for name, array in versions[0].items()}
    publisher.publish(versions[0], version=0)
    subscriber.sync(live)
    monkeypatch.setattr(laid_over, "LaidOver", None)
    for number, one in enumerate(versions[1:], 1):  # the fourth commit has a skip patch
        assert publisher.publish(one, version=number).warning is None
    assert subscriber.stage(live).apply().patches == 4
    assert all((live[name] == versions[-1][name]).all() for name in live)


def test_a_share_of_a_tensor_is_proved_over_what_is_not_written_yet() -> None:
    """Columns that no tile ends at: a rank holds parts of segments."""
    random = torch.Generator().manual_seed(5)
    versions = [{"w": torch.randint(0, 1 << 15, (90, 100), generator=random, dtype=torch.int16)}]
    for _ in range(3):
        versions.append({"w": versions[-1]["w"].clone()})
        versions[-1]["w"].view(-1)[torch.randint(0, 9000, (200,), generator=random)] += 1
    chain = patches(list(versions), "gap")
    halves = [(0, 37), (37, 100)]
    for by_name in (False, True):
        found = []
        for a, b in halves:
            shard = pulse.Shard(versions[0]["w"][:, a:b].contiguous(), shape=(90, 100), offset=(0, a))
            weights = live_layout({"w": shard})
            found.append(deltas(weights, chain, by_name=by_name))
        whole = [int(pulse.digest(one), 16) for one in versions]
        gains = [(b - a) & digests.MASK for a, b in zip(whole, whole[1:], strict=False)]
        assert [sum(each) & digests.MASK for each in zip(*found, strict=True)] == gains


def test_a_skip_patch_that_leads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof decodes it: an encoder that writes other bits is found out, and the version stands."""
    versions = states(7, 5)
    store = pulse.open_store("memory://")
    publisher = pulse.Publisher(store, codec="gap")
    find = Since.find

    def wrong(self: Since, *given: Any) -> Any:
        for found in find(self, *given):
            values = found.changes.values.copy()
            values[:1] ^= 1
            yield found._replace(changes=found.changes._replace(values=values))

    monkeypatch.setattr(Since, "find", wrong)
    warnings = [publisher.publish(one, version=number).warning for number, one in enumerate(versions)]
    assert warnings[:4] == [None] * 4
    assert "skip patches" in str(warnings[4])
    live = {name: np.zeros_like(array) for name, array in versions[0].items()}
    assert pulse.Subscriber(store).sync(live).version == 4
