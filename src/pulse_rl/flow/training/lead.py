"""What rank 0 does for all trainers of a policy: it publishes versions and writes the metrics.

Rollout workers learn about new weights only by the patches published here. Versions only increase: steps between the
last checkpoint and a crash are repeated under new versions. A round's line of metrics is written before the checkpoint
that includes its steps, so no line is ever missing.
"""

import time
from typing import Any

from pulse_rl.errors import PulseError
from pulse_rl.flow.recipe import Recipe
from pulse_rl.flow.training.calls import PolicyCalls
from pulse_rl.flow.training.exchange import Weights
from pulse_rl.rl import metrics, model
from pulse_rl.sync.publish.publisher import Publisher
from pulse_rl.sync.reports import PublishReport
from pulse_rl.weights.digests import digest
from pulse_rl.weights.layout import layout

CAST = "bfloat16"  # the dtype that rollout workers hold


class Lead:
    """The publishing and bookkeeping of a policy. `begin`, then `end_round` after each round, then `end`.

    Each is given the weights that all trainers share then, to be published.

    loaded: the model that is trained. resumed: whether the policy has begun before.
    """

    def __init__(self, recipe: Recipe, name: str, calls: PolicyCalls, loaded: model.Loaded, *, resumed: bool) -> None:
        self.version = 0  # the newest one published
        self._policy = recipe.policies[name]
        self._files = recipe.files(name)
        self._calls = calls
        self._resumed = resumed
        self._publisher = Publisher(
            recipe.store_url(name),
            anchor_every=1 if self._policy.sync == "full" else self._policy.anchor_every,
            codec=self._policy.codec,  # type: ignore[arg-type]  # Publisher checks it
            cast=CAST,
        )
        self._assets = model.assets(loaded)
        self._dropped = 0  # groups, until the last round

    def begin(self, step: int, weights: Weights) -> None:
        """Publish the version with which the policy starts, unless the history already ends with these weights.

        From here on the policy has begun: its metrics are written, and end at `step`.
        """
        newest, damage = self._newest_version()
        metrics.cut_back(self._files, step)
        if newest is not None and damage is None and _digest(weights) == self._publisher.digest:
            self.version = newest
        else:
            self.version = 0 if newest is None else self._version_after(newest, step)
            try:
                self._publish(weights, anchor=damage is not None)
            except BaseException:
                if not self._resumed:
                    metrics.remove(self._files)  # nothing was published: another run may use the directory
                raise
        if damage is not None:
            note = f"the history is damaged: {damage}; version {self.version} is a full checkpoint that gets past it"
            self._calls.report({"note": note})
        self._calls.begin(step, self.version)
        self._announce(step)

    def end_round(self, step: int, weights: Weights, record: dict[str, Any], started: float) -> None:
        """Publish the weights after a round and write its line of metrics.

        step: the round's last. record: of all trainers, merged. started: when the round began, by time.perf_counter.
        """
        self.version = self._version_after(self.version, step)
        report = self._publish(weights)
        self._announce(step)
        seconds = {name: record.pop(name) for name in ("wait_s", "train_s")}
        seconds["total_s"] = time.perf_counter() - started
        head = {"step": step, "version": self.version}
        line = head | record | self._published(report) | seconds | self._workers()
        metrics.append(self._files, line)

    def end(self, step: int, weights: Weights) -> dict[str, Any]:
        """No batch is needed any more; return the final version, digest and step."""
        final = {"version": self.version, "digest": _digest(weights), "step": step}
        if self._policy.trained:
            self._calls.finish()
        return final

    def _newest_version(self) -> tuple[int | None, str | None]:
        """The newest version of the history, and what is damaged there; None and None for an empty history.

        Raises PulseError if a new run is to begin on a damaged history.
        """
        try:
            return self._publisher.resume(), None
        except PulseError as error:
            if not self._resumed:
                raise
            _, head = self._publisher.history.end()
            return head.version if head else None, str(error)

    def _version_after(self, version: int, step: int) -> int:
        """The next version: the number of rounds done, or one more than the last version where that is higher."""
        return max(version + 1, step // self._policy.round_steps)

    def _publish(self, weights: Weights, *, anchor: bool = False) -> PublishReport:
        if self._policy.codec == "auto":  # for the slowest link that rollout workers have measured so far
            links = [held["bandwidth"] for held in self._calls.workers().values() if held.get("bandwidth")]
            self._publisher.bandwidth = min(links, default=None)
        return self._publisher.publish(weights, version=self.version, anchor=anchor, assets=self._assets)

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
            "codec": report.codec,
            "codec_reason": report.codec_reason,
            "publish_s": report.total_s,
        }

    def _workers(self) -> dict[str, Any]:
        """The version of each rollout worker, and the groups dropped since the last round."""
        before, self._dropped = self._dropped, self._calls.dropped()
        workers = {name: held.get("version") for name, held in self._calls.workers().items()}
        return {"dropped_chunks": self._dropped - before, "workers": workers}

    def _announce(self, step: int) -> None:
        """Tell of the version that was published, with so many steps."""
        digest = str(self._publisher.digest)
        if self._policy.trained:
            self._calls.publish(self.version, digest, step)
        self._calls.report({"version": self.version, "digest": digest})


def _digest(weights: Weights) -> str:
    """The digest of the masters' BF16 cast, computed in full."""
    return digest(layout(weights, CAST))
