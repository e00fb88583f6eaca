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
`recipe_file` reads recipes, applies `--set`, and writes them. Here are the types. Every number has bounds in its type,
which hold from the moment at which a recipe is read; `recipe_check` has what must hold between settings.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pulse_rl.flow.directory import POLICIES
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
    policies: list[str] = []  # which they hold: all of them, as a worker plays whole episodes; empty says the same
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
