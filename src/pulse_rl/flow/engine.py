"""The engine: Ray starts the processes of a run and carries their calls.

It runs on this machine by default, and on a cluster with an address, by the same code. Only this module imports Ray.
"""

import logging
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

from pulse_rl.errors import ProcessDiedError, PulseError, one_line
from pulse_rl.flow.data.board import BoardLog
from pulse_rl.flow.directory import LOG

OBJECT_STORE_NBYTES = 256 << 20  # Ray's shared memory: trajectories are small
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
CAUSES = "killed, or out of memory"  # of a process's death, as far as its driver can tell
OF_MEMORY = "ended by Ray, as the memory of its node ran out"
REVIVALS = 1000  # of a service whose process dies; a fault that returns at once ends the run by then

CONNECT_S = 10  # for a connection to a cluster's head
SENTENCE = 300  # characters of a failure of Ray
SHARE = 0.001  # of a region's resource, that each process there takes


class Remote:
    """Calls the methods of a named actor like those of a local object. Only the name is sent to other processes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None  # once found: looking it up costs as much as half a call

    def __reduce__(self) -> tuple[type["Remote"], tuple[str]]:
        return Remote, (self._name,)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        import ray

        if method.startswith("_"):
            raise AttributeError(method)

        gone: tuple[type[Exception], ...] = (*_deaths(), ValueError)  # ValueError: no actor has this name any more

        def call(*arguments: Any) -> Any:
            try:
                self._actor = self._actor or ray.get_actor(self._name)
                return ray.get(getattr(self._actor, method).remote(*arguments))
            except ray.exceptions.RayTaskError as error:
                raise _raised(error) from error
            except gone as error:
                if getattr(error, "actor_init_failed", False):  # Ray's text ends with the exception
                    why = f"the {self._name}'s process could not start: {str(error).strip().splitlines()[-1].strip()}"
                    raise ProcessDiedError(why, process=self._name) from None
                raise _died(f"the {self._name}", self._name, error) from None

        return call


def _deaths() -> tuple[type[Exception], ...]:
    """What Ray raises where a process has died.

    Also one that Ray itself has killed, as the node's memory ran out, or that was sent to a node just lost.
    """
    import ray

    of_nodes = (ray.exceptions.OutOfMemoryError, ray.exceptions.ActorUnschedulableError)
    return (ray.exceptions.RayActorError, *of_nodes)


def _died(who: str, process: str, error: Exception) -> ProcessDiedError:
    """That a process has died, and why, as far as Ray's error tells."""
    import ray

    memory = isinstance(error, ray.exceptions.OutOfMemoryError)
    why = OF_MEMORY if memory else CAUSES
    return ProcessDiedError(f"{who}'s process died ({why})", process=process, memory=memory)


def _raised(error: Any) -> Exception:
    """What a process raised, without Ray's report; the last line alone of what cannot be sent between processes."""
    import ray

    cause: Exception = error.cause
    return PulseError(str(cause).strip().splitlines()[-1]) if isinstance(cause, ray.exceptions.RayError) else cause


class Process:
    """One process of a run. It makes one object and runs it; what it logs is shown by the driver.

    The object is made by a method, not by the constructor: then the driver receives its exceptions as they are.
    """

    def run(self, name: str, board: Any, kind: Callable[..., Any], *arguments: Any) -> Any:
        log = logging.getLogger("pulse_rl")
        log.setLevel(logging.INFO)
        log.addHandler(BoardLog(board, name))
        return kind(*arguments).run()


# The operating system lists a process under its class's name.
class TrainerProcess(Process):
    """A trainer's."""


class RolloutProcess(Process):
    """A rollout worker's."""


class ProcessHandle:
    """A process that has been started. It lives until its object's `run` returns.

    node: as Ray lists the one that it was sent to.
    """

    def __init__(self, name: str, node: Mapping[str, Any], actor: Any, *arguments: Any) -> None:
        self._name = name
        self.node, self.host = str(node["NodeID"]), str(node["NodeManagerHostname"])
        self._actor = actor
        self.future = actor.run.remote(name, *arguments)
        _handles.add(self)

    def ended(self) -> bool:
        import ray

        return bool(ray.wait([self.future], timeout=0)[0])

    def close(self) -> None:
        """End the process, once its result is known: until then it keeps its memory."""
        import ray

        _handles.discard(self)
        ray.kill(self._actor)

    def result(self) -> Any:
        """Wait for what `run` returns. Raises what it raised, or ProcessDiedError if the process died before."""
        import ray

        try:
            return ray.get(self.future)
        except ray.exceptions.RayTaskError as error:
            raise _raised(error) from error
        except _deaths() as error:
            # A process that is only unreachable must not continue next to its replacement.
            with suppress(Exception):
                ray.kill(self._actor)
            raise _died(self._name, self._name, error) from None


_handles: WeakSet[ProcessHandle] = WeakSet()  # those not closed: which node has how many


@contextmanager
def engine(directory: Path, address: str | None = None) -> Iterator[None]:
    """Ray, in a new namespace; shut down at the end.

    directory: of the run, for its log. address: of a Ray cluster; None for this machine.
    """
    import ray

    if address:
        _connect(address)
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    local = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_NBYTES}
    # A node that belongs to no cluster gets the loopback's address: then all of Ray listens there alone.
    constants = ray._private.ray_constants
    clusters = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = clusters and address is not None
    on_terminate = signal.getsignal(signal.SIGTERM)
    # Ray prints on stdout, which is for the summary.
    with (directory / LOG).open("a", buffering=1) as log, redirect_stdout(log):
        try:
            ray.init(
                address=address or "local",  # without it Ray would join a cluster that runs here already
                namespace=f"pulse-rl-{secrets.token_hex(4)}",
                logging_level="ERROR",
                log_to_driver=False,
                **local,
            )
        except ConnectionError as error:
            raise PulseError(
                f"{error}: is a Ray cluster running there? If it asks for tokens, as newer releases of Ray do by "
                "default, set RAY_AUTH_MODE=token in this environment"
            ) from None
        except Exception as error:  # Ray raises a plain Exception where a node starts too slowly
            raise PulseError(f"Ray did not start: {one_line(error)}") from error
        finally:
            constants.ENABLE_RAY_CLUSTER = clusters
        signal.signal(signal.SIGTERM, on_terminate)  # Ray has replaced it
        try:
            yield
        except ray.exceptions.RayError as error:  # Ray's own failures; their texts are reports of many lines
            raise PulseError(f"Ray failed: {one_line(error, SENTENCE)}") from error
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    """Raise PulseError where nothing listens at a cluster's host:port. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in host:
        return  # Ray knows more ways to name a cluster
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise PulseError(f"address: no Ray cluster answers at {address}: {one_line(error)}") from None


@contextmanager
def service(name: str, kind: Callable[..., Any], *arguments: Any) -> Iterator[Remote]:
    """An object kind(*arguments) in a process on this node, which every other one reaches by its name.

    If the process dies, Ray makes the object again, and repeats the calls that it had not answered.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    # The actor lives as long as this handle.
    _handle = (
        ray.remote(num_cpus=0, max_restarts=REVIVALS, max_task_retries=REVIVALS)(kind)
        .options(name=name, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(*arguments)
    )
    yield Remote(name)


def start(
    name: str,
    process: type[Process],
    kind: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    board: Any,
    where: Literal["here", "anywhere"],
    region: str = "",
) -> ProcessHandle:
    """Start a process that makes kind(*arguments) and runs it.

    name: for messages. board: where what it logs is put. where: on the driver's node, or on the one that `least_loaded`
    finds. region: on a node that offers this as a resource of Ray, where the cluster has one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"]: node for node in ray.nodes()}
    node = ray.get_runtime_context().get_node_id()
    if where == "anywhere":
        node = least_loaded(list(nodes.values()), Counter(handle.node for handle in _handles), region)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)  # Ray takes a soft one to be for any node
    needed = {region: SHARE} if ray.cluster_resources().get(region) else {}
    actor = ray.remote(num_cpus=0, resources=needed)(process).options(scheduling_strategy=strategy).remote()
    return ProcessHandle(name, nodes[node], actor, board, kind, *arguments)


def least_loaded(nodes: Sequence[Mapping[str, Any]], processes: Mapping[str, int], region: str = "") -> str:
    """The id of the node with the fewest of a run's processes for each of its processors.

    Ray does not choose so: a process that reserves no processor goes to a random node. One without processors
    (`ray start --num-cpus 0`) is only taken where no other is left.
    nodes: as Ray lists them. processes: by node id. region: of nodes that offer this resource, where any does.
    """
    alive = [node for node in nodes if node["Alive"]]
    there = [node for node in alive if node["Resources"].get(region)] or alive
    able = [node for node in there if node["Resources"].get("CPU")] or there

    def load(node: Mapping[str, Any]) -> float:
        return float(processes.get(node["NodeID"], 0) / (node["Resources"].get("CPU") or 1))

    return str(min(able, key=load)["NodeID"])


def node_address() -> str:
    """The address by which other nodes reach the node of this process."""
    import ray

    return str(ray.util.get_node_ip_address())


def wait(handles: list[ProcessHandle], timeout: float) -> None:
    """Wait until one of the processes ends, at most `timeout` seconds."""
    import ray

    ray.wait([handle.future for handle in handles], timeout=timeout)
