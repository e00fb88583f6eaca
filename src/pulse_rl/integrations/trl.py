"""TRL's trainers bring their weights to vLLM servers that follow, which pause for the write of what changed alone.

    transfer = PulseWeightTransfer("s3://bucket/run", ["http://gpu-1:8000"])
    trainer = AsyncGRPOTrainer(…, weight_transfer=transfer)

    trl.generation.vllm_generation.VLLMClient = vllm_client(transfer)     # before a GRPOTrainer in server mode is made

TRL hands out whole tensors, one at a time, on rank 0. Each sync is a version: it is published, staged by all engines
while they generate, and then written, and TRL goes on when all hold it. TRL passes no version: they are counted, after
the history's newest, and `trainer` lets the trainer's step be noted of each. The attributes that are used are those of
TRL 1.16, which need not be imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pulse_rl.errors import require
from pulse_rl.integrations.delivery import EngineDelivery
from pulse_rl.integrations.steps import scalars


class PulseWeightTransfer(EngineDelivery):
    """An `EngineDelivery` as the `weight_transfer` of TRL's `AsyncGRPOTrainer`.

    If a sync fails, its error ends TRL's training, or TRL stays at the version before it. TRL times its calls of this
    itself: `perf/weight_sync_s` and its parts in its log, or `profiling/Time taken: GRPOTrainer.sync_weights`.

    Args:
        store: As in `EngineDelivery`.
        engines: Likewise.
        publisher: Likewise.
        pause: Likewise.
        timeout: Likewise.
    """

    _trainer: Any = None

    @property
    def trainer(self) -> Any:
        """None, or TRL's trainer.

        Its step is then noted of each version, as {"step": 12}, and its log takes, as means of its `logging_steps`,
        `pulse/payload_bytes`, `pulse/changed_ratio`, `pulse/publish_seconds` and `pulse/pause_seconds`: of the engine
        that paused longest. Setting one that brings its weights another way raises ValueError.
        """
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        has = getattr(getattr(trainer, "vllm_generation", None), "vllm_client", trainer)  # AsyncGRPOTrainer itself
        if trainer.accelerator.is_main_process and getattr(has, "weight_transfer", None) is not self:
            raise ValueError(
                f"trainer: expected one that brings its weights by this transfer, found {type(trainer).__name__} that "
                "brings them another way: give it `weight_transfer`, or make it after VLLMClient is replaced"
            )
        self._trainer = trainer

    def init_weight_transfer(self) -> None:
        """Wait until all engines answer. TRL calls it when training begins.

        Raises:
            EngineError: One has no plug-in, or is out of reach for `timeout` seconds.
        """
        self.reach()

    def pause(self) -> None:
        """Nothing: an engine pauses for its own write alone."""

    def resume(self) -> None:
        """Nothing: an engine goes on after its own write."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish what TRL hands out, and bring all engines to it.

        Args:
            iterator: (name, whole tensor), one at a time. It is read to its end, also where something fails: the other
                ranks gather until then.

        Raises:
            PulseError: As `EngineDelivery.send`.
            TimeoutError: Likewise.
        """
        trainer = self.trainer
        self.send(iterator, metadata=None if trainer is None else {"step": trainer.state.global_step})
        if trainer is not None and self.published is not None:
            found = scalars(self.published) | {"pulse/pause_seconds": max(one.pause_s for one in self.applied)}
            for name, value in found.items():
                trainer._metrics["train"][name].append(value)  # as TRL logs its own

    def destroy(self) -> None:
        """Close the publisher that this made. TRL calls it when training ends."""
        self.close()


def vllm_client(transfer: PulseWeightTransfer) -> type[Any]:
    """Make a `VLLMClient` for TRL's trainers in server mode, as GRPOTrainer, that brings weights by a transfer.

    Args:
        transfer: What brings them. The servers' engines are its own; TRL asks its one server for completions.

    Returns:
        The class: assign it to `trl.generation.vllm_generation.VLLMClient` before the trainer is made.

    Raises:
        MissingExtraError: TRL is not installed.
    """
    base: Any = require("trl.generation.vllm_client", "trl").VLLMClient

    class PulseVLLMClient(base):  # type: ignore[misc]
        """TRL's client, whose weights go another way."""

        weight_transfer = transfer

        def init_communicator(self, device: Any = 0) -> None:
            transfer.init_weight_transfer()

        def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
            transfer.send_weights(named_params)

        def reset_prefix_cache(self) -> None:
            """Nothing: what old weights have made was dropped in the pause."""

        def close_communicator(self) -> None:
            transfer.destroy()

    return PulseVLLMClient
