"""What SkyRL's trainer sends its weights with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from skyrl.backends.skyrl_train.weight_sync.weight_senders import SkyrlTrainerCapabilities

from pulse_rl.integrations.vllm.trainer import PulseTrainerInitInfo, PulseTrainerWeightTransferEngine

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightSource


class PulseDelta(SkyrlTrainerCapabilities, PulseTrainerWeightTransferEngine):  # type: ignore[misc]
    """A `PulseTrainerWeightTransferEngine` with what SkyRL's workers read of theirs."""

    skyrl_handles_prefix_cache_reset = True  # in the pause

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: WeightSource | None = None) -> Self:
        """Make one on each rank. init_info, client: SkyRL's own, of which the directory and the addresses are used."""
        info = PulseTrainerInitInfo(store=init_info.sync_dir, engines=client._urls, rank=init_info.rank)
        return super().trainer_init(info, client=client, source=source)

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """SkyRL says before each sync whether old weights' keys and values are dropped in it."""
        self.reset_caches = reset

    def send_weights(self) -> None:
        """As that of the base. Raises ValueError where SkyRL has a draft model: that is not followed."""
        if self.skyrl_draft_source is not None:
            raise ValueError("speculative_config: expected none, as a draft model is not followed in place")
        super().send_weights()
