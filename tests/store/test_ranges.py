"""Parts of objects, compared with slices of the whole: every store in reach, and servers that answer wrongly."""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.errors import CannotReadRangeError, ObjectNotFoundError
from pulse_rl.store import remote
from pulse_rl.store.base import RangedStore, Store
from pulse_rl.store.objects import WHOLE_S, ObjectStore
from pulse_rl.store.patient import patient, unwrapped
from pulse_rl.store.ranges import REQUEST_NBYTES, REQUESTS_AT_ONCE, plan_requests, read_range, read_ranges
from pulse_rl.store.remote import CloudStore, RemoteStore
from tests.store import servers
from tests.store.proxy import Fault, Proxy

DATA = np.random.default_rng(0).bytes(50_000)
KINDS = ["memory", "file", "s3", "rclone", "azure", "nginx", "python", "patient", "cached"]


@pytest.fixture(params=KINDS)
def ranged(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RangedStore:
    """Each store in turn; it holds DATA as `x/data`, and as a patch."""
    kind, directory, url = request.param, tmp_path / "run", str(tmp_path / "run")
    writable: Any = None
    if kind == "s3":
        servers.use_s3(monkeypatch, servers.moto())
        url = f"s3://{servers.s3_bucket()}/run"
    elif kind == "rclone":
        servers.use_s3(monkeypatch, servers.rclone())
        url = f"s3://bucket/{tmp_path.name}"
    elif kind == "azure":
        url = f"az://{servers.azure_container(monkeypatch)}/run"
    elif kind in ("nginx", "python"):
        writable = pulse.open_store(directory)
        (tmp_path / "nginx").mkdir()
        port = servers.nginx(tmp_path, tmp_path / "nginx") if kind == "nginx" else servers.web(tmp_path)
        url = f"http://127.0.0.1:{port}/run"
    elif kind == "memory":
        url = "memory://"
    store: Any = pulse.open_store(url, cache=tmp_path / "cache" if kind == "cached" else False)
    for name in ("x/data", PATCH):
        (writable or store).put(name, DATA)
    return patient(store, 1.0) if kind == "patient" else store  # type: ignore[return-value]


PATCH = f"patches/{7:012d}-{'ab' * 8}.safetensors"

bounds = st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))).map(lambda pair: (min(pair), max(pair)))
gaps = st.sampled_from([0, 10, 1000, 1 << 20])


def test_ranges_are_slices_of_the_whole(ranged: RangedStore) -> None:
    """Any ranges, overlapping, empty and in any order, with any gap and share between them."""

    @settings(max_examples=25)
    @given(ranges=st.lists(bounds, max_size=12), gap=gaps, spare=st.sampled_from([0, 1 / 16, 1.0]))
    def check(ranges: list[tuple[int, int]], gap: int, spare: float) -> None:
        for name in ("x/data", PATCH):
            found = read_ranges(ranged, name, ranges, gap=gap, spare=spare)
            assert [bytes(part) for part in found] == [DATA[start:stop] for start, stop in ranges]
            for start, stop in ranges[:2]:
                try:
                    assert bytes(ranged.read_range(name, start, stop)) == DATA[start:stop]
                except CannotReadRangeError:
                    assert "bucket/test_" in ranged.url  # rclone's server sends objects only whole

    check()


def test_what_is_no_range(ranged: RangedStore) -> None:
    for name in ("x/data", PATCH):
        for start, stop in ((-1, 5), (5, 4), (-3, -2)):
            with pytest.raises(ValueError, match="expected a range of bytes"):
                ranged.read_range(name, start, stop)
            with pytest.raises(ValueError, match="expected a range of bytes"):
                read_ranges(ranged, name, [(0, 1), (start, stop)])


def test_a_range_beyond_the_end_is_never_short(ranged: RangedStore) -> None:
    size = len(DATA)
    for name, (start, stop) in itertools.product(
        ("x/data", PATCH), [(size - 5, size + 1), (size, size + 5), (size + 100, size + 200)]
    ):
        for read in (ranged.read_range, lambda n, a, b: read_ranges(ranged, n, [(0, 9), (a, b)])):
            with pytest.raises(pulse.StoreError, match="cannot read") as raised:
                read(name, start, stop)
            assert (raised.value.url, raised.value.name) == (ranged.url, name)
            assert not raised.value.temporary
            assert "\n" not in str(raised.value)


def test_a_range_of_a_missing_object(ranged: RangedStore) -> None:
    for name in ("x/none", PATCH.replace("7-", "8-")):
        for read in (
            lambda n: ranged.read_range(n, 1, 2),
            lambda n: read_ranges(ranged, n, [(1, 2), (40_000, 40_001)]),
        ):
            with pytest.raises(ObjectNotFoundError) as raised:
                read(name)
            assert (raised.value.url, raised.value.name) == (ranged.url, name)


@pytest.mark.parametrize("nbytes", [7777, 25_000, 49_999, 50_000, 50_001])
def test_a_stream_in_parts_is_the_whole(ranged: RangedStore, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """From any byte on, of large, small and empty objects, whether or not a server sends parts."""
    monkeypatch.setattr(remote, "RANGE_NBYTES", nbytes)
    assert b"".join(ranged.stream("x/data")) == DATA
    inner: Any = unwrapped(ranged)
    if isinstance(inner, RemoteStore):
        for start in (1, 40_000, len(DATA)):
            assert b"".join(inner.stream_from("x/data", start)) == DATA[start:]
    if isinstance(inner, CloudStore):
        inner.put("x/empty", b"")
        assert b"".join(ranged.stream("x/empty")) == b""


def test_parts_of_a_stream_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight requests waits for the seven others."""
    servers.use_s3(monkeypatch, servers.moto())
    monkeypatch.setattr(remote, "RANGE_NBYTES", 1000)
    store = unwrapped(pulse.open_store(f"s3://{servers.s3_bucket()}/run"))
    store.put("x", DATA[:17_000])
    together, read = threading.Barrier(REQUESTS_AT_ONCE), CloudStore.read_range

    def waiting(self: CloudStore, name: str, start: int, stop: int) -> memoryview:
        together.wait(60)
        return read(self, name, start, stop)

    monkeypatch.setattr(CloudStore, "read_range", waiting)
    assert b"".join(store.stream("x")) == DATA[:17_000]


class Plain:
    """A store of somebody else, without ranges; it counts what is read."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url, self.read = inner, inner.url, 0

    def stream(self, name: str) -> Iterator[memoryview]:
        data = self.inner.get(name)
        for start in range(0, len(data), 1000):
            self.read += len(data[start : start + 1000])
            yield data[start : start + 1000]


def test_a_store_without_ranges_is_read_once_up_to_the_last_byte() -> None:
    inner = pulse.open_store("memory://")
    inner.put("x", DATA)
    plain: Any = Plain(inner)
    ranges = [(30_000, 30_010), (5, 9), (0, 0), (29_000, 30_005)]
    assert [bytes(part) for part in read_ranges(plain, "x", ranges)] == [DATA[a:b] for a, b in ranges]
    assert plain.read == 31_000
    for store in (plain, patient(plain, 1.0)):
        with pytest.raises(CannotReadRangeError) as raised:
            read_range(store, "x", 0, 1)
        assert (raised.value.url, raised.value.name) == (inner.url, "x")
    with pytest.raises(pulse.StoreError, match=f"expected {len(DATA) + 1} bytes"):
        read_ranges(plain, "x", [(0, 4), (len(DATA), len(DATA) + 1)])


class Liar:
    """A store of somebody else whose ranges have the wrong size."""

    def __init__(self, inner: Store, wrong: int) -> None:
        self._inner, self.url, self._wrong = inner, inner.url, wrong

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        return self._inner.get(name)[start : stop + self._wrong]


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_store_whose_ranges_have_the_wrong_size(wrong: int) -> None:
    inner = pulse.open_store("memory://")
    inner.put("x", DATA)
    liar: Any = Liar(inner, wrong)
    for store in (liar, patient(liar, 1.0)):
        for read in (lambda s: read_range(s, "x", 7, 17), lambda s: read_ranges(s, "x", [(7, 17), (9000, 9001)])):
            with pytest.raises(pulse.StoreError, match="bytes from byte") as raised:
                read(store)
            assert (raised.value.url, raised.value.name) == (inner.url, "x")


class _Hostile(BaseHTTPRequestHandler):
    """Answers a range as the object's name says; whole objects are right."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[tuple[str, bool]]] = []  # the name in each, and whether a range was in it
    pages: ClassVar[list[int]] = []  # one, until it is sent in place of a part

    def do_GET(self) -> None:
        way, wanted = self.path.rpartition("/")[2], re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        type(self).requests.append((way, wanted is not None))
        start, stop = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, len(DATA))
        body, status, says = DATA[start:stop], 206 if wanted else 200, f"bytes {start}-{stop - 1}/{len(DATA)}"
        if wanted and (way == "ignored" or (way == "a-page-once" and start == 40_000 and self.pages)):
            self.pages.clear()
            body, status = DATA, 200
        elif wanted and way in ("short", "short-and-says-so"):
            body = body[:-1]
            says = says if way == "short" else f"bytes {start}-{stop - 2}/{len(DATA)}"
        elif wanted and way == "long":
            body = DATA[start : stop + 1]
        elif wanted and way == "whole-as-part":
            body = DATA
        elif wanted and way == "elsewhere":
            body, says = DATA[start + 1 : stop + 1], f"bytes {start + 1}-{stop}/{len(DATA)}"
        elif wanted and way == "refused":
            body, status = b"", 416
        self.send_response(status)
        if status == 206 and way != "unmarked":
            self.send_header("Content-Range", says)
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # obstore hangs up where it sees that it gets too much
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(params=["http", "s3"])
def hostile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangedStore]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    port = server.server_address[1]
    servers.use_s3(monkeypatch, port)
    _Hostile.requests.clear()
    _Hostile.pages[:] = [1]
    yield pulse.open_store(f"http://127.0.0.1:{port}/run" if request.param == "http" else "s3://bucket/run")  # type: ignore[misc]
    server.shutdown()
    server.server_close()


WRONG = ["short", "short-and-says-so", "long", "whole-as-part", "elsewhere", "unmarked", "refused"]


@pytest.mark.parametrize("way", WRONG)
def test_a_server_that_answers_a_range_wrongly(hostile: RangedStore, way: str) -> None:
    """An error, with fields, and never other bytes."""
    for read in (
        lambda: hostile.read_range(way, 100, 120),
        lambda: read_ranges(hostile, way, [(100, 120), (40_000, 40_100)]),
    ):
        with pytest.raises(pulse.StoreError, match=f"cannot read {way}") as raised:
            read()
        assert (raised.value.url, raised.value.name) == (hostile.url, way)
        assert "\n" not in str(raised.value)
        assert not isinstance(raised.value, CannotReadRangeError)


def test_a_server_that_ignores_ranges(hostile: RangedStore) -> None:
    """The right bytes, from one whole object; once it is known, no range is requested again."""
    ranges = [(100, 120), (40_000, 40_100)]
    for number in range(3):
        assert [bytes(part) for part in read_ranges(hostile, "ignored", ranges)] == [DATA[a:b] for a, b in ranges]
        if number:
            assert _Hostile.requests == [("ignored", False)]
        _Hostile.requests.clear()
    with pytest.raises(CannotReadRangeError) as raised:
        hostile.read_range("ignored", 0, 1)
    assert (raised.value.url, raised.value.name) == (hostile.url, "ignored")


def test_a_page_in_place_of_a_part_is_forgotten(hostile: RangedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a proxy: the object is read all the same, and after a while by several requests again."""
    monkeypatch.setattr(remote, "RANGE_NBYTES", 20_000)

    def requests() -> list[bool]:
        """Whether a range was in each request of one reading."""
        _Hostile.requests.clear()
        assert b"".join(hostile.stream("a-page-once")) == DATA
        return [ranged for _, ranged in _Hostile.requests]

    assert requests() == [True, True, True, False]
    assert requests() == [False]
    later = time.monotonic() + WHOLE_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert requests() == [True, True, True]


@pytest.mark.parametrize("what", ["drop", "truncate", 503])
def test_ranges_go_on_through_an_outage(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is repeated alone; the bytes are right, and without patience the failure is a temporary one."""
    with contextlib.closing(Proxy(servers.moto())) as proxy:
        servers.use_s3(monkeypatch, proxy.port)
        inner: Any = pulse.open_store(f"s3://{servers.s3_bucket()}/run")
        inner.put("x", DATA)
        ranges = [(at, at + 100) for at in range(0, len(DATA), 5000)]
        proxy.faults = [Fault(what, "GET", "/x", times=12)]
        with pytest.raises(pulse.StoreError) as raised:
            read_ranges(inner, "x", [(0, 10)])
        assert raised.value.temporary
        found = read_ranges(patient(inner, 30.0), "x", ranges, gap=0)
        assert [bytes(part) for part in found] == [DATA[a:b] for a, b in ranges]
        assert proxy.faults[0].hits == 12


def test_requests_are_few_and_bring_little_else() -> None:
    """Every rule of the plan: what is joined, and what is not."""
    assert plan_requests([], 10, 1.0) == []
    assert plan_requests([(5, 9), (0, 5)], 0, 0) == [(0, 9)]  # neighbours
    assert plan_requests([(0, 5), (3, 9), (1, 2)], 0, 0) == [(0, 9)]  # ranges that overlap
    assert plan_requests([(0, 100), (110, 200)], 10, 1.0) == [(0, 200)]
    assert plan_requests([(0, 100), (111, 200)], 10, 1.0) == [(0, 100), (111, 200)]  # too far apart
    assert plan_requests([(0, 80), (90, 170), (175, 255)], 10, 0.05) == [(0, 80), (90, 255)]  # only the narrowest gap
    half = [(at, at + 5000) for at in range(0, 1_000_000, 10_000)]  # every other tile
    read = sum(stop - start for start, stop in plan_requests(half, 32 << 10, 1 / 16))
    assert 500_000 <= read <= 500_000 * 17 / 16
    big = [(0, REQUEST_NBYTES - 1), (REQUEST_NBYTES - 1, REQUEST_NBYTES + 1), (REQUEST_NBYTES + 1, REQUEST_NBYTES + 2)]
    assert plan_requests(big, 0, 0) == [big[0], (REQUEST_NBYTES - 1, REQUEST_NBYTES + 2)]


@settings(max_examples=200)
@given(ranges=st.lists(bounds.filter(lambda pair: pair[0] < pair[1]), max_size=30), gap=gaps, spare=st.floats(0, 2))
def test_a_plan_covers_every_range_once(ranges: list[tuple[int, int]], gap: int, spare: float) -> None:
    requests = plan_requests(ranges, gap, spare)
    wanted, read = np.zeros(len(DATA), bool), np.zeros(len(DATA), int)
    for start, stop in ranges:
        wanted[start:stop] = True
        assert any(a <= start and stop <= b for a, b in requests)
    for start, stop in requests:
        read[start:stop] += 1
    assert read.max(initial=0) <= 1
    assert read.sum() - wanted.sum() <= spare * wanted.sum()
    assert requests == sorted(requests)


def test_large_ranges_go_by_several_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More neighbours than one request takes are read at the same time."""
    store = pulse.open_store("memory://")
    assert isinstance(store, ObjectStore)
    together, read = threading.Barrier(3), store.read_range

    def waiting(name: str, start: int, stop: int) -> memoryview:
        together.wait(10)  # raises unless three requests run at once
        return read(name, start, stop)

    data = np.random.default_rng(1).bytes(3 * REQUEST_NBYTES)
    store.put("x", data)
    monkeypatch.setattr(store, "read_range", waiting)
    tiles = [(at, at + (1 << 20)) for at in range(0, len(data), 1 << 20)]
    assert b"".join(read_ranges(store, "x", tiles)) == data
