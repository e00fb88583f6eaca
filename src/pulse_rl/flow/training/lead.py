"""What rank 0 does for all trainers of a policy: it keeps the books of a run, and tells the Dataflow of versions.

A round's line of metrics is written before the checkpoint that includes its steps, so no line is ever missing.
"""

import time
from typing import Any

import msgspec

from pulse_rl import PublishReport
from pulse_rl.flow import metrics
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.group import Weights
from pulse_rl.flow.training.versions import PolicyHistory
from pulse_rl.logs import logger
from pulse_rl.watch.measurements import phases_of

log = logger(__name__)


class Lead:
    """The publishing and bookkeeping of a policy. `begin`, then `end_round` after each round, then `end`.

    Each is given the weights that all trainers share then, to be published.

    resumed: whether the policy has begun before.
    """

    def __init__(
        self, recipe: Recipe, name: str, calls: PolicyCalls, versions: PolicyHistory, *, resumed: bool
    ) -> None:
        self._policy = recipe.policies[name]
        self._files = recipe.files(name)
        self._calls = calls
        self._versions = versions
        self._resumed = resumed
        self._dropped = 0  # groups, until the last round

    @property
    def version(self) -> int:
        """The newest one published."""
        return self._versions.newest

    def begin(self, step: int, weights: Weights) -> None:
        """Publish the version with which the policy starts, if need be.

        From here on the policy has begun: its metrics are written, and end at `step`.
        """
        damage = self._versions.resume()
        metrics.cut_back(self._files, step)
        try:
            self._versions.begin(step, weights)
        except BaseException:
            if not self._resumed:
                metrics.remove(self._files)  # nothing was published: another run may use the directory
            raise
        if damage is not None:
            past = f"version {self.version} is a full checkpoint that gets past it"
            log.warning("the history is damaged: %s; %s", damage, past)
        self._calls.begin(step, self.version)
        if self._policy.trained:
            self._dropped = self._calls.dropped()
        self._announce(step)

    def end_round(self, step: int, weights: Weights, record: dict[str, Any], started: float) -> None:
        """Publish the weights after a round and write its line of metrics.

        step: the round's last. record: of all trainers, merged. started: when the round began, by time.perf_counter.
        """
        report = self._versions.publish(step, weights, bandwidth=self._bandwidth())
        self._announce(step)
        seconds = {name: record.pop(name) for name in ("wait_s", "train_s")}
        seconds["total_s"] = time.perf_counter() - started
        head = {"step": step, "version": self.version}
        line = head | record | self._published(report) | seconds | self._workers()
        metrics.append(self._files, line)

    def end(self, step: int, weights: Weights) -> dict[str, Any]:
        """No batch is needed any more; return the final version, digest and step."""
        final = {"version": self.version, "digest": self._versions.digest_of(weights), "step": step}
        if self._policy.trained:
            self._calls.finish()
        return final

    def _bandwidth(self) -> float | None:
        """Of the slowest link that rollout workers have measured so far, bits per second; codec="auto" asks for it."""
        if self._policy.codec != "auto":
            return None
        links = [held["bandwidth"] for held in self._calls.workers().values() if held.get("bandwidth")]
        return min(links, default=None)

    def _published(self, report: PublishReport) -> dict[str, Any]:
        # With full weights, workers read the anchor.
        nbytes = report.anchor_nbytes if self._policy.sync == "full" else report.patch_nbytes
        return {
            "elements": report.elements,
            "changes": report.changes,
            "density": report.density,
            "full_nbytes": report.full_nbytes,
            "patch_nbytes": nbytes,
            "reduction": report.full_nbytes / nbytes,
            "nonfinite": report.nonfinite,
            "codec": report.codec,
            "codec_reason": report.codec_reason,
            "publish_s": report.total_s,
            "phases": phases_of(report),
            "views": [msgspec.structs.asdict(view.info(name)) for name, view in sorted(report.views.items())],
        }

    def _workers(self) -> dict[str, Any]:
        """The version of each rollout worker, and the groups dropped since the last round."""
        before, self._dropped = self._dropped, self._calls.dropped()
        workers = {name: held.get("version") for name, held in self._calls.workers().items()}
        return {"dropped_chunks": self._dropped - before, "workers": workers}

    def _announce(self, step: int) -> None:
        """Tell of the version that was published, with so many steps."""
        digest = self._versions.digest
        if self._policy.trained:
            self._calls.publish(self.version, digest, step)
        self._calls.report({"version": self.version, "digest": digest})
