"""What an unsigned manifest promises is bounded by what its receiver knows: its own model, and what exists."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.errors import CannotListError, ObjectNotFoundError
from pulse_rl.history import manifest as manifests
from pulse_rl.history import versions
from pulse_rl.history.history import History
from pulse_rl.history.manifest import manifest_name
from pulse_rl.log.objects import limit_of
from pulse_rl.log.sealed import seal
from pulse_rl.store.around import StoreAround
from pulse_rl.store.base import Store
from tests.history.test_status import Run


class Endless:
    """A store in which one object never ends."""

    def __init__(self, inner: Store, name: str) -> None:
        self._inner, self._name = inner, name
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream(self, name: str) -> Iterator[memoryview]:
        if name != self._name:
            yield from self._inner.stream(name)
            return
        while self.sent < 4 << 30:
            self.sent += 8 << 20
            yield memoryview(bytes(8 << 20))


@pytest.mark.parametrize("what", ["patch", "anchor"])
def test_an_object_that_is_larger_than_the_model_allows(what: str) -> None:
    """A manifest promises a terabyte: nothing of it is read, and the weights stay as they were."""
    store = pulse.open_store("memory://")
    run = Run(store, anchor_every=3)
    run.publish(2 if what == "patch" else 1)
    live, subscriber = run.empty(), pulse.Subscriber(store)
    if what == "patch":
        subscriber.sync(live, version=0)
    before = live["w"].copy()
    history = History(store)
    head = history.head()
    assert head is not None
    if what == "patch":
        assert head.patch is not None
        ref = msgspec.structs.replace(head.patch, nbytes=1 << 40)
        changed, name = msgspec.structs.replace(head, patch=ref, trail=None, anchor_sequence=0), ref.name
    else:
        ref = msgspec.structs.replace(head.anchor[0], nbytes=1 << 40)  # type: ignore[assignment]
        changed, name = msgspec.structs.replace(head, anchor=(ref,)), ref.name
    store.put(manifest_name(head.sequence), seal(changed, None))
    endless = Endless(store, name)
    subscriber.history.forget()
    subscriber.history.store = endless
    tracemalloc.start()
    with pytest.raises(pulse.IntegrityError, match=f"expected at most {limit_of(live['w'].nbytes)} bytes"):
        subscriber.sync(live)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert endless.sent == 0
    np.testing.assert_array_equal(live["w"], before)


@pytest.mark.parametrize("call", ["publish", "resume"])
def test_a_publisher_that_resumes_downloads_no_more_than_the_model_allows(call: str) -> None:
    """It knows the weights that are to be published; `resume` alone at least the size that the version says it has."""
    store = pulse.open_store("memory://")
    run = Run(store)
    run.publish(1)
    head = History(store).head()
    assert head is not None
    ref = msgspec.structs.replace(head.anchor[0], nbytes=1 << 40)
    nbytes = head.full_nbytes if call == "resume" else 1 << 40
    changed = msgspec.structs.replace(head, anchor=(ref,), full_nbytes=nbytes)
    store.put(manifest_name(0), seal(changed, None))
    endless = Endless(store, ref.name)
    publisher = pulse.Publisher(endless)
    with pytest.raises(pulse.IntegrityError, match=f"expected at most {limit_of(head.full_nbytes)} bytes"):
        publisher.resume() if call == "resume" else publisher.publish(run.empty())
    assert endless.sent == 0


def test_an_anchor_that_the_disk_has_no_room_for_is_not_downloaded() -> None:
    """Where a forged manifest contradicts itself nowhere, the room for temporary files is still what exists."""
    store = pulse.open_store("memory://")
    Run(store).publish(1)
    head = History(store).head()
    assert head is not None
    ref = msgspec.structs.replace(head.anchor[0], nbytes=1 << 60)
    store.put(manifest_name(0), seal(msgspec.structs.replace(head, anchor=(ref,), full_nbytes=1 << 60), None))
    endless = Endless(store, ref.name)
    with pytest.raises(pulse.StoreError, match=f"expected room for {1 << 60} bytes, found"):
        pulse.Publisher(endless).resume()
    assert endless.sent == 0


@pytest.mark.parametrize("sound", [False, True])
def test_a_server_that_answers_to_every_name(sound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page for every address, or even a sound manifest: no list of 10**12 numbers."""
    store = pulse.open_store("memory://")
    Run(store).publish()
    (first,) = History(store).manifests()
    monkeypatch.setattr(versions, "MAX_PROBED", 5000)

    class Everything(StoreAround):
        def list(self, prefix: str, after: str = "") -> Any:
            raise CannotListError("no listing")

        def stream(self, name: str) -> Iterator[memoryview]:
            sequence = manifests.manifest_sequence(name)
            if sequence is None:
                raise ObjectNotFoundError("none", url=self.url, name=name)
            manifest = msgspec.structs.replace(first, sequence=sequence, anchor=(), patch=None)
            yield memoryview(seal(manifest, None) if sound else b"<html>every address has a page here</html>")

    history = History(Everything(store))
    for look in (history.sequences, history.head, history.manifests):
        with pytest.raises(pulse.IntegrityError, match="does its server answer to every name"):
            look()
