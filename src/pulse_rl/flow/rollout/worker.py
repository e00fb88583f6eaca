"""A rollout worker of a pool: it holds several policies, follows the history of each, and plays tasks with them.

Its weights come from the stores alone. Every policy has a service that samples (`sampling`) and moves to its newest
version without waiting for the others: a version is fetched and proved while tokens are sampled, and written between
two calls. What the worker pushes says which proved version made each token.

Tasks that name exact versions (those of evaluation windows, and all of a deterministic run) are played together with
tasks of the same versions only. In a deterministic run a worker plays one task at a time. A window whose versions
cannot be read is given up, with a warning.

It takes no work before it has proved a version of every policy. When it is asked to stop, it finishes what it plays,
proves what it holds, and leaves.
"""

import asyncio
import os
import socket
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from pulse_rl import load_assets
from pulse_rl.errors import PulseError, one_line
from pulse_rl.flow import model
from pulse_rl.flow.data.evaluation import window_of
from pulse_rl.flow.playing import workflow
from pulse_rl.flow.playing.tools import Toolbox
from pulse_rl.flow.recipe import PoolRecipe, Recipe
from pulse_rl.flow.rollout.sampler import BuiltinSampler, Sampler, SamplerSettings
from pulse_rl.flow.rollout.sampling import PolicySampling, in_step, settle
from pulse_rl.flow.samples import Episode, EpisodeGroup, Orders, Task
from pulse_rl.logs import logger

IDLE_S = (0.02, 0.2)  # between questions for work, after one was answered with none: the first, the longest
HEARTBEAT_S = 1.0
PUSH_S = 0.5  # for which new tasks wait for groups that are on their way, which is longer only over slow links
THREADS = 16  # that wait: for other processes, for stores, for sampling
MAX_ERROR = 300  # characters of one that is passed on
SEED_STRIDE = 1_000_003  # a prime: two runs with different seeds share no seed in their first million tasks
NOT_USERS = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))  # code
CALLS = 4096  # of sampling in a task, each with a seed
log = logger(__name__)


@dataclass
class _Held:
    """A policy that the worker holds."""

    sampling: PolicySampling
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a version is fetched and written
    version: int | None = None  # proved last: while another one is written, the sampler has none
    digest: str = ""  # of it
    error: PulseError | None = None  # why an exact version could not be read
    syncs: int = 0
    fetched_nbytes: int = 0
    sync_s: float = 0.0
    bandwidth: float | None = None  # bits per second, measured on the last full checkpoint
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of the last sync

    def facts(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "digest": self.digest,
            "verified": bool(self.digest),
            "syncs": self.syncs,
            "fetched_nbytes": self.fetched_nbytes,
            "sync_s": self.sync_s,
            "bandwidth": self.bandwidth,
            "phases": dict(self.phases),
            "sampling_s": self.sampling.seconds,
            "calls": self.sampling.calls,
            "rows": self.sampling.rows,
            "tokens": self.sampling.tokens,
        }


class RolloutWorker:
    """A worker's state; `run` is its whole life.

    name: among all workers. pool: to which it belongs. dataflow: what calls the run's Dataflow.
    """

    def __init__(self, name: str, recipe: Recipe, pool: PoolRecipe, dataflow: Any) -> None:
        torch.set_num_threads(pool.threads)
        self._name, self._recipe, self._pool, self._dataflow = name, recipe, pool, dataflow
        self._policies = list(recipe.policies)
        self._toolbox = Toolbox(recipe.tools)
        self._workflow = workflow.build(recipe.workflow.plugin, seed=recipe.seed, policies=self._policies)
        self._slots = 1 if recipe.deterministic else pool.slots
        self._held: dict[str, _Held] = {}
        self._orders = Orders(stop=False, versions={})
        self._playing: set[asyncio.Task[None]] = set()
        self._pushing: set[asyncio.Task[None]] = set()
        self._tasks: set[int] = set()  # numbers of those that are played or pushed
        self._versions: dict[str, int | None] = {}  # that the tasks in play name
        self._next: Task | None = None  # of other versions than those in play
        self._played = self._failed = self._refused = 0  # tasks
        self._start_s = self._idle_s = 0.0
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Play until it is asked to stop; return what it holds then, proved."""
        try:
            return asyncio.run(self._run())
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _run(self) -> dict[str, Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        await self._call("register", self._name, self._pool.kind, self._slots, self._policies, self._pool.region)
        await self._ask_for_orders()
        async with asyncio.TaskGroup() as services:
            beating = services.create_task(self._beat())
            running = [beating]
            if await self._load():
                self._start_s = time.monotonic() - self._started
                if not self._recipe.deterministic:
                    running += [services.create_task(held.sampling.run()) for held in self._held.values()]
                await self._work()
                self._versions = {}
                for name, held in self._held.items():
                    await self._follow(name)
                    async with held.turn:  # a version that has just come may be followed meanwhile
                        held.digest = await asyncio.to_thread(held.sampling.sampler.verify)
                await self._ask_for_orders()  # which also says what is held
            for service in running:
                service.cancel()
        await self._call("leave", self._name)
        return self._facts()

    async def _load(self) -> bool:
        """Load the newest version of every policy, once there is one; False if it is asked to stop before."""
        if self._pool.kind == "builtin":
            await asyncio.to_thread(model.import_early)
        while not self._orders.versions.keys() >= set(self._policies):
            if self._orders.stop:
                return False
            await asyncio.sleep(IDLE_S[1])
            await self._ask_for_orders()
        loaded = {}
        for number, name in enumerate(self._policies):
            sampler = await asyncio.to_thread(self._sampler, name)
            first = int.from_bytes(os.urandom(4)) * len(self._policies) + number
            sampling = PolicySampling(name, sampler, temperature=self._recipe.workflow.temperature, seed=first << 20)
            loaded[name] = _Held(sampling)
        self._held = loaded
        for name in self._policies:
            await self._follow(name)
        return True

    def _sampler(self, policy: str) -> Sampler:
        recipe, (view, form) = self._recipe, self._pool.quantised or (None, None)
        settings = SamplerSettings(
            store_url=recipe.store_url(policy),
            threads=self._pool.threads,
            sync=recipe.policies[policy].sync,
            seed=recipe.seed,
            view=view,
            form=form,
        )
        with tempfile.TemporaryDirectory() as scratch:
            found = load_assets(settings.store_url, Path(scratch), view=settings.view)
            assets = {path.name: path.read_bytes() for path in found}
        if self._pool.kind == "builtin":
            return BuiltinSampler(self._name, settings, assets)
        from pulse_rl.flow.rollout.vllm_sampler import VllmSampler

        return VllmSampler(self._name, settings, assets)

    # --- orders -------------------------------------------------------------------------------------------------------

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the Dataflow; the worker's other parts go on meanwhile."""
        return await asyncio.to_thread(getattr(self._dataflow, method), *arguments)

    async def _beat(self) -> None:
        """Say that it lives, and follow new versions, until cancelled."""
        while True:
            await asyncio.sleep(max(HEARTBEAT_S, self._orders.pause))
            if self._recipe.deterministic:
                await self._ask_for_orders()
            else:
                await self._catch_up()

    async def _ask_for_orders(self) -> None:
        """Say what is held, and hear of the newest versions. Answers may overtake each other: versions only grow."""
        found = Orders(*await self._call("heartbeat", self._name, self._facts()))
        known = self._orders.versions
        versions = {name: max(version, known.get(name, version)) for name, version in found.versions.items()}
        self._orders = Orders(found.stop or self._orders.stop, versions, found.pause)

    def _facts(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "pool": self._pool.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "restarting": False,
            "left": False,
            "versions": {name: held.version for name, held in self._held.items() if held.version is not None},
            "policies": {name: held.facts() for name, held in self._held.items()},
            "playing": len(self._playing),
            "played": self._played,
            "failed": self._failed,
            "refused": self._refused,
            "start_s": self._start_s,
            "idle_s": self._idle_s,
            "seconds": time.monotonic() - self._started,
        }

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Bring every policy to the version that is wanted now, and report it at once: work may wait for that."""
        await self._ask_for_orders()
        before = {name: held.version for name, held in self._held.items()}
        await asyncio.gather(*map(self._follow, self._held))
        if before != {name: held.version for name, held in self._held.items()}:
            await self._ask_for_orders()

    async def _follow(self, name: str) -> None:
        """Bring a policy to the version that is wanted now, and prove all of it."""
        held = self._held[name]
        async with held.turn:
            exact = self._versions.get(name)
            version = self._orders.versions[name] if exact is None else exact
            if version == held.version:
                return
            sampling = held.sampling
            try:
                await asyncio.to_thread(sampling.sampler.stage, version)
                if self._pool.interrupt:
                    sampling.interrupt()
                async with sampling.lock:
                    reached = await asyncio.to_thread(sampling.sampler.follow, version)
            except PulseError as error:
                if exact is None or getattr(error, "temporary", False):
                    raise
                if sampling.sampler.version != held.version:
                    held.version, held.digest = None, ""
                held.error = error
                return
            held.version, held.digest, held.error = reached.version, reached.digest, None
            held.syncs += 1
            held.fetched_nbytes += reached.fetched_nbytes
            held.sync_s += reached.seconds
            held.bandwidth = reached.bandwidth or held.bandwidth
            held.phases = reached.phases

    # --- work ---------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Take tasks and play them until it is asked to stop; then finish them."""
        pause = IDLE_S[0]
        while True:
            asked = time.monotonic()
            if taken := await self._take():
                pause = IDLE_S[0]
                await self._catch_up()
                unread = self._unread(taken)
                for task in taken:
                    self._tasks.add(task.number)
                    playing = self._push(EpisodeGroup(task, self._name, [])) if unread else self._play(task)
                    self._playing.add(asyncio.create_task(playing))
            elif self._playing:
                await asyncio.wait(self._playing, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                await settle()  # those that end together are replaced together
                pause = min(2 * pause, max(IDLE_S[1], self._orders.pause))
            elif self._orders.stop:
                break
            else:
                self._versions = {}
                await asyncio.sleep(pause)
                pause = min(2 * pause, max(IDLE_S[1], self._orders.pause))
                await (self._ask_for_orders() if self._recipe.deterministic else self._catch_up())
                self._idle_s += time.monotonic() - asked
            for group in (self._playing, self._pushing):
                for ended in [each for each in group if each.done()]:
                    group.remove(ended)
                    ended.result()
        if self._pushing:
            await asyncio.gather(*self._pushing)

    async def _take(self) -> list[Task]:
        """Tasks for the free slots, of the versions that are in play."""
        if self._pushing:  # until then the dispatcher counts their slots as taken; tasks taken together share calls
            await asyncio.wait(self._pushing, timeout=PUSH_S)
        taken: list[Task] = []
        while len(self._playing) + len(taken) < self._slots:
            task, self._next = self._next, None
            if task is None and not self._orders.stop:
                known = [*self._tasks, *(task.number for task in taken)]
                found = await self._call("take", self._name, known)
                task = found and Task(*found)
            if task is None:
                break
            if (self._playing or taken) and task.versions != self._versions:
                self._next = task  # until those before it are played
                break
            self._versions = task.versions
            taken.append(task)
        return taken

    def _unread(self, tasks: list[Task]) -> bool:
        """Whether a version that a window's tasks name cannot be read. Raises why, if other tasks name it."""
        for name, held in self._held.items():
            if held.error is not None and (version := self._versions.get(name)) not in (None, held.version):
                windows = dict.fromkeys(task.evaluation for task in tasks)
                if None in windows:
                    raise held.error
                reason = one_line(held.error, MAX_ERROR)
                given_up = ", ".join(map(str, windows))
                log.warning("%s is given up: version %s of %s cannot be read: %s", given_up, version, name, reason)
                return True
        return False

    async def _play(self, task: Task) -> None:
        """Play a task, and push its group in the background: its slot is free by then."""
        limit_s = self._recipe.workflow.timeout_s
        limit = asyncio.timeout(limit_s)  # a play that hangs would keep its slot for ever
        try:
            async with limit:
                episodes = await self._episodes(task)
        except Exception as error:  # noqa: BLE001  # of the workflow: the dispatcher decides what becomes of the task
            self._failed += 1
            late = f"not played within {limit_s:g} s (workflow.timeout_s)"
            reason = late if limit.expired() else _reason(_first(error))
            await self._call("give_back", self._name, task.number, reason)
            self._tasks.discard(task.number)
            return
        pushing = asyncio.create_task(self._push(EpisodeGroup(task, self._name, episodes)))
        self._pushing.add(pushing)

    async def _episodes(self, task: Task) -> list[Episode]:
        problem = self._workflow.problem(task.problem)  # at once: tasks that start together are to ask together
        plays = [partial(self._episode, task, problem, number) for number in range(self._plays(task))]
        if self._recipe.deterministic:
            services = {name: held.sampling for name, held in self._held.items()}
            return await in_step(services, plays, self._seed(task) * CALLS)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play()) for play in plays]
        return [task.result() for task in tasks]

    def _plays(self, task: Task) -> int:
        """How often a task's problem is played."""
        windows = {window.name: window.samples for window in self._recipe.evaluation}
        return self._recipe.workflow.group_size if task.evaluation is None else windows[window_of(task.evaluation)]

    async def _episode(self, task: Task, problem: Any, number: int) -> Episode:
        clients = {name: _Client(held.sampling, number) for name, held in self._held.items()}
        return await workflow.play(
            self._workflow,
            problem,
            clients,
            random=Random(f"{self._seed(task)}/{number}"),
            toolbox=self._toolbox,
            max_new_tokens=self._recipe.workflow.max_new_tokens,
        )

    def _seed(self, task: Task) -> int:
        return self._recipe.seed * SEED_STRIDE + task.number

    async def _push(self, group: EpisodeGroup) -> None:
        try:
            if await self._call("push", group):
                self._played += 1
            else:
                self._refused += 1
        except ValueError as error:  # it does not fit its task: a fault of the workflow
            self._failed += 1
            await self._call("give_back", self._name, group.task.number, one_line(error, MAX_ERROR))
        self._tasks.discard(group.task.number)


class _Client:
    """What samples for one policy in one episode."""

    def __init__(self, sampling: PolicySampling, episode: int) -> None:
        self.name, self.tokenizer = sampling.name, sampling.tokenizer
        self.complete = partial(sampling.complete, episode=episode)


def _first(error: BaseException) -> BaseException:
    """What went wrong first, without the groups in which asyncio puts it."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _reason(error: BaseException) -> str:
    """An error of a workflow in a line, with the last line of the user's code that it went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_USERS)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error, MAX_ERROR)}{where}"
