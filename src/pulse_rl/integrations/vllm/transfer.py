"""A worker of vLLM follows a history: the backend "pulse" of `--weight-transfer-config`.

A worker gets an `EngineReceiver` for its share of the model. It is driven in either of two ways:

- by the routes of the plug-in, or by the in-process client, through one method that this module adds to vLLM's workers:
  `pulse_rl(verb, arguments)`. Its answers say what went wrong; it never raises, since vLLM keeps only an error's text;
- by vLLM's own interface for trainers: `init_weight_transfer_engine`, `update_weights`. Then staging happens in the
  pause, and the version that vLLM reports is what the caller says in `finish_weight_update`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.worker.worker_base import WorkerBase

from pulse_rl import TensorSpec
from pulse_rl.engines.ranks import Outside, RankState, merge
from pulse_rl.engines.receiver import EngineReceiver
from pulse_rl.engines.service import serve
from pulse_rl.engines.states import Follow, failed
from pulse_rl.engines.views import LiveViews
from pulse_rl.integrations.vllm.local import METHOD
from pulse_rl.integrations.vllm.modules import live_views
from pulse_rl.logs import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

log = logger(__name__)

_LOOK_S = 0.005


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The history to follow: the fields of `Follow`."""

    store: str
    cache: str | None = None
    public_key: str | None = None
    heartbeat: str | None = None
    patience: float = 30.0
    view: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to go to; None for the newest."""

    version: int | None = None


class PulseWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The receiver of one worker, behind vLLM's interface."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size > 1:  # of replicas that compute together; of others vLLM says 1 here
            raise ValueError(
                f"backend 'pulse': expected a mixture of experts with one replica in its server, found "
                f"data_parallel_size {parallel.data_parallel_size}: start a server for each replica; `pulse-rl follow` "
                "takes all of them"
            )
        workers = get_world_group()
        group = None
        if workers.world_size > 1:  # for our threads alone: the engine's own collectives go on beside them
            group = torch.distributed.new_group(workers.ranks, backend="gloo")
        self._attended = False  # whether the worker's sleep passes by here
        files = Path(vllm_config.model_config.model)
        self.receiver = EngineReceiver(
            self._find_views,
            group=group,
            checkpoint=files if files.is_dir() else None,
            compiles=workers.local_rank == 0 and not parallel.data_parallel_rank_local,
            replica=parallel.data_parallel_index,
        )

    def _find_views(self, tensors: dict[str, TensorSpec], tied: dict[str, str]) -> LiveViews:
        alone = get_world_group().world_size == 1
        return live_views(self.model, self.model_config.dtype, tensors, tied, alone=alone)

    def attend(self, worker: Any) -> None:
        """Be told when a worker sleeps, from its first call on: before it, nothing is known of the weights."""
        if self._attended or not hasattr(worker, "sleep"):  # not every platform's can
            return
        self._attended = True
        sleep, wake_up = worker.sleep, worker.wake_up

        def and_sleep(level: int = 1) -> None:
            self.receiver.sleep(loses=level > 1)
            sleep(level)

        def and_wake_up(tags: list[str] | None = None) -> None:
            wake_up(tags)
            if tags is None or "weights" in tags:
                self.receiver.wake_up()

        worker.sleep, worker.wake_up = and_sleep, and_wake_up

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Follow a history. Returns when its tensors are found in the weights."""
        self.receiver.follow(Follow(**vars(init_info)))
        self._settle()

    def start_weight_update(self) -> None:
        """Nothing to do: no weight is touched before a version is proved."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Go to a version. One that is not staged yet is staged first, in the pause."""
        staged = self.receiver.state().prepared
        if staged is None or update_info.version != staged.version:
            self.receiver.stage(update_info.version)
            self._settle()
        self._check(self.receiver.apply(update_info.version).state)

    def finish_weight_update(self) -> None:
        """Nothing to do: what was applied is proved."""

    def shutdown(self) -> None:
        """Forget the history. The engine may go on, with the weights that it has, and be told another one."""
        self.receiver.close()

    def _settle(self) -> None:
        """Wait for the receiver's thread. Raises what went wrong there."""
        while (state := self.receiver.state()).working:
            time.sleep(_LOOK_S)
        self._check(state)

    def _check(self, rank: RankState) -> None:
        if rank.failure is not None:
            raise failed(rank.failure, merge([rank], Outside(str(self.model_config.model), rank.stopped, "")))


def _serve(worker: Any, verb: str, arguments: dict[str, Any]) -> Any:
    """A worker's method: one call of its receiver."""
    transfer = worker.weight_transfer_engine
    if not isinstance(transfer, PulseWeightTransferEngine):
        raise NotImplementedError(f"Method {METHOD!r} is not implemented.")  # as vLLM says it where this is not loaded
    transfer.attend(worker)
    return serve(transfer.receiver, verb, arguments)


setattr(WorkerBase, METHOD, _serve)
