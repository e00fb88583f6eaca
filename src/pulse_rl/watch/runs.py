"""The measurements of a run: from its records and from what its workers say, as its driver reads both.

Trainers and workers are separate processes. The driver receives their reports, and so it alone exports them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pulse_rl.watch.measurements import Labels, Measurement, run_name


class _Synced(NamedTuple):
    """What a worker had synced when it was looked at last."""

    syncs: int = 0
    nbytes: int = 0
    version: int | None = None


class RunMeter:
    """Turns the records of a run, and the facts of its workers, into measurements.

    stores: the store of each policy, whose URL is the label `run`.
    """

    def __init__(self, stores: Mapping[str, str]) -> None:
        self._runs = {name: run_name(url) for name, url in stores.items()}
        self._seen: dict[tuple[str, str], _Synced] = {}  # by worker and policy
        self._left: set[str] = set()  # workers, which are behind nothing any more
        self._times: dict[str, dict[int, float]] = {name: {} for name in stores}  # when each version was seen first
        self._codecs: dict[str, str] = {}

    def measure(self, records: Sequence[Mapping[str, Any]], board: Mapping[str, Any]) -> Iterator[Measurement]:
        """The measurements since the last call. records: those since then, each with its `policy`."""
        for record in records:
            yield from self._published(record)
        for worker, facts in board.items():
            for policy, held in facts.get("policies", {}).items():
                if policy in self._runs:
                    yield from self._held(worker, policy, held, left=facts.get("left", False))

    def _published(self, record: Mapping[str, Any]) -> Iterator[Measurement]:
        policy, codec = record["policy"], record["codec"] or "anchor"
        labels = Labels(self._runs[policy], worker="publisher")
        self._times[policy][record["version"]] = time.time()
        self._codecs[policy] = codec
        yield Measurement("pulse_version", labels, record["version"])
        yield Measurement("pulse_changed_ratio", labels, record["density"])
        for name in ("reward", "loss", "staleness"):
            yield Measurement(f"pulse_run_{name}", labels, record[name])
        yield Measurement("pulse_payload_bytes_total", labels, record["patch_nbytes"], codec)
        for phase, spent in record.get("phases", {}).items():
            yield Measurement("pulse_phase_seconds", labels, spent, phase)
        for rank, nbytes in enumerate(record.get("trainer_sync", {}).get("sent_nbytes", ())):
            trainer = Labels(self._runs[policy], worker=f"trainer-{rank}")
            yield Measurement("pulse_payload_bytes_total", trainer, nbytes, record["trainer_sync"]["mode"])

    def _held(self, worker: str, policy: str, held: Mapping[str, Any], *, left: bool) -> Iterator[Measurement]:
        """What a worker holds of a policy, and what it has read since it was looked at last."""
        labels = Labels(self._runs[policy], worker=worker)
        before = self._seen.get((worker, policy), _Synced())
        if held["syncs"] < before.syncs:  # it was started again
            before = _Synced()
        now = _Synced(held["syncs"], held["fetched_nbytes"], held["version"])
        self._seen[worker, policy] = now
        if now.version is None:
            return
        if now != before:
            yield Measurement("pulse_version", labels, now.version)
            if now.nbytes > before.nbytes:
                codec = self._codecs.get(policy, "anchor") if before.syncs else "anchor"  # a worker begins with one
                yield Measurement("pulse_payload_bytes_total", labels, now.nbytes - before.nbytes, codec)
            yield Measurement("pulse_last_applied_timestamp_seconds", labels, time.time())
            for phase, spent in held.get("phases", {}).items():
                yield Measurement("pulse_phase_seconds", labels, spent, phase)
        (self._left.add if left else self._left.discard)(worker)
        newer = {version: since for version, since in self._times[policy].items() if version > now.version and not left}
        yield Measurement("pulse_lag_versions", labels, len(newer))
        yield Measurement("pulse_lag_seconds", labels, min(newer.values(), default=float("inf")))
        there = [one.version for (who, name), one in self._seen.items() if name == policy and who not in self._left]
        oldest = min((version for version in there if version is not None), default=0)
        for version in [version for version in self._times[policy] if version < oldest]:
            del self._times[policy][version]
