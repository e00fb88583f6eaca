"""`pulse-rl train` and `pulse-rl rollout`: do a run, or add rollout workers to one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse_rl.cli import output, recipes
from pulse_rl.errors import printable
from pulse_rl.rl.config import RunConfig, check, resumed

if TYPE_CHECKING:
    from rich.table import Table

_D = RunConfig()
_RUN, _RECIPE, _GRPO, _SYNC, _TRAINERS, _ENGINE = "Run", "Recipe", "GRPO", "Weights", "Several trainers", "Engine"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def train(
    context: typer.Context,
    out: Annotated[
        str,
        _option(
            "Directory of the run and its store. If the default holds a run already, a number is added.",
            _RUN,
        ),
    ] = _D.out,
    resume: Annotated[
        Path | None, _option("Continue the run in this directory, with the settings it has.", _RUN)
    ] = None,
    recipe: Annotated[
        str | None,
        _option(
            "Do the run of a recipe, with one policy or several, workflows and pools: math, solver-verifier, tool-use, "
            "two-regions, or a TOML file. It has all settings, so most other options are refused beside it.",
            _RECIPE,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of the recipe, as in policies.solver.lr=1e-6, pools.near.workers=4 or model=tiny. "
            "May be given several times.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    model: Annotated[
        str, _option("smollm2; tiny (random weights, for trying out); or a directory or hub id for Transformers.", _RUN)
    ] = _D.model,
    dither: Annotated[
        int | None,
        _option(
            "A seed: add noise to smollm2's weights. Its file is quantised, so the weights lie on few levels; noise of "
            "up to half a level spreads them like a trained model's.",
            _RUN,
        ),
    ] = _D.dither,
    task: Annotated[
        str,
        _option(
            "The reasoning-gym dataset that gives prompts and rewards. Its settings may follow a colon, as in "
            "chain_sum:max_terms=3,max_digits=2. After a wrong name or setting the command lists the right ones.",
            _RUN,
        ),
    ] = _D.task,
    steps: Annotated[
        int,
        _option(
            "Optimizer steps of each trainer in the whole run; with --resume, earlier steps count too. With several "
            "trainers, a multiple of --sync-every.",
            _RUN,
        ),
    ] = _D.steps,
    seed: Annotated[int, _option("Seed of prompts, sampling and random weights.", _RUN)] = _D.seed,
    deterministic: Annotated[
        bool, _option("Run synchronously: the same seed then gives the same bits.", _RUN, "--deterministic")
    ] = _D.deterministic,
    checkpoint_every: Annotated[
        int, _option("Steps between the trainers' checkpoints. The end of the run always writes one.", _RUN)
    ] = _D.checkpoint_every,
    prompts: Annotated[int, _option("Prompts per step and trainer.", _GRPO)] = _D.prompts,
    group_size: Annotated[int, _option("Completions per prompt.", _GRPO)] = _D.group_size,
    chunk: Annotated[
        int,
        _option(
            "Prompts that a worker samples at a time, each with all its completions; --prompts must be a multiple. A "
            "smaller chunk spreads a step over more workers.",
            _GRPO,
        ),
    ] = _D.chunk,
    max_new_tokens: Annotated[int, _option("Longest completion, in tokens.", _GRPO)] = _D.max_new_tokens,
    temperature: Annotated[float, _option("Sampling temperature.", _GRPO)] = _D.temperature,
    lr: Annotated[float, _option("AdamW's learning rate.", _GRPO)] = _D.lr,
    warmup: Annotated[int, _option("Steps in which the learning rate rises linearly to --lr.", _GRPO)] = _D.warmup,
    betas: Annotated[tuple[float, float], _option("AdamW's two betas, as in --betas 0.9 0.95.", _GRPO)] = _D.betas,
    weight_decay: Annotated[float, _option("AdamW's weight decay.", _GRPO)] = _D.weight_decay,
    clip: Annotated[float, _option("Clip the probability ratio to 1 − this and 1 + this.", _GRPO)] = _D.clip,
    grad_clip: Annotated[float, _option("Clip the gradient to this norm.", _GRPO)] = _D.grad_clip,
    max_staleness: Annotated[
        int, _option("Drop completions whose weights are more than this many versions old.", _GRPO)
    ] = _D.max_staleness,
    sync: Annotated[str, _option("What workers read: patch, or full (a checkpoint per version).", _SYNC)] = _D.sync,
    codec: Annotated[
        str, _option("Codec of patches: context, gap, or auto, the one that reaches workers first.", _SYNC)
    ] = _D.codec,
    store: Annotated[
        str | None, _option("URL or path of the history. Without it: the directory store in --out.", _SYNC)
    ] = _D.store,
    anchor_every: Annotated[int, _option("Versions between full checkpoints.", _SYNC)] = _D.anchor_every,
    trainers: Annotated[
        int,
        _option(
            "Trainers, each with its own prompts. After every round of --sync-every steps they exchange; the result is "
            "published as one version.",
            _TRAINERS,
        ),
    ] = _D.trainers,
    trainer_sync: Annotated[
        str,
        _option(
            "What trainers exchange. pulse: few bits of what the forward pass can see, every round (PULSELoCo). "
            "published: the same as published, which learns later. diloco: the whole pseudo-gradient, every round. "
            "ddp: the gradients, every step.",
            _TRAINERS,
        ),
    ] = _D.trainer_sync,
    trainer_store: Annotated[
        str | None,
        _option(
            "URL or path of a store through which trainers exchange, instead of over the network. A trainer that is "
            "killed is then started again.",
            _TRAINERS,
        ),
    ] = _D.trainer_store,
    sync_every: Annotated[
        int, _option("Steps per round of several trainers, with ddp too.", _TRAINERS)
    ] = _D.sync_every,
    workers: Annotated[int, _option("Rollout workers, which sample completions.", _ENGINE)] = _D.workers,
    engine: Annotated[
        str,
        _option("What workers sample with: builtin, or vllm (on a CPU; make setup-vllm sets it up).", _ENGINE),
    ] = _D.engine,
    threads: Annotated[int, _option("Torch threads of each trainer and of each worker.", _ENGINE)] = _D.threads,
    address: Annotated[
        str | None,
        _option(
            "Run on this Ray cluster: host:port of its head node, or auto for the one of this machine. Every node must "
            "reach --store, and with several trainers --out too. Without it, Ray is started here for this run alone.",
            _ENGINE,
        ),
    ] = _D.address,
    as_json: Annotated[bool, _option("Print the summary as JSON on stdout.", _RUN, "--json")] = False,
) -> None:
    """Post-train a language model by GRPO; rollout workers follow the trainer by lossless patches.

    Rollout workers are separate processes. They read weights only from the
    run's store, and prove that every version has the trainer's bits. Ctrl-C
    stops the run after its current step; --resume continues it.

    Try it out in half a minute: pulse-rl train --model tiny --steps 5 --out runs/try

    Train with four trainers: pulse-rl train --model tiny --trainers 4 --out runs/four

    Train on longer sums: pulse-rl train --task chain_sum:max_terms=3 --steps 200 --out runs/sums

    Continue that run: pulse-rl train --resume runs/sums --steps 400

    Two policies that learn together: pulse-rl train --recipe solver-verifier
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in RunConfig.__struct_fields__ and context.get_parameter_source(name).name != "DEFAULT"  # type: ignore[union-attr]
    }
    if recipe is not None or sets or (resume is not None and recipes.begun(resume)):
        recipes.train(recipe, resume, sets or [], given, as_json)
        return
    # What can be said at once is said before seconds of imports.
    with output.checking():
        if resume is not None:
            config = resumed(resume, given)
        else:
            config = check(RunConfig(**{"out": recipes.numbered(_D.out)} | given))
            if recipes.begun(config.directory):
                raise ValueError(f"out: expected a directory without a run, found the run of a recipe in {config.out}")
    from pulse_rl.errors import require

    for module in ("torch", "ray", "reasoning_gym"):
        require(module, "run")
    if config.engine == "vllm":
        require("vllm", "vllm")
    from pulse_rl.rl import run
    from pulse_rl.rl.display import Display

    with output.checking():
        if resume is not None:
            config = run.resume(resume, given)
        else:
            config = run.prepare(config)
    with Display(f"{config.model} · {config.task} · {config.sync} · {config.out}", config.steps) as display:
        summary = run.train(config, display, resume=resume is not None)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print_summary(summary)


def rollout(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run that is going on.", show_default=False)
    ],
    add: Annotated[int, typer.Option(min=0, help="How many rollout workers to add.")] = 1,
    remove: Annotated[
        int,
        typer.Option(
            min=0,
            help="Instead: how many are to leave the first pool of a recipe's run. They finish what they play; one "
            "stays.",
        ),
    ] = 0,
) -> None:
    """Add rollout workers to a run that is going on, or let some leave.

    Example: pulse-rl rollout runs/main --add 2
    """
    from pulse_rl.rl.directory import request_workers

    with output.checking():
        request_workers(directory, remove or add, leaving=remove > 0)
    count, what, then = (remove, "fewer", "leave") if remove else (add, "more", "join")
    typer.echo(
        f"asked the run in {printable(str(directory))} for {count} {what} rollout worker{'s' if count > 1 else ''}; "
        f"the terminal of its `pulse-rl train` shows when they {then}, within about 10 s",
        err=True,
    )


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pulse_rl.units import nbytes

    table = Table(title="Summary", show_header=False, title_justify="left")
    steps = summary["steps"]
    if steps:
        table.add_row("steps", f"{steps}, {summary['seconds']:.0f} s")
        table.add_row("reward", _reward_change(summary["reward"]))
        sent = summary["patch_nbytes"]
        versions, unit = len(sent), "version" if summary["trainer_sync"] else "step"
        density = sum(summary["density"]) / versions
        table.add_row("density", f"{density:.3%} of {summary['elements']:,} weights per {unit}")
        table.add_row(
            "bytes per version", f"{nbytes(sum(sent) / versions)} instead of {nbytes(summary['full_nbytes'])}"
        )
        table.add_row("reduction", f"{summary['reduction']:.0f}×")
        if summary["trainer_sync"]:
            _add_exchange(table, summary["trainer_sync"])
    table.add_row("trainer", f"version {summary['trainer_version']}, digest {summary['trainer_digest']}")
    for worker in summary["workers"]:
        proof = "bit-identical" if worker["verified"] else "NOT IDENTICAL"
        restarts = f", restarted {worker['restarts']} ×" if worker["restarts"] else ""
        table.add_row(
            escape(printable(worker["id"])),
            f"version {worker['version']}, digest {worker['digest']}: {proof}{restarts}",
        )
    directory = Path(summary["run"])
    here = directory.is_relative_to(Path.cwd())
    table.add_row("run", escape(printable(str(directory.relative_to(Path.cwd()) if here else directory))))
    Console().print(table)


def _add_exchange(table: "Table", sync: dict[str, Any]) -> None:
    """What the trainers sent each other, against DiLoCo's bytes and DDP's in the same steps."""
    from pulse_rl.units import nbytes

    each = sum(map(sum, sync["sent_nbytes"])) / (sync["rounds"] * sync["trainers"])
    same = "the same weights after each" if sync["digests_equal"] else "NOT THE SAME WEIGHTS"
    table.add_row(
        "trainers", f"{sync['trainers']}, {sync['mode']}: {sync['rounds']} round{'s' * (sync['rounds'] > 1)}, {same}"
    )
    table.add_row(
        "sent by each", f"{nbytes(each)} per round: {sum(sync['density']) / sync['rounds']:.3%} of the weights"
    )
    table.add_row("instead of", f"DiLoCo's {nbytes(sync['dense_nbytes'])}: {_times(sync['reduction_vs_diloco'])}")
    table.add_row("", f"DDP's {nbytes(sync['ddp_nbytes'])}: {_times(sync['reduction_vs_ddp'])}")


def _times(factor: float) -> str:
    return f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"


def _reward_change(rewards: list[float]) -> str:
    """The mean of the first quarter of the steps and of the last; of fewer than four steps, each reward."""
    if len(rewards) < 4:
        return " → ".join(f"{reward:.3f}" for reward in rewards) + " (each step)" * (len(rewards) > 1)
    quarter = len(rewards) // 4
    head, tail = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    return f"{head:.3f} (first quarter) → {tail:.3f} (last)"
