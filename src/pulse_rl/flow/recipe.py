"""A recipe: every setting of a run, in one TOML file.

    name = "solver-verifier"           the run
    [policies.solver]                  one table for each policy: its model, optimizer, loss, samples and channel
    [workflow]                         what is played with them; keys that are not listed here are the workflow's own
    [tools.python]                     limits of a tool, or a tool of your own
    [curator]                          which problems are played
    [[pools]]                          workers of one kind in one place
    [autoscale]                        when a pool grows and shrinks; without it, never
    [[evaluation]]                     windows at fixed versions

A plug-in is a name ("grpo"), or a table with the name and its settings ({name = "dapo", clip_high = 0.28}).
`recipe_file` reads recipes, applies `--set`, and writes them. Here are the types, and what they must hold. Every number
has bounds in its type, which hold from the moment at which a recipe is read.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pulse_rl.disk import on_this_machine
from pulse_rl.flow import model_name, registry
from pulse_rl.flow.directory import POLICIES
from pulse_rl.flow.playing import tools, workflow
from pulse_rl.flow.registry import Plugin
from pulse_rl.flow.rounds import round_end

if TYPE_CHECKING:
    from pulse_rl.weights.views.view import View

VIEWS = {"fp8": "fp8=Fp8(block='channel', rule='vllm')"}  # which name alone says the form
_GRPO = Plugin("grpo")
_ALL = Plugin("all")

# Above these no run is meant, but a slip of the keyboard.
Steps = Annotated[int, Meta(ge=1, le=10**9)]
AnySteps = Annotated[int, Meta(ge=0, le=10**9)]
Problem = Annotated[int, Meta(ge=0, le=10**12)]
Size = Annotated[int, Meta(ge=1, le=1 << 16)]
GroupSize = Annotated[int, Meta(ge=2, le=4096)]  # of one play no advantage can be computed
Tokens = Annotated[int, Meta(ge=1, le=10**7)]
Processes = Annotated[int, Meta(ge=1, le=10_000)]
Workers = Annotated[int, Meta(ge=0, le=10_000)]
Seed = Annotated[int, Meta(ge=0, lt=1 << 31)]  # a worker's seeds follow from it, and have 64 bits
Share = Annotated[float, Meta(ge=0, lt=1)]
Rate = Annotated[float, Meta(gt=0, le=10)]
Decay = Annotated[float, Meta(ge=0, le=100)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]


class PolicyRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One policy: its model, how it is trained, which samples it takes, and how its weights are sent."""

    model: str = "smollm2"  # "smollm2", "tiny", or a directory or hub id for Transformers
    dither: Seed | None = None  # seed; adds noise to dequantised weights, within their quantisation step
    trained: bool = True  # False: a frozen partner, published once as version 0
    trainers: Processes = 1  # each with its own batches; together they publish one version a round
    trainer_sync: Literal["pulse", "published", "diloco", "ddp", "fsdp"] = "pulse"  # what several trainers exchange
    trainer_store: str | None = None  # URL of the store through which trainers exchange; None: over the network
    elastic: bool = False  # whether a round goes on without a trainer that is killed
    sync_every: Steps = 8  # steps of a round of several trainers
    overlap: AnySteps = 0  # steps that they take while a round is exchanged
    threads: Processes = 1  # torch threads of each trainer
    lr: Rate = 3e-6
    warmup: AnySteps = 0  # steps in which the learning rate rises linearly to lr
    betas: tuple[Share, Share] = (0.9, 0.999)
    weight_decay: Decay = 0.0
    grad_clip: Positive = 1.0  # largest norm of the gradient
    loss: Plugin = _GRPO
    advantage: Plugin = _GRPO
    tasks_per_step: Size = 8  # groups in a batch
    max_staleness: AnySteps = 1  # versions by which a token may lag behind the newest
    order: Literal["task", "deadline", "newest"] = "task"  # in which groups are trained on
    replay: Plugin | None = None  # which groups are trained on again; None: none
    replay_ratio: Share = 0.0  # repeated groups in a batch, as a share of it
    filter: Plugin = _ALL  # which groups are kept
    sync: Literal["patch", "full"] = "patch"  # what workers read: patches, or a full checkpoint per version
    codec: str = "context"
    anchor_every: Steps = 50  # versions

    @property
    def round_steps(self) -> int:
        """Steps from one version to the next."""
        return 1 if self.trainers == 1 else self.sync_every

    @property
    def sharded(self) -> bool:
        """Whether each trainer holds a share of the model."""
        return self.trainer_sync == "fsdp"

    @property
    def in_step(self) -> bool:
        """Whether the trainers exchange every step."""
        return self.trainer_sync in ("ddp", "fsdp")

    @property
    def restarts_alone(self) -> bool:
        """Whether a trainer that is killed is started again without the others, unless it is rank 0."""
        return self.elastic or self.trainer_store is not None

    def round_end(self, step: int) -> int:
        """The step at which a round ends that begins at this step, unless the run ends before."""
        return round_end(step, length=self.round_steps, overlap=self.overlap)


class WorkflowRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is played, on which problems, and how it is sampled."""

    name: str = "math"  # a registered workflow or an import path
    settings: dict[str, Any] = {}  # the workflow's own; in TOML beside the other keys
    group_size: GroupSize = 8  # plays of each problem
    max_new_tokens: Tokens = 8  # of a completion, unless the workflow says less
    temperature: Positive = 1.0
    timeout_s: Positive = 1800.0  # for a task: all plays of a problem

    @property
    def plugin(self) -> Plugin:
        return Plugin(self.name, self.settings)


class PoolRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one kind in one place."""

    name: str = "pool"
    kind: Literal["builtin", "vllm"] = "builtin"  # what they sample with
    workers: Workers = 2
    slots: Size = 4  # tasks that a worker plays at a time
    policies: list[str] = []  # which they hold; empty: all
    region: str = ""  # where they are, for reports and placement
    threads: Processes = 1  # torch threads of each worker
    interrupt: bool = False  # whether sampling stops when a version arrives, and goes on under it
    # The quantised view that they follow and sample with: "fp8", or as "int8=Int8()"; None: the weights.
    view: str | None = None

    @property
    def view_name(self) -> str | None:
        """The name of its view."""
        return self.view.partition("=")[0] if self.view is not None else None

    @property
    def quantised(self) -> "tuple[str, View] | None":
        """The name and the form of its view. Raises ValueError for text that is none."""
        from pulse_rl.weights.views.view import view_of

        return view_of(VIEWS.get(self.view, self.view)) if self.view is not None else None


class AutoscaleRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a pool grows and shrinks, by the share of their time that trainers wait for samples."""

    pool: str = ""  # which; empty: the first
    least: Processes = 1  # workers
    most: Processes = 8  # workers
    grow: Share = 0.10  # above this share it grows to ceil(workers / (1 − share))
    shrink: Share = 0.05  # below this share it loses a worker
    every: Positive = 30.0  # seconds between decisions


class EvaluationRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A window: problems that are played at one fixed version of every policy, and not trained on."""

    name: str = "evaluation"
    every: Steps = 10  # steps of the first trained policy; the beginning and the end are evaluated too
    problems: Size = 16
    samples: Size = 4  # plays of each problem: pass@1 … pass@samples
    first: Problem = 500_000  # number of the first problem, where no training comes to


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of a run."""

    name: str = "run"
    seed: Seed = 0
    steps: Steps = 40  # optimizer steps of each trained policy
    out: str = "runs/run"  # the run's directory; a file that does not say it means runs/NAME
    store: str | None = None  # URL of the history, of several policies below it; None: `store` in the run's directory
    deterministic: bool = False  # the same seed gives the same bits, whatever the timing and the number of workers
    checkpoint_every: Steps = 100  # steps; the end and Ctrl-C write one too
    address: str | None = None  # a Ray cluster's address; None: this machine
    path: str | None = None  # directory of the user's plug-ins; None: that of the recipe's file
    policies: dict[str, PolicyRecipe] = {}
    workflow: WorkflowRecipe = WorkflowRecipe()
    curator: Plugin = _ALL
    tools: dict[str, Plugin] = {}  # beside, or instead of, calculator and python
    pools: list[PoolRecipe] = msgspec.field(default_factory=lambda: [PoolRecipe()])
    autoscale: AutoscaleRecipe | None = None
    evaluation: list[EvaluationRecipe] = []

    def __post_init__(self) -> None:
        # Wherever a recipe comes to, in whichever process, its plug-ins can be imported.
        if self.path is not None and self.path not in sys.path:
            sys.path.append(self.path)

    @property
    def directory(self) -> Path:
        return Path(self.out).absolute()

    @property
    def trained(self) -> list[str]:
        """The policies that are trained, in the recipe's order."""
        return [name for name, policy in self.policies.items() if policy.trained]

    @property
    def only(self) -> str | None:
        """The run's policy; None if it has several."""
        return next(iter(self.policies)) if len(self.policies) == 1 else None

    @property
    def base_url(self) -> str:
        """Where the histories are: that of the only policy, or those of several below it."""
        return (self.directory / "store").as_uri() if self.store is None else str(_absolute(self.store))

    def store_url(self, policy: str) -> str:
        """Where the history of a policy is."""
        return self.base_url if self.only else f"{self.base_url.rstrip('/')}/{policy}"

    def files(self, policy: str) -> Path:
        """Where the files of a policy's trainers are."""
        return self.directory if self.only else self.directory / POLICIES / policy

    def held_by(self, pool: PoolRecipe) -> list[str]:
        """The policies that a pool's workers hold."""
        return list(pool.policies or self.policies)

    def with_absolute_paths(self) -> "Recipe":
        """The same settings for processes elsewhere, which have other working directories."""
        policies = {
            name: msgspec.structs.replace(policy, trainer_store=_absolute(policy.trainer_store))
            for name, policy in self.policies.items()
        }
        store = _absolute(self.store)
        return msgspec.structs.replace(self, out=str(self.directory), store=store, policies=policies)


def _absolute(store: str | None) -> str | None:
    """A store's URL as it is, a path as an absolute one: processes elsewhere have other working directories."""
    return store if store is None or "://" in store else str(Path(store).absolute())


def check(recipe: Recipe) -> Recipe:
    """Return the recipe. Raises ValueError that names the first bad key, what was expected and what was found."""
    _plain_name("name", recipe.name)
    on_this_machine("out", recipe.out)
    if (recipe.store or "").startswith("memory:"):
        raise ValueError("store: expected a place that every process reaches; memory:// lives in one process only")
    _check_policies(recipe)
    _check_pools(recipe)
    for number, window in enumerate(recipe.evaluation):
        _plain_name(f"evaluation[{number}].name", window.name)
    _unique("evaluation", [window.name for window in recipe.evaluation])
    _check_plugins(recipe)
    return recipe


def _check_policies(recipe: Recipe) -> None:
    if not recipe.policies:
        raise ValueError("policies: expected at least one table [policies.NAME], found none")
    if not recipe.trained:
        raise ValueError("policies: expected at least one with trained = true, found none")
    for name, policy in recipe.policies.items():
        key = f"policies.{name}"
        _plain_name(key, name)
        if (policy.replay is None) != (policy.replay_ratio == 0):
            raise ValueError(
                f"{key}.replay_ratio: expected more than 0 with a replay plug-in, and 0 without one, found "
                f"{policy.replay_ratio} with {'one' if policy.replay else 'none'}"
            )
        with _under(key):
            model_name.check(policy.model, dither=policy.dither)
        _check_trainers(key, policy, recipe)
    stores = [policy.trainer_store for policy in recipe.policies.values() if policy.trainer_store is not None]
    if repeated := next(_repeated(stores), None):
        raise ValueError(f"policies: expected a different trainer_store for each, found {repeated!r} twice")


def _check_trainers(key: str, policy: PolicyRecipe, recipe: Recipe) -> None:
    if policy.trainers == 1:
        for setting in ("trainer_sync", "trainer_store", "elastic", "sync_every", "overlap"):
            if getattr(policy, setting) != getattr(PolicyRecipe(), setting):
                raise ValueError(f"{key}.{setting}: expected {key}.trainers of at least 2 with it, found 1")
        return
    if not policy.trained:
        raise ValueError(f"{key}.trainers: expected 1 for a policy that is not trained, found {policy.trainers}")
    if (policy.trainer_store or "").startswith("memory:"):
        raise ValueError(
            f"{key}.trainer_store: expected a place that every process reaches; memory:// lives in one process only"
        )
    if policy.trainer_store is not None and policy.in_step:
        raise ValueError(
            f"{key}.trainer_store: expected trainer_sync pulse, published or diloco with it, found "
            f"{policy.trainer_sync}, which exchanges every step"
        )
    if policy.trainer_store is not None and recipe.deterministic:
        raise ValueError(
            f"{key}.trainer_store: expected none with deterministic = true, as trainers that start again would go on "
            f"from the last committed round and not from their checkpoints, found {policy.trainer_store!r}"
        )
    if policy.elastic:
        _check_elastic(key, policy, recipe)
    if policy.overlap >= policy.sync_every:
        raise ValueError(
            f"{key}.overlap: expected 0 to {policy.sync_every - 1} steps, fewer than {key}.sync_every, found "
            f"{policy.overlap}"
        )
    if policy.overlap and policy.in_step:
        raise ValueError(
            f"{key}.overlap: expected trainer_sync pulse, published or diloco with it, found {policy.trainer_sync}, "
            "which exchanges every step"
        )
    if policy.overlap and policy.trainer_store is not None:
        raise ValueError(
            f"{key}.overlap: expected 0 with trainer_store, as one trainer that starts again alone would be "
            f"{policy.overlap} steps behind the others, found {policy.overlap}"
        )
    if recipe.steps % policy.sync_every:
        raise ValueError(
            f"steps: expected whole rounds of the trainers, a multiple of {key}.sync_every ({policy.sync_every}), "
            f"found {recipe.steps}"
        )


def _check_elastic(key: str, policy: PolicyRecipe, recipe: Recipe) -> None:
    if policy.in_step:
        raise ValueError(
            f"{key}.elastic: expected trainer_sync pulse, published or diloco with it, found {policy.trainer_sync}, "
            "which exchanges every step"
        )
    if policy.trainer_store is not None:
        raise ValueError(
            f"{key}.elastic: expected no trainer_store with it, as a round in a store waits for all trainers, found "
            f"{policy.trainer_store!r}"
        )
    if recipe.deterministic:
        raise ValueError(
            f"{key}.elastic: expected false with deterministic = true, as the moment when a trainer is killed decides "
            "which rounds go on without it, found true"
        )
    if policy.overlap:
        raise ValueError(
            f"{key}.elastic: expected overlap 0 with it, as a round may be exchanged again, found {policy.overlap}"
        )


def _checked_view(key: str, pool: PoolRecipe) -> "tuple[str, View] | None":
    """The view of a pool, which its kind of workers can sample with."""
    try:
        found = pool.quantised
    except ValueError as error:
        raise ValueError(f"{key}.view: {error}") from None
    if found is None or pool.kind != "vllm":
        return found
    rule, kind, _, codes = found[1].key
    if (rule, kind) != ("vllm", "channel") and (kind, codes) != ("mx", "fp8"):
        raise ValueError(
            f'{key}.view: expected FP8 by rows, {VIEWS["fp8"]!r}, or MXFP8 with kind = "vllm", which follows no '
            f'other form in place, found {pool.view!r}; kind = "builtin" samples with any'
        )
    return found


def _check_pools(recipe: Recipe) -> None:
    if not recipe.pools:
        raise ValueError("pools: expected at least one table [[pools]], found none")
    _unique("pools", [pool.name for pool in recipe.pools])
    forms: dict[str, View] = {}
    for number, pool in enumerate(recipe.pools):
        key = f"pools[{number}]"
        if (found := _checked_view(key, pool)) is not None:
            name, form = found
            if forms.setdefault(name, form) != form:
                raise ValueError(f"{key}.view: expected {forms[name]}, as {name!r} is in another pool, found {form}")
        _plain_name(f"{key}.name", pool.name)
        for name in pool.policies:
            if name not in recipe.policies:
                raise ValueError(
                    f"{key}.policies: expected names of policies ({', '.join(recipe.policies)}), found {name!r}"
                    f"{registry.near(name, list(recipe.policies))}"
                )
        if missing := sorted(set(recipe.policies) - set(recipe.held_by(pool))):
            raise ValueError(
                f"{key}.policies: expected every policy of the workflow, as a worker plays whole episodes; "
                f"{', '.join(missing)} is missing"
            )
        if pool.view and (full := [name for name, each in recipe.policies.items() if each.sync == "full"]):
            raise ValueError(
                f"policies.{full[0]}.sync: expected patch with a pool that follows a view ({pool.name}), found full"
            )
        if pool.kind == "vllm" and recipe.deterministic:
            raise ValueError(
                f"{key}.kind: expected builtin with deterministic = true, found vllm, whose results depend on what it "
                "has cached"
            )
        if pool.kind == "vllm" and pool.interrupt:
            raise ValueError(
                f'{key}.interrupt: expected false with kind = "vllm", found true: vLLM finishes what it has begun'
            )
        if pool.kind == "vllm" and (full := [name for name, each in recipe.policies.items() if each.sync == "full"]):
            raise ValueError(
                f"policies.{full[0]}.sync: expected patch with a pool of kind vllm ({pool.name}), which follows by "
                "patches, found full"
            )
    if not any(pool.workers for pool in recipe.pools):
        raise ValueError("pools: expected at least one worker in all pools together, found 0")
    scale = recipe.autoscale
    if scale is None:
        return
    if scale.pool and scale.pool not in (pools := [pool.name for pool in recipe.pools]):
        raise ValueError(f"autoscale.pool: expected one of {', '.join(pools)}, found {scale.pool!r}")
    if scale.most < scale.least:
        raise ValueError(f"autoscale.most: expected at least autoscale.least ({scale.least}), found {scale.most}")
    if scale.shrink >= scale.grow:
        raise ValueError(
            f"autoscale.grow: expected a share above autoscale.shrink ({scale.shrink}) and below 1, found {scale.grow}"
        )


def _check_plugins(recipe: Recipe) -> None:
    """Load every plug-in and check its settings. What can be made without the run is made.

    It comes last: importing codecs, losses and data sets takes seconds.
    """
    from pulse_rl.codecs.choose import check as check_codec

    built = workflow.build(recipe.workflow.plugin, seed=recipe.seed, policies=list(recipe.policies))
    if set(built.roles) != recipe.policies.keys():
        raise ValueError(
            f"policies: expected those that workflow {recipe.workflow.name!r} plays with ({', '.join(built.roles)}), "
            f"found {', '.join(recipe.policies)}"
        )
    tools.Toolbox(recipe.tools)
    registry.check("curator", recipe.curator, key="curator", given=("seed",))
    for name, policy in recipe.policies.items():
        key = f"policies.{name}"
        with _under(key):
            check_codec(policy.codec)
        registry.build("loss", policy.loss, key=f"{key}.loss")
        for kind in ("advantage", "filter", "replay"):
            plugin = getattr(policy, kind)
            if plugin is not None:
                registry.check(kind, plugin, key=f"{key}.{kind}", given=("seed",))


@contextmanager
def _under(key: str) -> Iterator[None]:
    """Put a key before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None


def _plain_name(key: str, name: str) -> None:
    """Names become parts of paths, of URLs and of processes' names."""
    if not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{key}: expected a name of letters, digits, - and _, found {name!r}")


def _unique(key: str, given: list[str]) -> None:
    if repeated := next(_repeated(given), None):
        raise ValueError(f"{key}: expected a different name for each, found {repeated!r} twice")


def _repeated(given: list[str]) -> Iterator[str]:
    return (name for number, name in enumerate(given) if name in given[:number])
