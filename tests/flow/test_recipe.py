"""Recipes: what is refused, and in which words; `--set`; saving and resuming; plug-ins by name and import path."""

import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from typer.testing import CliRunner

from pulse_rl.cli.app import app
from pulse_rl.flow import recipe_file, registry
from pulse_rl.flow.data import service
from pulse_rl.flow.driver import run as driver
from pulse_rl.flow.playing import workflow
from pulse_rl.flow.recipe import AutoscaleRecipe, EvaluationRecipe, PolicyRecipe, PoolRecipe, Recipe, WorkflowRecipe
from pulse_rl.flow.recipe_check import check
from pulse_rl.flow.registry import Plugin

TINY = ("model=tiny",)


def _load(name: str = "math", *sets: str) -> Recipe:
    return recipe_file.load(name, [*TINY, *sets])


@pytest.mark.parametrize("name", recipe_file.built_in())
def test_every_recipe_of_the_package_is_good_and_survives_its_file(name: str, tmp_path: Path) -> None:
    recipe = _load(name, f"out={tmp_path}/run")
    assert recipe.name == name
    recipe_file.save(recipe)
    assert recipe_file.saved(recipe.directory) == recipe


def test_the_recipes_are_the_four_of_the_documentation() -> None:
    assert recipe_file.built_in() == ["math", "solver-verifier", "tool-use", "two-regions"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("policies.verifier.lr=1e-6", lambda r: (r.policies["verifier"].lr, r.policies["solver"].lr) == (1e-6, 3e-6)),
        ("lr=1e-6", lambda r: all(policy.lr == 1e-6 for policy in r.policies.values())),
        ("loss.clip=0.1", lambda r: [p.loss.settings for p in r.policies.values()] == [{"clip": 0.1}] * 2),
        ("workers=3", lambda r: [pool.workers for pool in r.pools] == [3]),
        ("threads=3", lambda r: {each.threads for each in (*r.policies.values(), *r.pools)} == {3}),
        ("steps=3", lambda r: r.steps == 3),
        ("pools.near.workers=5", lambda r: r.pools[0].workers == 5),
        ("pools.0.region=eu", lambda r: r.pools[0].region == "eu"),
        ("workflow.rounds=2", lambda r: r.workflow.settings["rounds"] == 2),
        ("workflow.group_size=4", lambda r: r.workflow.group_size == 4),
        ("policies.solver.loss=dapo", lambda r: r.policies["solver"].loss == Plugin("dapo")),
        ("policies.solver.loss.clip=0.1", lambda r: r.policies["solver"].loss == Plugin("grpo", {"clip": 0.1})),
        ("policies.solver.betas=[0.5, 0.9]", lambda r: r.policies["solver"].betas == (0.5, 0.9)),
        ("tools.python.cpu_s=1", lambda r: r.tools == {"python": Plugin("python", {"cpu_s": 1})}),
        ("autoscale.most=3", lambda r: r.autoscale.most == 3),
        ("policies.verifier.trained=false", lambda r: r.trained == ["solver"]),
    ],
)
def test_set_changes_one_value(text: str, read: Callable[[Recipe], bool]) -> None:
    assert read(_load("solver-verifier", text))


@pytest.mark.parametrize(
    ("sets", "loss"),
    [
        ((), Plugin("grpo")),
        (("pools.worker.view=fp8",), Plugin("tis")),
        (("pools.worker.view=fp8", "pools.worker.kind=vllm"), Plugin("tis")),
        (("pools.worker.view=int8=Int8()",), Plugin("tis")),
        (("pools.worker.view=fp8", "loss=grpo"), Plugin("grpo")),
        (("pools.worker.view=fp8", "loss.clip=0.1"), Plugin("grpo", {"clip": 0.1})),
    ],
)
def test_a_policy_that_is_sampled_with_a_view_is_corrected_unless_a_loss_is_named(
    sets: tuple[str, ...], loss: Plugin
) -> None:
    recipe = _load("math", *sets)
    assert [policy.loss for policy in recipe.policies.values()] == [loss]
    assert recipe_file.to_document(recipe)["policies"]["solver"]["loss"] == loss.to_toml()


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        ("fp8", True),
        ("fp8=Fp8(block='channel', rule='vllm', scales='sticky')", True),
        ("eight=Fp8(block=(1, 32), rule='vllm')", True),
        ("int8=Int8()", False),
        ("four=Fp4(format='mxfp4')", False),
        ("fp8=Fp8(block='channel', rule='compressed-tensors')", False),
        ("fp8=Fp8()", False),
    ],
)
def test_pools_of_vllm_take_the_forms_that_it_follows_in_place(form: str, taken: bool) -> None:
    """And those of the built-in model all of them."""
    assert _load("math", f"pools.worker.view={form}").pools[0].view_name == form.partition("=")[0]
    expected = (
        nullcontext() if taken else pytest.raises(ValueError, match=r"pools\[0\].view: .* kind = .builtin. samples")
    )
    with expected:
        _load("math", f"pools.worker.view={form}", "pools.worker.kind=vllm")


def test_two_pools_with_a_view_of_one_name_have_one_form() -> None:
    pools = [PoolRecipe(name=name, view=view) for name, view in (("near", "fp8"), ("far", "fp8=Fp8()"))]
    with pytest.raises(ValueError, match=r"pools\[1\].view: expected .*channel.*, as 'fp8' is in another pool, found"):
        check(msgspec.structs.replace(_load("math"), pools=pools))


# What is set, and what the sentence must hold: the key, what was expected, what was found.
BAD = [
    ("stesp=3", ["stesp", "did you mean steps"]),
    ("policies.solvr.lr=1", ["policies", "solver", "'solvr'", "did you mean solver?"]),
    ("policies.solver.learning_rate=1", ["policies.solver.learning_rate: ", "found 'learning_rate'; did you mean lr?"]),
    ("learning_rate=1", ["found 'learning_rate'; did you mean policies.NAME.lr?"]),
    ("lerning_rate=1", ["found 'lerning_rate'; did you mean policies.NAME.lr?"]),
    ("wrkers=1", ["found 'wrkers'; did you mean pools.NAME.workers?"]),
    ("steps=0", ["steps: expected a whole number from 1 to 1,000,000,000, found 0"]),
    ("tasks_per_step=0", ["policies.solver.tasks_per_step: expected a whole number from 1 to 65,536, found 0"]),
    ("slots=0", ["pools[0].slots: expected a whole number from 1 to 65,536, found 0"]),
    ("warmup=-1", ["policies.solver.warmup: expected a whole number from 0", "found -1"]),
    ("weight_decay=-0.1", ["policies.solver.weight_decay: expected a number from 0 to 100, found -0.1"]),
    ("dither=1", ["policies.solver.dither: expected it only with the model smollm2"]),
    ("policies.solver.group_size=4", ["found 'group_size'; did you mean workflow.group_size?"]),
    ("policies.solver.threads_=4", ["found 'threads_'; did you mean threads?"]),
    ("colour=1", ["found 'colour'; all are name, seed, steps"]),
    ("policies.solver.lr=abc", ["policies.solver.lr: expected a number above 0 and at most 10, found 'abc'"]),
    ("policies.solver.lr=0", ["policies.solver.lr: expected a number above 0 and at most 10, found 0"]),
    ("policies.solver.lr=nan", ["policies.solver.lr: expected a number above 0", "found nan"]),
    ("policies.solver.betas=[0.9]", ["policies.solver.betas: expected 2 numbers from 0 to below 1, found [0.9]"]),
    ("pools.worker.policies=[1]", ["pools[0].policies: expected a list of strings, found [1]"]),
    ("policies.solver.betas=[0.9, 1.0]", ["policies.solver.betas", "below 1"]),
    ("policies.solver.trained=1", ["policies.solver.trained: expected true or false, found 1"]),
    ("policies.solver.trained=false", ["policies: expected at least one with trained = true"]),
    ("policies.solver.order=lifo", ["policies.solver.order: expected task or deadline or newest, found 'lifo'"]),
    ("policies.solver.sync=half", ["policies.solver.sync: expected patch or full, found 'half'"]),
    ("policies.solver.codec=zip", ["policies.solver.codec: expected one of", "'zip'"]),
    ("policies.solver.model=/nowhere", ["policies.solver.model", "'/nowhere'"]),
    ("policies.solver.loss=gspoo", ["policies.solver.loss", "did you mean gspo"]),
    ("policies.solver.loss.clipp=1", ["policies.solver.loss: 'grpo' has no setting 'clipp'", "did you mean clip?"]),
    ("policies.solver.loss.clip=-1", ["policies.solver.loss: clip: expected more than 0, found -1"]),
    ("policies.solver.replay=recent", ["policies.solver.replay_ratio", "with one"]),
    ("policies.solver.replay_ratio=1.0", ["policies.solver.replay_ratio", "below 1"]),
    ("policies.solver.filter=variants", ["policies.solver.filter", "did you mean variance?"]),
    ("policies.solver.trainers=0", ["policies.solver.trainers: expected a whole number from 1 to 10,000, found 0"]),
    ("policies.solver.threads=0", ["policies.solver.threads: expected a whole number from 1", "found 0"]),
    ("policies.solver.trainer_sync=ddp", ["policies.solver.trainer_sync", "trainers of at least 2", "found 1"]),
    ("policies.solver.sync_every=4", ["policies.solver.sync_every", "trainers of at least 2", "found 1"]),
    ("policies.solver.elastic=true", ["policies.solver.elastic", "trainers of at least 2", "found 1"]),
    ("policies.solver.overlap=1", ["policies.solver.overlap", "trainers of at least 2", "found 1"]),
    ("policies.solver.trainer_sync=pigeon", ["policies.solver.trainer_sync: expected pulse or", "'pigeon'"]),
    ("workflow.name=maths", ["workflow", "did you mean math?"]),
    ("workflow.name=json:loads", ["workflow", "an async function"]),
    ("workflow.name=nowhere.at_all:x", ["workflow", "nowhere.at_all cannot be imported"]),
    ("workflow.name=json:nothing", ["workflow", "module json has no nothing"]),
    ("workflow.name=solver-verifier", ["policies", "solver, verifier", "found solver"]),
    ("workflow.task=1", ["workflow.task: expected a string, found 1"]),
    ("policies.solver.loss.clip=high", ["policies.solver.loss.clip: expected a number, found 'high'"]),
    ("tools.python.cpu_s=1.5", ["tools.python.cpu_s: expected a whole number, found 1.5"]),
    ("curator.problems=[1]", ["curator.problems: expected a whole number, found [1]"]),
    ("workflow.tusk=1", ["workflow: 'math' has no setting 'tusk'", "did you mean task?"]),
    ("workflow.task=chain_summ", ["workflow: task", "did you mean chain_sum"]),
    ("workflow.reward=scores", ["workflow: reward", "did you mean score?"]),
    ("workflow.group_size=1", ["workflow.group_size: expected a whole number from 2 to 4,096, found 1"]),
    ("workflow=3", ["workflow: expected a table, found 3"]),
    ("tools.python.cpu=1", ["tools.python: 'python' has no setting 'cpu'", "cpu_s"]),
    ("tools.web=web", ["tools.web: expected calculator, python"]),
    ("curator=everything", ["curator: expected all"]),
    ("curator.problem=1", ["curator: 'all' has no setting 'problem'", "did you mean problems?"]),
    ("curator=drop_solved", ["curator: 'drop_solved' needs its setting 'problems'"]),
    ("pools=3", ["pools: expected tables [[pools]], found 3"]),
    ("pools.far.workers=1", ["--set pools.far.workers=1: expected one of worker, found 'far'"]),
    ("pools.worker.view=int4", ["pools[0].view: expected NAME=FORM with settings by name", "found 'int4'"]),
    (
        "pools.worker.view=a/b=Int8()",
        ["pools[0].view: a/b=Int8(): view: expected a name of at most 64 letters", "'a/b'"],
    ),
    ("pools.worker.view=x=Fp8(block='row')", ["pools[0].view: x=Fp8(block='row'): block: expected", "'row'"]),
    ("pools.worker.workers=0", ["pools: expected at least one worker"]),
    ("pools.worker.kind=sglang", ["pools[0].kind: expected builtin or vllm, found 'sglang'"]),
    ('pools.worker.policies=["solvers"]', ["pools[0].policies", "'solvers'", "did you mean solver?"]),
    ("autoscale.pool=far", ["autoscale.pool: expected one of worker, found 'far'"]),
    ("autoscale.grow=0.01", ["autoscale.grow: expected a share above autoscale.shrink"]),
    ('evaluation=[{name = "a@b"}]', ["evaluation[0].name: expected a name of letters", "'a@b'"]),
    ("evaluation=[{every = 0}]", ["evaluation[0].every: expected a whole number from 1", "found 0"]),
    ("out=s3://bucket/run", ["out: expected a directory of this machine, found a URL, s3://…"]),
    ("store=memory://x", ["store", "memory://"]),
    ("steps", ["--set", "key=value", "'steps'"]),
    ("steps.x=1", ["--set steps.x=1: expected a table at steps, found 40"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD, ids=[text for text, _ in BAD])
def test_a_bad_setting_is_one_sentence_that_names_the_key(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        _load("math", text)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["steps=12"], r"steps: expected whole rounds .* policies.solver.sync_every \(8\), found 12"),
        (["policies.solver.trained=false"], r"policies.solver.trainers: expected 1 .* not trained, found 2"),
        (["policies.solver.trainer_store=memory://"], r"policies.solver.trainer_store: .* memory://"),
        (
            ["policies.solver.trainer_store=a", "policies.solver.trainer_sync=ddp"],
            r"policies.solver.trainer_store: expected trainer_sync pulse, .* found ddp",
        ),
        (
            ["policies.verifier.trainers=2", "policies.solver.trainer_store=a", "policies.verifier.trainer_store=a"],
            "policies: expected a different trainer_store for each, found 'a' twice",
        ),
        (
            ["policies.solver.trainer_store=a", "deterministic=true"],
            "policies.solver.trainer_store: expected none with deterministic = true, .* found 'a'",
        ),
        (["policies.solver.overlap=8"], "policies.solver.overlap: expected 0 to 7 steps, .* found 8"),
        (["policies.solver.overlap=-1"], "policies.solver.overlap: expected a whole number from 0 .* found -1"),
        (
            ["policies.solver.overlap=2", "policies.solver.trainer_sync=ddp"],
            "policies.solver.overlap: expected trainer_sync pulse, .* found ddp",
        ),
        (
            ["policies.solver.overlap=2", "policies.solver.trainer_store=a"],
            "policies.solver.overlap: expected 0 with trainer_store, .* found 2",
        ),
        (
            ["policies.solver.elastic=true", "policies.solver.trainer_sync=fsdp"],
            "policies.solver.elastic: expected trainer_sync pulse, .* found fsdp",
        ),
        (
            ["policies.solver.elastic=true", "policies.solver.trainer_store=a"],
            "policies.solver.elastic: expected no trainer_store with it, .* found 'a'",
        ),
        (
            ["policies.solver.elastic=true", "deterministic=true"],
            "policies.solver.elastic: expected false with deterministic = true, .* found true",
        ),
        (
            ["policies.solver.elastic=true", "policies.solver.overlap=2"],
            "policies.solver.elastic: expected overlap 0 with it, .* found 2",
        ),
    ],
)
def test_trainers_that_do_not_fit_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _load("solver-verifier", "policies.solver.trainers=2", *sets)


def test_a_policy_of_several_trainers_goes_in_rounds() -> None:
    sets = ("trainers=4", "sync_every=5", "trainer_store=meet", "threads=2")
    recipe = _load("solver-verifier", *(f"policies.solver.{text}" for text in sets)).with_absolute_paths()
    assert [policy.round_steps for policy in recipe.policies.values()] == [5, 1]
    given = service.settings(recipe, "solver")
    assert given is not None
    assert (given.ranks, given.round_steps, given.overlap, given.batches) == (4, 5, 0, 20)
    assert recipe.policies["solver"].trainer_store == str(Path("meet").absolute())


def test_rounds_with_overlap_end_when_the_exchange_has() -> None:
    recipe = _load("math", *(f"policies.solver.{text}" for text in ("trainers=2", "sync_every=4", "overlap=3")))
    given, settings = recipe.policies["solver"], service.settings(recipe, "solver")
    assert settings is not None
    assert [given.round_end(step) for step in (0, 7, 11)] == [7, 11, 15]
    assert [settings.batches_from(step) for step in (0, 7, 11)] == [2 * 7, 2 * 4, 2 * 4]
    assert given.round_end(8) == 15  # where a run ended, and goes on with more steps


def test_a_pool_without_a_policy_of_the_workflow_is_refused() -> None:
    with pytest.raises(ValueError, match="verifier is missing"):
        _load("solver-verifier", 'pools.near.policies=["solver"]')


def test_a_deterministic_run_takes_no_engine_with_a_cache() -> None:
    with pytest.raises(ValueError, match=r"pools\[0\].kind: expected builtin"):
        _load("math", "deterministic=true", "pools.worker.kind=vllm")


def test_an_engine_follows_by_patches_and_finishes_what_it_has_begun() -> None:
    with pytest.raises(ValueError, match=r"pools\[0\].interrupt: expected false"):
        _load("math", "pools.worker.kind=vllm", "pools.worker.interrupt=true")
    with pytest.raises(ValueError, match=r"policies.solver.sync: expected patch"):
        _load("math", "pools.worker.kind=vllm", "sync=full")


def test_a_recipe_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean tool-use"):
        recipe_file.load("tool_use")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ValueError, match=r"bad.toml: expected TOML"):
        recipe_file.load(tmp_path / "bad.toml")


def test_every_type_in_a_recipe_has_a_word_for_errors() -> None:
    for kind in (Recipe, PolicyRecipe, PoolRecipe):
        for name in kind.__struct_fields__:
            if name in ("policies", "tools", "workflow", "pools", "autoscale", "evaluation"):
                continue
            with pytest.raises(ValueError, match=f"{name}: expected"):
                recipe_file._field(kind, name, [object()], name)


def _numbers(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """The fields of a table that hold numbers, with their types."""
    hints = get_type_hints(kind, include_extras=True)
    plain = get_type_hints(kind)
    return [
        (name, hint)
        for name, hint in hints.items()
        if {int, float} & {plain[name], *get_args(plain[name])} and name != "settings"
    ]


@pytest.mark.parametrize("kind", [Recipe, PolicyRecipe, WorkflowRecipe, PoolRecipe, AutoscaleRecipe, EvaluationRecipe])
@pytest.mark.parametrize("value", [-(10**30), 10**30, -1e300, 1e300, float("inf"), float("-inf"), float("nan")])
def test_every_number_of_a_recipe_has_bounds(kind: type[msgspec.Struct], value: float) -> None:
    """No number that a keyboard can give starts a run for ever, or one that no machine can hold."""
    for name, hint in _numbers(kind):
        given = [value, value] if get_origin(hint) is tuple else value
        with pytest.raises(ValueError, match=rf"^{name}: expected (a|2|a whole) numbers? (from|above) "):
            recipe_file._field(kind, name, given, name)


@pytest.mark.parametrize("text", ["workflow.group_size=1000000000", "steps=99999999999999999999", "seed=-1"])
def test_a_number_out_of_bounds_is_refused_when_the_recipe_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(workflow.group_size|steps|seed): expected a whole number from \d"):
        _load("math", text)


def test_every_other_name_of_a_setting_leads_to_one() -> None:
    for other, name in recipe_file.OTHERS.items():
        with pytest.raises(ValueError, match=rf"found '{other}'; did you mean (\S+ or )*(\S+\.)?{name}\b"):
            _load("math", f"{other}=1")


def test_resuming_keeps_the_recipe(tmp_path: Path) -> None:
    recipe = _load("two-regions", f"out={tmp_path}/run")
    recipe_file.save(recipe)
    later = recipe_file.resumed(recipe.directory, ["steps=80", "pools.far.workers=3"])
    assert (later.steps, later.pools[1].workers) == (80, 3)
    assert msgspec.structs.replace(later, steps=40, pools=recipe.pools) == recipe
    with pytest.raises(ValueError, match=r"only steps, .* found policies.solver.lr"):
        recipe_file.resumed(recipe.directory, ["policies.solver.lr=1"])
    with pytest.raises(FileNotFoundError):
        recipe_file.resumed(tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_goes_on_with_the_views_that_it_had(tmp_path: Path, *, deterministic: bool) -> None:
    """Its open round names versions that were published without another one: its workers would never read them."""
    recipe = _load("math", f"out={tmp_path}/run", f"deterministic={str(deterministic).lower()}")
    recipe_file.save(recipe)
    assert recipe_file.resumed(recipe.directory, ["pools.0.workers=3"]).pools[0].workers == 3
    with pytest.raises(ValueError, match="expected no other view") if deterministic else nullcontext():
        assert recipe_file.resumed(recipe.directory, ["pools.0.view=fp8"]).pools[0].view == "fp8"


def test_the_path_of_a_run_is_absolute_for_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = _load("math", "out=runs/x", "store=kept").with_absolute_paths()
    monkeypatch.chdir("/")
    assert recipe.directory == tmp_path / "runs/x"
    assert recipe.store_url("solver") == str(tmp_path / "kept")


def test_one_policy_has_the_run_s_directory_and_several_have_theirs_in_it(tmp_path: Path) -> None:
    one, two = (_load(name, f"out={tmp_path}") for name in ("math", "solver-verifier"))
    assert (one.files("solver"), one.store_url("solver")) == (tmp_path, (tmp_path / "store").as_uri())
    assert two.files("verifier") == tmp_path / "policies" / "verifier"
    assert two.store_url("verifier") == (tmp_path / "store").as_uri() + "/verifier"


def test_a_document_of_nothing_is_no_recipe() -> None:
    with pytest.raises(ValueError, match="policies: expected at least one table"):
        check(recipe_file.parse(tomllib.loads("")))


async def dice(problem: int, policies: Any, tools: Any, random: Any, *, sides: int = 6) -> None:
    """A plug-in of this module."""


class Taking:
    """A plug-in that takes any setting, and needs one."""

    def __init__(self, needed: int, **others: int) -> None:
        self.given = {"needed": needed, **others}


def test_plugins_by_import_path() -> None:
    here = __name__
    assert isinstance(
        workflow.build(Plugin(f"{here}:dice", {"sides": 20}), seed=1, policies=["player"]), workflow.FunctionWorkflow
    )
    built = registry.build("curator", Plugin(f"{here}:Taking", {"needed": 1, "more": 2}))
    assert built.given == {"needed": 1, "more": 2}
    with pytest.raises(ValueError, match=r"key: .*needs its setting 'needed'"):
        registry.check("curator", Plugin(f"{here}:Taking"), key="key")
    with pytest.raises(ValueError, match=r"key: .*no setting 'side'.*did you mean sides"):
        registry.check("workflow", Plugin(f"{here}:dice", {"side": 3}), key="key")


def test_plugins_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "dicing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dicing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pulse_rl.plugins.workflow]\ndice = {__name__}:dice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "dice" in registry.names("workflow")
    assert registry.load("workflow", "dice") is dice


def test_a_plugin_that_cannot_be_parsed_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_plugin.py").write_text("FINE = 1\ndef torn(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"torn_plugin cannot be imported: .*torn_plugin\.py, line 2"):
        registry.load("workflow", "torn_plugin:torn")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, found in registry.BUILTIN.items() for name in found],
)
def test_every_plugin_of_the_package_is_there(kind: str, name: str) -> None:
    assert callable(registry.load(kind, name))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["mth"], ["did you mean math?"]),
        (["math", "--steps", "0"], ["steps: expected a whole number from 1", "found 0"]),
        (["--lr", "nan"], ["policies.solver.lr: expected a number above 0 and at most 10, found 'NaN'"]),
        (["--engine", "sglang"], ["pools[0].kind: expected builtin or vllm, found 'sglang'"]),
        (["math", "--set", "lr"], ["--set: expected key=value"]),
        (["--set", "lr"], ["--set: expected key=value"]),
        (["math", "--resume", "."], ["--resume: expected no recipe beside it", "found 'math'"]),
        (
            ["--trainers", "2", "--set", "overlap=8"],
            ["overlap: expected 0 to 7 steps, fewer than"],
        ),
        (["--trainers", "2", "--steps", "10"], ["steps: expected whole rounds", "sync_every (8), found 10"]),
    ],
)
def test_the_command_refuses_before_anything_starts(
    options: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["train", *options])
    assert done.exit_code == 2
    assert all(word in done.output for word in words), done.output
    assert not list(tmp_path.iterdir())


def _settings(monkeypatch: pytest.MonkeyPatch, *options: str) -> Recipe:
    """What a command line asks for; nothing is run."""
    found: list[Recipe] = []

    def prepare(recipe: Recipe) -> Recipe:
        found.append(recipe)
        raise ValueError("seen")

    monkeypatch.setattr(driver, "prepare", prepare)
    done = CliRunner().invoke(app, ["train", *options])
    assert "seen" in done.output, done.output
    return found[0]


def test_options_are_settings_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("--steps", "8", "--seed", "7", "--store", "b", "--out", "a", "--deterministic")
    policy = ("--model", "tiny", "--trainers", "2", "--lr", "1e-3")
    found = _settings(monkeypatch, "two-regions", *run, *policy, "--workers", "3", "--engine", "builtin")
    sets = ["steps=8", "seed=7", "store=b", "out=a", "deterministic=true"]
    sets += ["model=tiny", "trainers=2", "lr=1e-3", "workers=3", "kind=builtin"]
    assert found == recipe_file.load("two-regions", sets)
    assert [pool.workers for pool in found.pools] == [3, 3]
    assert (found.policies["solver"].trainers, found.seed, found.store, found.out) == (2, 7, "b", "a")


def test_set_comes_after_the_other_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = _settings(monkeypatch, "--set", "lr=2e-6", "--lr", "1e-6", "--model", "tiny")
    assert found == recipe_file.load("math", ["model=tiny", "lr=2e-6"])


def test_a_run_keeps_its_recipe_and_may_have_other_workers(tmp_path: Path) -> None:
    recipe = _load("math", f"out={tmp_path / 'run'}", "lr=1e-3")
    recipe_file.save(recipe)
    later = recipe_file.resumed(recipe.directory, ["workers=3", "threads=2", "steps=80"])
    assert (later.pools[0].workers, later.pools[0].threads, later.policies["solver"].threads) == (3, 2, 2)
    assert (later.steps, later.directory, later.policies["solver"].lr) == (80, recipe.directory, 1e-3)
    for fixed in ("name=other", "out=elsewhere", "policies.solver.lr=1", "seed=1"):
        with pytest.raises(ValueError, match=f"found {fixed.partition('=')[0]}$"):
            recipe_file.resumed(recipe.directory, [fixed])


def test_a_run_that_is_continued_from_elsewhere_keeps_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin another history, in a directory of the same relative path."""
    monkeypatch.chdir(tmp_path)
    recipe_file.save(_load("math", "out=run", "store=histories/a"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert recipe_file.resumed(Path("../run")).base_url == str(tmp_path / "histories" / "a")


def test_a_run_of_an_older_release_is_refused(tmp_path: Path) -> None:
    recipe_file.save(_load("math", f"out={tmp_path}/math"))
    (tmp_path / "math" / "policies" / "solver").mkdir(parents=True)
    with pytest.raises(ValueError, match="found one of an older release"):
        recipe_file.saved(tmp_path / "math")


def test_a_default_directory_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe_file.save(_load("math"))
    assert _settings(monkeypatch, "--model", "tiny").out == "runs/math-2"
    assert _settings(monkeypatch, "--model", "tiny", "--out", "runs/math").out == "runs/math"
