"""Measurements: what reports say, under the names and labels that every exporter uses. Nothing is measured here.

Reports are known by the names of their classes, and who tells them by what it has: whoever exports loads neither
kernels nor torch.

A label that does not apply is empty. `run` is the store's URL, or what whoever exports calls the run; `worker` is a
process that holds weights, or "publisher"; `engine` is an inference engine's address. No label is a version.
"""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

from pulse_rl.engines.states import BUSY, EngineState, Failure

# An "age" is a gauge of which the value is when something began: what is exported is the time since then.
Kind: TypeAlias = Literal["gauge", "counter", "histogram", "age"]
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REMEMBERED = 4096  # versions of a run, of which lags are counted


class Metric(NamedTuple):
    """What a name stands for."""

    kind: Kind
    about: str
    label: str = ""  # one more than run, engine and worker
    unit: str = ""


METRICS = {
    "pulse_version": Metric("gauge", "The version that is held, proved; of a publisher, the one committed last."),
    "pulse_lag_versions": Metric("gauge", "How many versions of the history are newer than the one that is held."),
    "pulse_lag_seconds": Metric(
        "age", "Seconds since the first version that is newer than the one held was committed; 0 for none.", unit="s"
    ),
    "pulse_phase_seconds": Metric("histogram", "Seconds of one phase of a publish or an update.", "phase", "s"),
    "pulse_payload_bytes_total": Metric("counter", "Bytes sent by a publisher, or read by a receiver.", "codec", "By"),
    "pulse_changed_ratio": Metric("gauge", "Elements that changed / elements, of the last version."),
    "pulse_failures_total": Metric("counter", "Calls that ended in an error, by its class.", "kind"),
    "pulse_paused": Metric("gauge", "1 while generation is paused."),
    "pulse_last_applied_timestamp_seconds": Metric(
        "gauge", "When weights were last brought to a version, in seconds since 1970.", unit="s"
    ),
    "pulse_run_reward": Metric("gauge", "Mean reward of the completions that the newest version of a run was made of."),
    "pulse_run_loss": Metric("gauge", "Loss of the step that made the newest version of a run."),
    "pulse_run_staleness": Metric("gauge", "How many versions old the weights were that made its completions, mean."),
    "pulse_alarm": Metric("gauge", "1 while this alarm is raised.", "alarm"),
    "pulse_verdict": Metric("gauge", "1 for the verdict of a store, or of a subscriber.", "verdict"),
    "pulse_store_readable": Metric("gauge", "1 where the store could be read, else 0."),
    "pulse_store_versions": Metric("gauge", "Versions that the store holds."),
    "pulse_store_bytes": Metric("gauge", "Bytes of the store's objects.", "folder", "By"),
    "pulse_last_version_timestamp_seconds": Metric(
        "gauge", "When the newest version was written, in seconds since 1970 by the store's clock.", unit="s"
    ),
}
_PHASES: dict[str, dict[str, tuple[str, ...]]] = {  # of each report: phase → the fields that add up to it
    "PublishReport": {
        "find": ("cast_s", "diff_s"),
        "code": ("encode_s",),
        "put": ("put_s",),
        "prove": ("prove_s",),
    },
    "SyncReport": {"fetch": ("fetch_s",), "decode": ("decode_s",), "apply": ("apply_s",), "prove": ("prove_s",)},
    "EngineReport": {"stage": ("stage_s",), "drain": ("drain_s",), "apply": ("apply_s",)},
    "ChannelReport": {
        "find": ("find_s",),
        "code": ("encode_s",),
        "put": ("exchange_s",),
        "prove": ("prove_s",),
        "apply": ("write_s",),
    },
    "LocoReport": {
        "find": ("gate_s",),
        "code": ("encode_s",),
        "put": ("exchange_s",),
        "decode": ("decode_s",),
        "apply": ("outer_s",),
    },
}


class Labels(NamedTuple):
    """Of whom something was measured."""

    run: str = ""
    engine: str = ""
    worker: str = ""


class Measurement(NamedTuple):
    """One number. of: the value of the metric's own label; empty without one."""

    name: str
    labels: Labels
    value: float
    of: str = ""


class _Version(NamedTuple):
    """A version of a run, as its manifest says."""

    history: str | None
    sequence: int
    created: float
    codec: str | None


class Meter:
    """Turns what is told into measurements. Safe to call from several threads.

    run, worker: what to call them instead of the store's URL, and of a subscriber's heartbeat or "subscriber".
    """

    def __init__(self, run: str | None = None, worker: str | None = None) -> None:
        self._run, self._worker = run, worker
        self._lock = threading.Lock()
        self._versions: dict[str, dict[int, _Version]] = {}  # of each run, by version, the newest last
        self._held: dict[Labels, int] = {}
        self._stores: dict[str, str] = {}  # of each engine, by its address

    def measure(self, source: object, found: object) -> list[Measurement]:
        """The measurements of what a source told; none of what nobody counts."""
        with self._lock:
            if (store := getattr(source, "store", None)) is not None:  # a history: the newest version that was read
                return list(self._newest(self._run_of(store.url), found))
            labels = self._labels(source, found)
            if isinstance(found, EngineState):
                return list(self._state(labels, found))
            return list(self._numbers(labels, found))

    def _run_of(self, url: str) -> str:
        return run_name(url) if self._run is None else self._run

    def _labels(self, source: object, found: object) -> Labels:
        if (history := getattr(source, "history", None)) is not None:
            run = self._run_of(history.store.url)
            if not hasattr(source, "heartbeat"):
                return Labels(run, worker="publisher")
            return Labels(run, worker=self._worker or source.heartbeat or "subscriber")
        if isinstance(url := getattr(source, "url", None), str):  # an engine: its client, or its service
            if isinstance(found, EngineState) and found.follow is not None:
                self._stores[url] = found.follow.store
            return Labels(self._run_of(self._stores.get(url, "")), engine=url.partition("://")[2] or url)
        kind = "trainer" if hasattr(source, "outer_lr") else "rank"
        return Labels(self._run or "", worker=self._worker or f"{kind}-{getattr(source, 'rank', 0)}")

    def _numbers(self, labels: Labels, found: Any) -> Iterator[Measurement]:
        """What one report, or error, says."""
        report = type(found).__name__
        if isinstance(found, Failure | Exception):
            kind = found.kind if isinstance(found, Failure) else getattr(found, "kind", None) or report
            if kind != BUSY:
                yield Measurement("pulse_failures_total", labels, 1, kind)
            return
        if report not in _PHASES:
            return
        for phase, spent in phases_of(found).items():
            yield Measurement("pulse_phase_seconds", labels, spent, phase)
        if report != "EngineReport":
            yield Measurement("pulse_changed_ratio", labels, found.density)
        for codec, nbytes in self._payload(labels, found).items():
            if nbytes:
                yield Measurement("pulse_payload_bytes_total", labels, nbytes, codec)
        if report == "PublishReport":
            yield Measurement("pulse_version", labels, found.version)
        elif report == "LocoReport":
            yield Measurement("pulse_version", labels, found.round)
            yield Measurement("pulse_last_applied_timestamp_seconds", labels, time.time())
        else:
            yield from self._holds(labels, found.version, applied=report != "ChannelReport" or found.sent != "none")

    def _payload(self, labels: Labels, found: Any) -> dict[str, int]:
        """The bytes that were sent or read, by what coded them: "anchor" for all bits."""
        report = type(found).__name__
        if report == "PublishReport":
            return {found.codec or "": found.patch_nbytes, "anchor": found.anchor_nbytes}
        if report == "ChannelReport":
            return {"anchor" if found.sent == "dense" else found.codec or "": found.sent_nbytes}
        if report == "LocoReport":
            return {found.exchange: found.sent_nbytes}
        version = self._versions.get(labels.run, {}).get(found.version)
        codec = version.codec if found.route == "patches" and version and version.codec else found.route
        return {codec: found.fetched_nbytes}

    def _state(self, labels: Labels, found: EngineState) -> Iterator[Measurement]:
        yield Measurement("pulse_paused", labels, found.paused)
        if found.version is not None:
            yield from self._holds(labels, found.version)

    def _holds(self, labels: Labels, version: int, *, applied: bool = False) -> Iterator[Measurement]:
        """What follows from the version that somebody holds now. applied: whether it was brought there just now."""
        self._held[labels] = version
        yield Measurement("pulse_version", labels, version)
        if applied:
            yield Measurement("pulse_last_applied_timestamp_seconds", labels, time.time())
        yield from self._lag(labels)

    def _newest(self, run: str, manifest: object) -> Iterator[Measurement]:
        """Note a version that was read, and say how far it leaves everybody behind who follows its run."""
        version, sequence = getattr(manifest, "version", None), getattr(manifest, "sequence", None)
        known = self._versions.setdefault(run, {})
        if version is None or sequence is None:
            return
        history, patch = getattr(manifest, "history", None), getattr(manifest, "patch", None)
        if any(one.history != history for one in list(known.values())[-1:]):  # it was begun anew, from version 0
            known.clear()
            self._held = {labels: held for labels, held in self._held.items() if labels.run != run}
        if version in known:
            return
        known[version] = _Version(history, sequence, getattr(manifest, "created", 0.0), patch.codec if patch else None)
        if len(known) > 1 and sequence < max(one.sequence for one in list(known.values())[-2:]):  # an older one
            known = self._versions[run] = dict(sorted(known.items(), key=lambda item: item[1].sequence))
        while len(known) > REMEMBERED:
            del known[next(iter(known))]
        for labels in [one for one in self._held if one.run == run]:
            yield from self._lag(labels)

    def _lag(self, labels: Labels) -> Iterator[Measurement]:
        known = self._versions.get(labels.run, {})
        held = known.get(self._held[labels])
        if held is None:
            return
        newest, since = held.sequence, float("inf")
        for one in reversed(known.values()):
            if one.sequence <= held.sequence:
                break
            newest, since = max(newest, one.sequence), one.created
        yield Measurement("pulse_lag_versions", labels, newest - held.sequence)
        yield Measurement("pulse_lag_seconds", labels, since)


def run_name(url: str) -> str:
    """A store's URL as the value of a label: a path without its scheme, and no secret."""
    return re.sub(r"//[^/@]*@", "//", url.removeprefix("file://"))


def phases_of(report: object) -> dict[str, float]:
    """The seconds of each phase of a report that took any."""
    parts = _PHASES[type(report).__name__]
    spent = {phase: sum(getattr(report, name) for name in names) for phase, names in parts.items()}
    return {phase: seconds for phase, seconds in spent.items() if seconds > 0}
