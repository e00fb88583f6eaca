"""auto: the codec that is at the other side first, from what both took on the patches at hand."""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.codecs.choose import DRIFT, RETRY, Chooser, Trial, best
from pulse_rl.codecs.context import ContextCodec

STRONG = Trial("context", 100_000, encode_s=0.1, decode_s=0.05)
FAST = Trial("gap", 600_000, encode_s=0.01, decode_s=0.01)


@pytest.mark.parametrize(
    ("bandwidth", "codec"),
    # The strong codec's 0.13 s more of work against 500 kB less to send: even at 30.8 Mbit/s.
    [(None, "context"), (8e5, "context"), (3.04e7, "context"), (3.12e7, "gap"), (1e10, "gap")],
)
def test_the_least_time_over_the_link(bandwidth: float | None, codec: str) -> None:
    assert best([STRONG, FAST], bandwidth).codec == codec
    chooser = Chooser("auto")
    assert [c.name for c in chooser.codecs(bandwidth)] == ["context", "gap"]
    assert chooser.choose([STRONG, FAST], 0.001, bandwidth).codec == codec
    assert [c.name for c in chooser.codecs(bandwidth)] == [codec]
    assert codec in chooser.reason.split(" against ")[0]


def test_trials_are_kept_and_repeated_later() -> None:
    chooser = Chooser("auto")
    chooser.choose([STRONG, FAST], 0.001, 8e5)
    for _ in range(RETRY):
        assert [c.name for c in chooser.codecs(8e5)] == ["context"]
        assert [c.name for c in chooser.codecs(1e10)] == ["gap"]  # another link needs no new trial
        chooser.choose([STRONG], 0.001, 8e5)
    assert len(chooser.codecs(8e5)) == 2
    chooser.choose([STRONG, FAST], 0.001, 8e5)
    chooser.choose([STRONG], 0.001 * DRIFT * 0.99, 8e5)
    assert len(chooser.codecs(8e5)) == 1
    chooser.choose([STRONG], 0.001 * DRIFT * 1.01, 8e5)
    assert len(chooser.codecs(8e5)) == 2


def test_a_requested_codec_needs_no_trial() -> None:
    chooser = Chooser("gap")
    assert [c.name for c in chooser.codecs(1.0)] == ["gap"]
    assert chooser.choose([FAST], 0.001, 1.0) is FAST
    assert chooser.reason == "codec='gap' was requested"


def _steps(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    states = [{"w": rng.normal(0, 0.02, (300, 200)).astype(np.float16)}]
    for _ in range(count):
        new = states[-1]["w"].copy()
        small = np.abs(new) < 0.004
        bits = new.view(np.uint16)
        bits[small & (rng.random(new.shape) < 0.2)] += 1
        states.append({"w": new})
    return states


def test_a_publisher_chooses_by_the_link_and_reports_why(tmp_path: Path) -> None:
    """Over a modem bytes decide; over an unlimited link only the work does. The bits are the same."""
    states = _steps(4)
    slow = pulse.Publisher(tmp_path / "slow", bandwidth="8kbit")
    fast = pulse.Publisher(tmp_path / "fast", bandwidth=1e15)
    for version, state in enumerate(states):
        one, other = slow.publish(state, version=version), fast.publish(state, version=version)
        assert one.digest == other.digest
        if version == 0:
            assert one.codec_reason is None
        else:
            assert one.codec == "context"
            assert one.codec_reason is not None
            assert one.codec_reason.startswith("context ")
            assert " against gap " in one.codec_reason
            assert one.codec_reason.endswith("over 8 kbit/s")
            assert one.patch_nbytes <= other.patch_nbytes
    slow.bandwidth = 1e15  # may be set at any time
    one, other = slow.publish(_steps(5)[5], version=9), fast.publish(_steps(5)[5], version=9)
    assert one.digest == other.digest
    assert one.codec_reason is not None
    assert not one.codec_reason.endswith("over 8 kbit/s")
    weights = {"w": np.zeros((300, 200), np.float16)}
    for store in ("slow", "fast"):
        pulse.Subscriber(tmp_path / store).sync(weights)
        assert pulse.digest(weights) == slow.digest


class Bucket:
    """A directory that says it is elsewhere."""

    def __init__(self, path: Path) -> None:
        self._store = pulse.open_store(path)
        self.url = "elsewhere://bucket"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_publisher_learns_its_link_from_the_anchor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A restarted one knows nothing of it, and keeps the codec, until it has put an anchor."""
    caplog.set_level(logging.INFO, "pulse_rl.sync.publish.encoding")
    states, store = _steps(6), Bucket(tmp_path)
    publisher = pulse.Publisher(store)
    publisher.publish(states[0])
    first = publisher.publish(states[1])
    assert first.codec_reason is not None
    assert first.codec_reason.endswith("bit/s")
    other = "gap" if first.codec == "context" else "context"
    fixed = pulse.Publisher(store, codec=other)  # type: ignore[arg-type]
    fixed.publish(states[2])
    caplog.clear()
    taken_up = pulse.Publisher(store)
    for state in states[3:5]:
        taken_up.publish(state, background=True)
        report = taken_up.flush()
        assert report is not None
        assert report.codec == other
        assert report.codec_reason is not None
        assert report.codec_reason.endswith("as before: no bandwidth of a link is known")
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"version 3: codec {other} from here on: {other} ")
    taken_up.publish(states[5], anchor=True)
    report = taken_up.publish(states[6])
    assert report.codec_reason is not None
    assert report.codec_reason.endswith("bit/s")


@pytest.mark.parametrize("warm", [True, False])
def test_a_directory_gets_the_fewest_bytes_however_fast_this_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """A codec that takes long, as one that compiles does, is taken all the same, before a restart and after it."""
    genuine = ContextCodec.encode

    def slow(self: ContextCodec, segments: Any, spans: Any) -> tuple[bytes, list[bytes]]:
        time.sleep(0.0 if warm else 0.3)
        return genuine(self, segments, spans)

    monkeypatch.setattr(ContextCodec, "encode", slow)
    states = _steps(3)
    for publisher in (pulse.Publisher(tmp_path), pulse.Publisher(tmp_path)):
        for state in (states.pop(0), states.pop(0)):
            report = publisher.publish(state)
        assert report.codec == "context"
        assert report.codec_reason is not None
        assert report.codec_reason.endswith("no bandwidth of a link is known")


def test_a_bandwidth_is_bits_per_second_or_text_with_a_unit(tmp_path: Path) -> None:
    publisher = pulse.Publisher(tmp_path, bandwidth="10Mbit")
    assert publisher.bandwidth == 1e7
    for given, bits in (("200 Mbit/s", 2e8), ("25MB", 2e8), (3e6, 3e6), (None, None)):
        publisher.bandwidth = given
        assert publisher.bandwidth == bits


@pytest.mark.parametrize("bandwidth", [0, 0.0, -1.0, float("nan"), "1e6"])
def test_an_invalid_bandwidth(tmp_path: Path, bandwidth: Any) -> None:
    with pytest.raises(ValueError, match="bandwidth: expected"):
        pulse.Publisher(tmp_path, bandwidth=bandwidth)
    assert not list(tmp_path.iterdir())
    publisher = pulse.Publisher(tmp_path, bandwidth=1e6)
    with pytest.raises(ValueError, match="bandwidth: expected"):
        publisher.bandwidth = bandwidth
    assert publisher.bandwidth == 1e6


def test_the_first_trial_does_not_count_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first encoding is discarded: here it takes a second, as if it compiled the kernels."""
    genuine, calls = ContextCodec.encode, 0

    def slow_at_first(self: ContextCodec, segments: Any, spans: Any) -> tuple[bytes, list[bytes]]:
        nonlocal calls
        calls += 1
        time.sleep(1.0 if calls == 1 else 0.0)
        return genuine(self, segments, spans)

    monkeypatch.setattr(ContextCodec, "encode", slow_at_first)
    publisher = pulse.Publisher(tmp_path, bandwidth=160_000.0)  # kilobytes, so that a second decides
    for version, state in enumerate(_steps(2)):
        report = publisher.publish(state, version=version)
    assert calls == 3  # twice for the first patch, once for the second
    assert report.codec == "context"
