"""What must hold between the settings of a recipe; the bounds of each number are in its type (`recipe`).

Every error names the key, what was expected and what was found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pulse_rl.disk import on_this_machine
from pulse_rl.flow import model_name, registry
from pulse_rl.flow.playing import tools, workflow
from pulse_rl.flow.recipe import VIEWS, PolicyRecipe, PoolRecipe, Recipe

if TYPE_CHECKING:
    from pulse_rl.weights.views.view import View


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
    for setting in ("trainer_store", "elastic", "overlap") if policy.in_step else ():
        if getattr(policy, setting):
            raise ValueError(
                f"{key}.{setting}: expected trainer_sync pulse, published or diloco with it, found "
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
        if pool.policies and (missing := sorted(set(recipe.policies) - set(pool.policies))):
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
