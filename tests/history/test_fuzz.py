"""Hostile patches and histories: 200 cases of the 100,000 that `make fuzz-history` runs; and tests of the fuzzer."""

from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3

import pulse_rl as pulse
from pulse_rl.history.manifest import manifest_name
from pulse_rl.patch.apply import Application
from tests.forked import python
from tests.history import fuzz as fuzz_history
from tests.history import mutations
from tests.history import world as history_world
from tests.patch.tools import seal, span_of, take_apart, with_payload


def test_mutations_end_in_our_own_errors_or_in_proved_weights() -> None:
    """Each case's outcome against what `fuzz_history` allows, in child processes with a limit on their memory."""
    outcomes, findings, _ = fuzz_history.run(seed=1, cases=200, processes=1)
    assert findings == []
    assert sum(outcomes.values()) == 200
    # Unless mutations get as far as this, the other outcomes mean nothing.
    required = (
        "patch accepted",
        "patch forged",
        "manifest accepted",
        "manifests synced",
        "trails around",
        "anchors around",
    )
    assert [outcome for outcome in required if not outcomes[outcome]] == []


PROGRAM = """
from random import Random

import numpy
from tests.history import fuzz, mutations, world

for seconds, nbytes in ((0.2, 1 << 30), (60, 1 << 24)):
    try:
        with fuzz.bounded(seconds, nbytes):
            while seconds < 1: pass
            numpy.zeros(1 << 26, "u1")
    except (fuzz.Wrong, MemoryError) as error:
        print(type(error).__name__)
subject = world.patches()[3]
for kind in mutations.BOMBS:
    bomb = mutations.bomb(Random(1), subject.patch, kind)
    with fuzz.bounded(10 * fuzz.SECONDS, fuzz.ALLOWED):
        print(kind, fuzz.apply_patch(subject, bomb)[0], sep=": ")
"""


def test_time_and_memory_are_bounded() -> None:
    """A child notices too much of either, and refuses patches of a few kilobytes that decompress to the limits."""
    done = python(PROGRAM)
    assert done.returncode == 0, done.stderr
    wrong, memory, *lines = done.stdout.splitlines()
    assert (wrong, memory) == ("Wrong", "MemoryError")
    assert [line.partition(": refused: ")[0] for line in lines] == list(mutations.BOMBS)


def test_a_patch_that_ties_what_the_history_does_not_is_refused() -> None:
    """Hashes and digests are right, but two equal tensors are listed as one: both would be written and one counted."""
    store = pulse.open_store("memory://")
    weights = {"a": np.ones(1000, np.uint16), "b": np.ones(1000, np.uint16)}
    publisher, subscriber = pulse.Publisher(store, codec="gap"), pulse.Subscriber(store)
    publisher.publish(weights, version=0)
    live = {name: array.copy() for name, array in weights.items()}
    subscriber.sync(live)
    weights["a"][7] = 9
    publisher.publish(weights, version=1)
    name = manifest_name(1)
    document, _ = mutations.members(bytes(store.get(name)))
    metadata, streams = take_apart(bytes(store.get(document["patch"]["name"])))
    streams["table"] = mutations.compress(
        mutations.dumps({"tensors": [["a", "U16", [1000], [], [[]]]], "tied": {"b": "a"}})
    )
    numbers = np.array([1, 0, 1, len(streams["payload"]), 1], "<u4").tobytes()
    streams["index"] = mutations.compress(numbers + blake3(streams["payload"]).digest()[:16])
    patch = seal(metadata, streams)
    store.put(document["patch"]["name"], patch)
    document["patch"] |= {"nbytes": len(patch), "blake3": blake3(patch).hexdigest()}
    for tied in ({}, {"b": "a"}):  # the manifest denies the tie, or agrees
        store.put(name, mutations.sealed_manifest(document | {"tied": tied}))
        with pytest.raises(pulse.PulseError):
            subscriber.sync(live)
        assert subscriber.version == 0
        assert pulse.digest(live) == subscriber.digest


def test_a_case_is_the_same_when_it_is_run_again() -> None:
    first = [mutations.mutated_patch(Random(seed), *[history_world.patches()[0].patch] * 2) for seed in range(50)]
    again = [mutations.mutated_patch(Random(seed), *[history_world.patches()[0].patch] * 2) for seed in range(50)]
    assert first == again
    assert len(set(first)) > 40


def test_the_fuzzer_notices_a_library_that_does_not_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer's check, run on an `apply` that writes whatever a patch decodes to."""
    prove = Application.prove

    def careless(self: Any, base_digest: int, **options: Any) -> None:
        try:
            prove(self, base_digest, **options)
        except pulse.IntegrityError:
            return

    monkeypatch.setattr(Application, "prove", careless)
    subject = history_world.patches()[4]  # gap
    metadata, streams = take_apart(subject.patch)
    start = streams["payload"].rindex(zstandard.FRAME_HEADER)  # of the last span's last frame
    values = zstandard.decompress(streams["payload"][start:])
    frame = zstandard.compress(values[:-1] + bytes([values[-1] ^ 1]))
    payload = streams["payload"][: start - 4] + span_of([frame])
    with pytest.raises(fuzz_history.Wrong, match="the digest is not the target's"):
        fuzz_history.apply_patch(subject, seal(metadata, with_payload(metadata, streams, payload)))
