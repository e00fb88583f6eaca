"""The versions that a policy's trainers publish: rank 0 alone, or all of them together where each holds a share.

Rollout workers learn about new weights only from here. Versions only increase: steps between the last checkpoint and a
crash are repeated under new versions.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pulse_rl import Publisher, PublishReport, digest
from pulse_rl.errors import PulseError
from pulse_rl.flow.recipe import PolicyRecipe
from pulse_rl.flow.training.group import Weights
from pulse_rl.flow.training.sharded import shared_digest
from pulse_rl.group.collectives import Group
from pulse_rl.weights.layout import layout
from pulse_rl.weights.views.view import View

CAST = "bfloat16"  # the dtype that rollout workers hold


class PolicyHistory:
    """A policy's history, as it is published. `resume`, then `begin`, then `publish` after each round.

    assets: the files beside the weights. views: to publish beside them. resumed: whether the policy has begun before.
    Where the trainers hold shares, every method is collective.
    """

    def __init__(
        self, policy: PolicyRecipe, url: str, assets: dict[str, bytes], views: Mapping[str, View], *, resumed: bool
    ) -> None:
        self.newest = 0  # the newest version published
        self.digest = ""  # of it
        self._policy = policy
        self._views = views
        self._resumed = resumed
        self._group = Group.of() if policy.sharded else None
        self._publisher = Publisher(
            url,
            anchor_every=1 if policy.sync == "full" else policy.anchor_every,
            codec=policy.codec,  # type: ignore[arg-type]  # Publisher checks it
            cast=CAST,
            views=views,
            group=dist.group.WORLD if policy.sharded else None,
        )
        self._assets = assets
        self._found: int | None = None
        self._damage: str | None = None

    def resume(self) -> str | None:
        """Find the newest version of the history. Returns what is damaged there, if anything is.

        Raises PulseError if a new run is to begin on a damaged history.
        """
        try:
            self._found = self._publisher.resume()
        except PulseError as error:
            if not self._resumed:
                raise
            _, head = self._publisher.history.end()
            self._found, self._damage = head.version if head else None, str(error)
        return self._damage

    def begin(self, step: int, weights: Weights) -> None:
        """Publish the version with which the policy starts, unless the history already ends with these weights.

        Where the history is damaged, it is a full checkpoint. Raises BaseMismatchError if a view has another form now.
        """
        head = None if self._damage else self._publisher.history.head()
        if head is not None and self._has(head, weights):
            self.newest, self.digest = head.version, head.digest
        else:
            self.newest = 0 if self._found is None else self._after(self._found, step)
            self._publish(step, weights, anchor=self._damage is not None)

    def publish(self, step: int, weights: Weights, *, bandwidth: float | None = None) -> PublishReport:
        """Publish the weights after a round. step: its last. bandwidth: of the slowest link known, bits per second."""
        self._publisher.bandwidth = bandwidth
        self.newest = self._after(self.newest, step)
        return self._publish(step, weights)

    def digest_of(self, weights: Weights) -> str:
        """The digest of the masters' BF16 cast, computed in full."""
        if self._group:
            return shared_digest(self._group, weights, CAST)
        return digest(layout(weights, CAST))

    def _has(self, head: Any, weights: Weights) -> bool:
        """Whether a version has these weights in all views. A run that is resumed may have a new view."""
        held = {name: entry.form for name, entry in head.views.items()}
        same = all(held.get(name) == repr(view) for name, view in self._views.items())
        return self.digest_of(weights) == head.digest and same

    def _after(self, version: int, step: int) -> int:
        """The next version: the number of rounds done, or one more than the last version where that is higher."""
        return max(version + 1, step // self._policy.round_steps)

    def _publish(self, step: int, weights: Weights, **options: Any) -> PublishReport:
        noted = {"step": step}  # after a crash versions go on, and steps are repeated
        report = self._publisher.publish(weights, version=self.newest, assets=self._assets, metadata=noted, **options)
        self.digest = report.digest
        return report
