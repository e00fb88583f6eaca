"""The first trainer, or the only one: it publishes for all, and keeps the run's metrics.

Between versions the only thing that goes from the trainers to the rollout workers is a patch. Versions of the history
only ever go up, so the steps between the last checkpoint and a crash are done again under new versions. A line of
metrics is written before the checkpoint that holds its steps, so that none is ever missing.
"""

import time
from typing import Any

from pulse_rl.errors import PulseError
from pulse_rl.rl import config as settings
from pulse_rl.rl import metrics, model
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig
from pulse_rl.rl.trainer import Trainer
from pulse_rl.sync.publisher import Publisher
from pulse_rl.sync.reports import PublishReport
from pulse_rl.weights.digests import digest
from pulse_rl.weights.layout import layout

CAST = "bfloat16"  # what rollout workers hold


class LeadTrainer(Trainer):
    """A trainer whose weights become versions."""

    def __init__(self, config: RunConfig, buffer: DataBuffer, resume: bool = False, rank: int = 0) -> None:
        self._publisher = Publisher(
            config.store_url,
            anchor_every=1 if config.sync == "full" else config.anchor_every,
            codec=config.codec,  # type: ignore[arg-type]  # Publisher checks it
            cast=CAST,
        )
        self._dropped = 0  # chunks, up to the last step
        super().__init__(config, buffer, resume, rank)

    def _loaded(self, loaded: model.Loaded) -> None:
        self._assets = model.assets(loaded)
        self._buffer.offer_assets(self._assets)

    def _begin(self) -> None:
        """Publish the version that the run starts from, if the history does not end with it.

        From here on the run can be resumed: its settings are written, and metrics end where it goes on.
        """
        damage = None
        try:
            held = self._publisher.resume()
        except PulseError as error:
            if not self._resume:
                raise
            damage, (_, head) = str(error), self._publisher.history.end()
            held = head.version if head else None
        self._version = 0 if held is None else max(held + 1, self._rounds)
        metrics.cut_back(self._config.directory, self._step)
        settings.save(self._config)
        if damage is None and held is not None and self._digest() == self._publisher.digest:
            self._version = held  # resumed exactly where the history ends
        else:
            try:
                self._publish(anchor=damage is not None)
            except BaseException:
                if not self._resume:  # nothing has begun: the directory is free for another attempt
                    settings.remove(self._config)
                raise
        if damage is not None:
            note = f"the history is damaged: {damage}; version {self._version} is a full checkpoint that gets past it"
            self._buffer.report("trainer", {"note": note})
        self._facts()

    def _open(self) -> None:
        self._buffer.begin_step(self._rounds, self._version)

    def _close(self, record: dict[str, Any], started: float) -> None:
        """Publish what the round has led to and tell of it."""
        self._version = max(self._version + 1, self._rounds)
        report = self._publish()
        self._facts()
        seconds = {name: record.pop(name) for name in ("wait_s", "train_s")}
        seconds["total_s"] = time.perf_counter() - started
        head = {"step": self._step, "version": self._version}
        record = head | record | self._sent(report) | seconds | self._others()
        metrics.append(self._config.directory, record)
        self._buffer.log(record)

    def _end(self) -> dict[str, Any]:
        final = {"version": self._version, "digest": self._digest(), "step": self._step}
        self._buffer.report("trainer", {"final_version": self._version})
        self._buffer.end()
        return final

    def _publish(self, *, anchor: bool = False) -> PublishReport:
        if self._config.codec == "auto":  # by the slowest of the links that rollout workers have seen so far
            links = [facts["bandwidth"] for facts in self._buffer.board().values() if facts.get("bandwidth")]
            self._publisher.bandwidth = min(links, default=None)
        return self._publisher.publish(self._model, version=self._version, anchor=anchor, assets=self._assets)

    def _sent(self, report: PublishReport) -> dict[str, Any]:
        # In a full-weight run it is the checkpoint that workers read.
        nbytes = report.anchor_nbytes if self._config.sync == "full" else report.patch_nbytes
        return {
            "elements": report.elements,
            "changes": report.changes,
            "density": report.density,
            "full_nbytes": report.full_nbytes,
            "patch_nbytes": nbytes,
            "reduction": report.full_nbytes / nbytes,
            "codec": report.codec,
            "choice": report.choice,
            "publish_s": report.total_s,
        }

    def _others(self) -> dict[str, Any]:
        """What the other actors did meanwhile: the version of each rollout worker, chunks dropped as stale."""
        before, self._dropped = self._dropped, self._buffer.dropped_chunks()
        workers = {name: facts.get("version") for name, facts in self._buffer.board().items() if name != "trainer"}
        return {"dropped_chunks": self._dropped - before, "workers": workers}

    def _facts(self) -> None:
        self._buffer.report("trainer", {"version": self._version, "digest": self._publisher.digest})

    def _digest(self) -> str:
        """The digest of the live masters' BF16 cast, counted in full."""
        return digest(layout(self._model, CAST))
