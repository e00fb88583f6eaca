"""A trainer that sends its weights by vLLM's `WeightTransferTrainerFactory`: the backend "pulse", on its side.

Importing this registers it.

    info = PulseTrainerInitInfo(store="s3://bucket/run-a", engines=["http://gpu-1:8000"], rank=rank)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    engine.send_weights()       # on every rank, after a step: nothing is to be paused around it

Engines that are named are driven by the routes of the plug-in, which stage while requests are generated. vLLM's four
calls cannot: each runs in the engine's own loop, and none returns anything. They are what there is where engines have
no address, as in Ray actors; then all of it happens in the caller's pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from pulse_rl.engines.client import absolute
from pulse_rl.engines.fleet import Engines
from pulse_rl.engines.states import EngineReport, EngineState, PauseMode
from pulse_rl.integrations.delivery import EngineDelivery, drain

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource


@dataclass
class PulseTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where weights go, for `WeightTransferTrainerFactory.trainer_init`. `rank` is vLLM's: rank 0 sends.

    Attributes:
        store: The URL or path of the store, as the engines reach it.
        engines: The addresses of all engines, as "http://host:8000". None: they are reached by vLLM's client alone.
        pause: What happens to requests that run while a version is written, as in `Engines.apply`.
        timeout: Seconds in which all engines must hold a version, engines that are started again included.
    """

    backend: ClassVar[str] = "pulse"

    store: str
    engines: Sequence[str] | None = None
    pause: PauseMode = "keep"
    timeout: float = 600.0


class PulseTrainerWeightTransferEngine(TrainerWeightTransferEngine[PulseTrainerInitInfo]):  # type: ignore[misc]
    """Publishes a source's weights and brings all engines to them.

    Args:
        client: vLLM's client, which is asked only where the engines are not named.
        source: A `WeightSource`, which every rank reads to its end.
        delivery: What brings them, on rank 0; None on the others.

    Attributes:
        delivery: Likewise; its `published` and `applied` are the reports of the last version.
        reset_caches: Whether named engines drop cached keys and values, which old weights have made.
    """

    init_info_cls = PulseTrainerInitInfo
    reset_caches = True

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, delivery: EngineDelivery | None) -> None:
        super().__init__(client=client, source=source, is_sender=delivery is not None)
        self.delivery = delivery

    @classmethod
    def trainer_init(
        cls, init_info: PulseTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Make one on each rank. Rank 0 waits until all named engines answer.

        Raises:
            ValueError: There is no source, or its weights are on several ranks.
            EngineError: A named engine has no plug-in, or is out of reach for `timeout` seconds.
        """
        if source is None or source.held_names() is not None:
            raise ValueError("source: expected a WeightSource of which each rank has all weights")
        delivery = None
        if init_info.is_sender:
            engines = _ByClient(client) if init_info.engines is None else Engines(init_info.engines)
            delivery = EngineDelivery(init_info.store, engines, pause=init_info.pause, timeout=init_info.timeout)
            delivery.reach()
        return cls(client=client, source=source, delivery=delivery)

    def send_weights(self) -> None:
        """Publish the source's weights and bring all engines to them: on rank 0. Others read the source alone.

        Raises:
            PulseError: As `EngineDelivery.send`.
            TimeoutError: Likewise.
        """
        if self.delivery is None:
            drain(self.source)
        else:
            self.delivery.send(self.source, reset_caches=self.reset_caches)

    def shutdown(self) -> None:
        """Close the publisher."""
        if self.delivery is not None:
            self.delivery.close()


class _ByClient(Engines):
    """All engines of a client of vLLM. It says nothing of them; a call fails where one of them could not prove it."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self.clients, self._client = (), client

    def states(self) -> list[EngineState]:
        return []

    def follow(self, store: str | Path, **_: Any) -> list[EngineState]:
        self._client.init_weight_transfer_engine({"store": absolute(store)})
        return []

    def stage(self, version: int | None = None, **_: Any) -> list[EngineState]:
        return []

    def apply(self, version: int | None = None, **_: Any) -> list[EngineReport]:
        self._client.start_weight_update()
        self._client.update_weights({"version": version})
        self._client.finish_weight_update(str(version))
        return []


if PulseTrainerInitInfo.backend not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(PulseTrainerInitInfo.backend, PulseTrainerWeightTransferEngine)
