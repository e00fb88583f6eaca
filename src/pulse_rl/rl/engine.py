"""The engine around the actors: Ray starts their processes and carries their calls.

On this machine by default, on a cluster with an address: the same code. Nothing but this file and `crew` knows Ray.
"""

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Literal, cast

from pulse_rl.errors import ProcessDiedError, PulseError
from pulse_rl.rl.buffer import DataBuffer
from pulse_rl.rl.config import RunConfig

BUFFER = "buffer"  # the actor's name in the run's namespace
LOG = "ray.log"
OBJECT_STORE_NBYTES = 256 << 20  # Ray's shared memory: trajectories are small
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}


class Remote:
    """Calls the methods of a named actor as if it were here. Holds only the name, so it travels anywhere."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., Any]:
        import ray

        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            try:
                return ray.get(getattr(ray.get_actor(self._name), method).remote(*arguments))
            except (ray.exceptions.RayActorError, ValueError) as error:  # gone, or forgotten by its name
                if isinstance(error, ray.exceptions.RayTaskError):
                    raise
                raise ProcessDiedError(f"the {self._name}'s process died", process=self._name) from None

        return call


class Process:
    """One process of a run: makes the object in it that does the work, and lends it its life.

    The work starts in a method and not in the constructor, so that what it raises reaches the driver as it is.
    """

    def run(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        return kind(*arguments).run()


class TrainerProcess(Process):
    """Named for the list of processes."""


class RolloutProcess(Process):
    """Named for the list of processes."""


class ProcessHandle:
    """A process that has been started, to its end."""

    def __init__(self, name: str, actor: Any, kind: Callable[..., Any], *arguments: Any) -> None:
        self._name = name
        self._actor = actor
        self.future = actor.run.remote(kind, *arguments)

    def ended(self) -> bool:
        import ray

        return bool(ray.wait([self.future], timeout=0)[0])

    def result(self) -> Any:
        """What it returned. Raises what it raised, as it was, or ProcessDiedError if it did not get that far."""
        import ray

        try:
            return ray.get(self.future)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError:
            # A process that only cannot be reached must not go on beside the one that takes its place.
            with suppress(Exception):
                ray.kill(self._actor)
            raise ProcessDiedError(f"{self._name}'s process died", process=self._name) from None


@contextmanager
def engine(config: RunConfig) -> Iterator[None]:
    """Ray, on this machine or at an address, in a namespace of its own; shut down at the end."""
    import ray

    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    local = {} if config.address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_NBYTES}
    on_terminate = signal.getsignal(signal.SIGTERM)
    # The engine prints what befalls its processes on stdout, which belongs to the summary.
    with (config.directory / LOG).open("a", buffering=1) as log, redirect_stdout(log):
        try:
            ray.init(
                address=config.address,
                namespace=f"pulse-rl-{secrets.token_hex(4)}",
                logging_level="ERROR",
                log_to_driver=False,
                **local,
            )
        except ConnectionError as error:
            raise PulseError(
                f"{error}: is a Ray cluster running there? One that asks for tokens (newer releases of Ray do by "
                "themselves) wants RAY_AUTH_MODE=token in this environment"
            ) from None
        signal.signal(signal.SIGTERM, on_terminate)  # the engine has put its own there
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def data_buffer(config: RunConfig) -> Iterator[DataBuffer]:
    """The data buffer, in a process of its own, which every other one reaches."""
    import ray

    # The actor lives as long as this handle.
    _handle = (
        ray.remote(num_cpus=0)(DataBuffer)
        .options(name=BUFFER)
        .remote(
            chunks=config.chunks,
            max_staleness=config.max_staleness,
            deterministic=config.deterministic,
            batches=config.trainers * config.round_steps,
        )
    )
    yield cast(DataBuffer, Remote(BUFFER))


def start(
    name: str, process: type[Process], kind: Callable[..., Any], *arguments: Any, where: Literal["here", "anywhere"]
) -> ProcessHandle:
    """Start a process that makes kind(*arguments) and runs it.

    name: what messages call it. where: on the driver's node, or on any, as the nodes' load is.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    strategy = "SPREAD" if where == "anywhere" else NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(num_cpus=0)(process).options(scheduling_strategy=strategy).remote()
    return ProcessHandle(name, actor, kind, *arguments)


def node_address() -> str:
    """The address by which the other nodes reach the one that this process is on."""
    import ray

    return str(ray.util.get_node_ip_address())


def wait(handles: list[ProcessHandle], timeout: float) -> None:
    """Wait until one of these ends, at most so many seconds."""
    import ray

    ray.wait([handle.future for handle in handles], timeout=timeout)
