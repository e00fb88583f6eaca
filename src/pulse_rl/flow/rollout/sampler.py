"""What a rollout worker samples with: live weights that follow the run's history, and completions sampled from them.

The built-in one is here, a model of Transformers in the worker's own process. `vllm_sampler` is the other.
"""

from typing import Any, NamedTuple, Protocol

import torch

from pulse_rl import Staged, Subscriber
from pulse_rl.flow import model, policy, quantised
from pulse_rl.sync.freed import keep_freed
from pulse_rl.watch.measurements import phases_of
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.view import View


class SamplerSettings(NamedTuple):
    """What a sampler needs to know of a run."""

    store_url: str  # of the history that it follows
    threads: int = 1  # of torch
    sync: str = "patch"  # or "full": a full checkpoint per version
    seed: int = 0
    view: str | None = None  # which is followed in place of the weights
    form: View | None = None  # its form


class Reached(NamedTuple):
    """A version that the live weights were brought to, and what that took."""

    version: int
    digest: str  # counted over the live weights
    route: str
    fetched_nbytes: int
    seconds: float
    bandwidth: float | None  # bits per second; None where too little was read to measure it
    phases: dict[str, float]  # seconds of each, as metrics name them


class Sampler(Protocol):
    """Live weights and what samples from them."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def version(self) -> int | None:
        """The version that the weights are proved to hold."""

    def stage(self, version: int) -> None:
        """Fetch and prove a version without touching a weight; `sample` may go on in another thread.

        The next `follow` to that version then only writes it. Raises PulseError.
        """

    def follow(self, version: int) -> Reached:
        """Bring the weights to a version and count their digest. Raises PulseError."""

    def verify(self) -> str:
        """Count the digest of the live weights once more. Raises PulseError if it is not the version's."""

    def sample(self, ids: torch.Tensor, mask: torch.Tensor, seed: int, how: policy.How) -> policy.Completions:
        """Sample the completions of prompts. ids, mask: (P, L) int64, padded on the left."""


class BuiltinSampler:
    """A model of Transformers, in this process.

    assets: from which the model is built. name: of the worker, for heartbeats.
    """

    def __init__(self, name: str, config: SamplerSettings, assets: dict[str, bytes]) -> None:
        keep_freed()  # each token allocates what the one before it did
        self._name, self._config = name, config
        self._model, self.tokenizer = model.build(assets)
        self.subscriber = Subscriber(config.store_url, heartbeat=name, view=config.view)
        # What follows the history: the model, or the codes and scales that its weights are made of.
        self._live: Any = self._model if config.form is None else self.subscriber.allocate()
        self._staged: Staged | None = None

    @property
    def version(self) -> int | None:
        return self.subscriber.version

    def stage(self, version: int) -> None:
        if self.version is not None and self._config.sync == "patch":
            self._drop_staged()
            self._staged = self.subscriber.stage(self._live, version=version)

    def follow(self, version: int) -> Reached:
        if self._config.sync == "full":
            # A new subscriber reads the version's full checkpoint, unless it recognises what the weights hold.
            self.subscriber = Subscriber(self._config.store_url, heartbeat=self._name)
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.zero_()
        if self._staged is not None and self._staged.version == version:
            report = self._staged.apply()
            self._staged = None
        else:
            self._drop_staged()
            report = self.subscriber.sync(self._live, version=version)
        if self._config.form is not None:
            quantised.write(self._live, ViewFormat(self._config.form), self._model)
        # After an anchor, sync itself has just computed this digest from the live bits.
        from_anchor = report.route == "anchor"
        digest = report.digest if from_anchor else self.verify()
        return Reached(
            version=report.version,
            digest=digest,
            route=report.route,
            fetched_nbytes=report.fetched_nbytes,
            seconds=report.total_s,
            # An anchor is so large that latency does not count.
            bandwidth=8 * report.fetched_nbytes / report.fetch_s if from_anchor and report.fetch_s else None,
            phases=phases_of(report),
        )

    def verify(self) -> str:
        return self.subscriber.verify(self._live)

    def sample(self, ids: torch.Tensor, mask: torch.Tensor, seed: int, how: policy.How) -> policy.Completions:
        return policy.sample(self._model, ids, mask, how, torch.Generator().manual_seed(seed))

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.discard()
            self._staged = None
