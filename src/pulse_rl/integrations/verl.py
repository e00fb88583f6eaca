"""verl's trainers send their weights to rollout workers as patches, through a store: the checkpoint engine "pulse".

    prepare             the trainers look where the history ends: the version after it is the next one
    init_process_group  hands that version to all, as verl may pass no step
    send_weights        every trainer publishes a part of the tensors; one commit makes them a version, or none
    receive_weights     each rollout worker brings its copy of the model to just that version, proved, and yields it

verl finds it by the entry-point group `verl.plugins`. Each of its trainers gets every tensor whole, in float32, and has
to read them to the end, because they are gathered as they are read. Which one publishes a tensor follows from its name.
The methods are those that verl 0.9.1 calls; without verl this module can be imported all the same.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from socket import gethostname
from typing import Any
from zlib import crc32

from pulse_rl.errors import PulseError, require
from pulse_rl.units import check_seconds

NOTICE_S = 2.0  # within which a rollout worker that waits in vain notices that verl has begun anew


class PulseCheckpointEngine:
    """Takes the weights of verl's trainers to its rollout workers, as the checkpoint engine "pulse".

    verl makes one in each process, with what `checkpoint_engine.engine_kwargs.pulse` has. A rollout worker keeps one
    copy of the model in host memory, in the published precision.

    Args:
        bucket_size: Given by verl; not used.
        is_master: Given by verl to trainers alone.
        store: The URL or path of the store, as trainers and rollout workers reach it.
        publisher: Options of `Publisher`, as {"retain": 100}. By default cast="bfloat16".
        subscriber: Options of `Subscriber`, as {"verify_live": True}. To a `heartbeat`, each worker's host and process
            are added, as verl gives all workers the same options.
        cache: The cache of `open_store` for the rollout workers: those of one host download each object once.
        timeout: Seconds for which a rollout worker waits until the trainers have published.

    Raises:
        ValueError: The store or an option makes no sense.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        store: str,
        publisher: Mapping[str, Any] | None = None,
        subscriber: Mapping[str, Any] | None = None,
        cache: bool | str = True,
        timeout: float = 1800.0,
    ) -> None:
        from pulse_rl import Publisher, Subscriber, open_store  # each process of verl's imports this module

        check_seconds("timeout", timeout)
        self._is_master, self._timeout = is_master, timeout
        self._version = -1  # until one is handed over
        self._updates = 0  # that verl has begun
        self._turn = threading.Lock()  # of the rollout worker's copy
        self._weights: dict[str, Any] = {}  # of a rollout worker, once there is a version
        if is_master is None:
            options = dict(subscriber or {})
            name = options.get("heartbeat")
            if name and isinstance(name, str):
                options["heartbeat"] = f"{name}-{gethostname()[:32]}-{os.getpid()}"
            self._subscriber = Subscriber(open_store(store, cache=cache), **options)
        else:
            self._publisher = Publisher(store, group="world", **{"cast": "bfloat16", **(publisher or {})})

    def prepare(self) -> dict[str, Any]:
        """Find the version that comes next. Every method is a collective of the trainers.

        Returns:
            {"version": …} from a trainer, nothing from a rollout worker.

        Raises:
            PulseError: The history cannot be continued, as of `Publisher.resume`.
        """
        if self._is_master is None:
            return {}
        newest = self._publisher.resume()
        return {"version": 0 if newest is None else newest + 1}

    @classmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hand the first trainer's version to all.

        Args:
            actor_world_size: The number of trainers.
            rollout_world_size: The number of rollout workers.
            metadata: What `prepare` has returned, that of the trainers first.

        Returns:
            What `init_process_group` gets, by argument a list: of the trainers, and of the rollout workers.
        """
        version = metadata[0]["version"]
        return {"version": [version] * actor_world_size}, {"version": [version] * rollout_world_size}

    def init_process_group(self, version: int) -> None:
        """Remember the version that is sent or received next. A `receive_weights` that still waits gives up.

        Args:
            version: That of `build_topology`.
        """
        self._version = version
        self._updates += 1

    async def send_weights(
        self, weights: Iterator[tuple[str, Any]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish what verl hands out, on all trainers together.

        Args:
            weights: (name, whole tensor), one at a time. It is read to its end, also where something fails.
            global_steps: verl's step, which is noted of the version, as {"step": 12}.

        Returns:
            From the first trainer what verl's own delta engine reports, for the trainer's metrics.

        Raises:
            ValueError: verl hands out the model below LoRA adapters, which stays as it is while they are trained.
            PulseError: The version could not be published. All trainers raise, and the rollout workers time out.
        """
        metadata = None if global_steps is None else {"step": int(global_steps)}
        report = self._publisher.publish(_mine(weights), version=self._version, metadata=metadata)
        if not self._is_master:
            return {}
        first = report.base is None
        return {
            "checkpoint_engine/changed_ratio": 1.0 if first else report.density,
            "checkpoint_engine/changed_elems": float(report.elements if first else report.changes),
            "checkpoint_engine/payload_mbytes": (report.patch_nbytes or report.anchor_nbytes) / 2**20,
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Wait for the version that was handed over, bring this worker's copy to it, and give out its tensors.

        Args:
            global_steps: verl's step; not used.

        Yields:
            (name, tensor): on the worker's device; on a CPU the copy itself, which is to be read only.

        Raises:
            TimeoutError: The trainers have not published the version in time.
            PulseError: It could not be fetched or proved, or verl began another update meanwhile, as it does when
                trainers that were killed have been started again.
        """
        await asyncio.to_thread(self._bring, self._updates)
        device = require("verl.utils.device", "verl").get_device_name()
        for name, tensor in self._weights.items():
            yield name, tensor.to(device)

    def _bring(self, update: int) -> None:
        with self._turn:
            self._wait(update)
            self._weights = self._weights or self._subscriber.allocate()
            self._subscriber.sync(self._weights, version=self._version)

    def _wait(self, update: int) -> None:
        """Wait for the version of this update, as long as verl has begun no other one."""
        version, deadline = self._version, time.monotonic() + self._timeout
        arrived = False
        while not arrived:
            left = max(0.0, deadline - time.monotonic())
            try:
                self._subscriber.wait(version, min(left, NOTICE_S))
                arrived = True
            except TimeoutError as error:
                if left <= NOTICE_S:
                    store = self._subscriber.history.store.url
                    raise TimeoutError(
                        f"version {version}: not published in {store} within {self._timeout:g} s"
                    ) from error
            if update != self._updates:
                raise PulseError(f"version {version}: no longer waited for, as verl has begun another update")

    def finalize(self) -> None:
        """Nothing: publisher and copy serve the next version."""


def _mine(weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What this trainer publishes. It fails at the end alone, as all trainers gather until then."""
    dist = require("torch.distributed", "verl")
    rank, size = dist.get_rank(), dist.get_world_size()
    below = None
    for name, tensor in weights:
        if ".base_layer." in name:
            below = name
        if crc32(name.encode()) % size == rank:
            yield name, tensor
    if below is not None:
        raise ValueError(
            "actor_rollout_ref.model.lora.merge: expected True, as verl hands out no adapters otherwise and their base "
            f"stays as it is, found {below}"
        )


if find_spec("verl"):
    require("verl.checkpoint_engine", "verl").CheckpointEngineRegistry.register("pulse")(PulseCheckpointEngine)
