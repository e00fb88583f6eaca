"""`pulse-rl train` and `pulse-rl rollout`: do a run, or add rollout workers to one."""

import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from pulse_rl.cli import output, recipes
from pulse_rl.cli.summary import print_summary
from pulse_rl.errors import printable

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
    ] = recipes.OUT,
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
            "Without --recipe, of math. May be given several times.",
            rich_help_panel=_RECIPE,
        ),
    ] = None,
    model: Annotated[
        str, _option("smollm2; tiny (random weights, for trying out); or a directory or hub id for Transformers.", _RUN)
    ] = "smollm2",
    dither: Annotated[
        int | None,
        _option(
            "A seed: add noise to smollm2's weights. Its file is quantised, so the weights lie on few levels; noise of "
            "up to half a level spreads them like a trained model's.",
            _RUN,
        ),
    ] = None,
    task: Annotated[
        str,
        _option(
            "The reasoning-gym dataset that gives prompts and rewards. Its settings may follow a colon, as in "
            "chain_sum:max_terms=3,max_digits=2. After a wrong name or setting the command lists the right ones.",
            _RUN,
        ),
    ] = "chain_sum",
    steps: Annotated[
        int,
        _option(
            "Optimizer steps of each trainer in the whole run; with --resume, earlier steps count too. With several "
            "trainers, a multiple of --sync-every.",
            _RUN,
        ),
    ] = 40,
    seed: Annotated[int, _option("Seed of prompts, sampling and random weights.", _RUN)] = 0,
    deterministic: Annotated[
        bool, _option("Run synchronously: the same seed then gives the same bits.", _RUN, "--deterministic")
    ] = False,
    checkpoint_every: Annotated[
        int, _option("Steps between the trainers' checkpoints. The end of the run always writes one.", _RUN)
    ] = 100,
    prompts: Annotated[int, _option("Prompts per step and trainer.", _GRPO)] = 8,
    group_size: Annotated[int, _option("Completions per prompt.", _GRPO)] = 8,
    chunk: Annotated[
        int,
        _option(
            "Prompts that a worker samples at a time, each with all its completions. A smaller chunk spreads a step "
            "over more workers. With --deterministic it is 1.",
            _GRPO,
        ),
    ] = 4,
    max_new_tokens: Annotated[int, _option("Longest completion, in tokens.", _GRPO)] = 8,
    temperature: Annotated[float, _option("Sampling temperature.", _GRPO)] = 1.0,
    lr: Annotated[float, _option("AdamW's learning rate.", _GRPO)] = 3e-6,
    warmup: Annotated[int, _option("Steps in which the learning rate rises linearly to --lr.", _GRPO)] = 0,
    betas: Annotated[tuple[float, float], _option("AdamW's two betas, as in --betas 0.9 0.95.", _GRPO)] = (0.9, 0.999),
    weight_decay: Annotated[float, _option("AdamW's weight decay.", _GRPO)] = 0.0,
    clip: Annotated[float, _option("Clip the probability ratio to 1 − this and 1 + this.", _GRPO)] = 0.2,
    grad_clip: Annotated[float, _option("Clip the gradient to this norm.", _GRPO)] = 1.0,
    max_staleness: Annotated[
        int, _option("Drop completions whose weights are more than this many versions old.", _GRPO)
    ] = 1,
    sync: Annotated[str, _option("What workers read: patch, or full (a checkpoint per version).", _SYNC)] = "patch",
    codec: Annotated[
        str, _option("Codec of patches: context, gap, or auto, the one that reaches workers first.", _SYNC)
    ] = "context",
    store: Annotated[
        str | None, _option("URL or path of the history. Without it: the directory store in --out.", _SYNC)
    ] = None,
    anchor_every: Annotated[int, _option("Versions between full checkpoints.", _SYNC)] = 50,
    trainers: Annotated[
        int,
        _option(
            "Trainers, each with its own prompts. After every round of --sync-every steps they exchange; the result is "
            "published as one version.",
            _TRAINERS,
        ),
    ] = 1,
    trainer_sync: Annotated[
        str,
        _option(
            "What trainers exchange. pulse: few bits of what the forward pass can see, every round (PULSELoCo). "
            "published: the same as published, which learns later. diloco: the whole pseudo-gradient, every round. "
            "ddp: the gradients, every step. fsdp: likewise, and each trainer holds a share of the model.",
            _TRAINERS,
        ),
    ] = "pulse",
    trainer_store: Annotated[
        str | None,
        _option(
            "URL or path of a store through which trainers exchange, instead of over the network. A trainer that is "
            "killed is then started again.",
            _TRAINERS,
        ),
    ] = None,
    elastic: Annotated[
        bool,
        _option(
            "A round goes on without a trainer that is killed; started again, it joins the next one (torchft).",
            _TRAINERS,
            "--elastic",
        ),
    ] = False,
    sync_every: Annotated[int, _option("Steps per round of several trainers, with ddp and fsdp too.", _TRAINERS)] = 8,
    overlap: Annotated[
        int,
        _option(
            "Steps that trainers take while a round is exchanged, fewer than --sync-every. Its version is published "
            "after them. 0: they wait for the exchange.",
            _TRAINERS,
        ),
    ] = 0,
    workers: Annotated[int, _option("Rollout workers, which sample completions.", _ENGINE)] = 2,
    engine: Annotated[
        str,
        _option("What workers sample with: builtin, or vllm (on a CPU; make setup-vllm sets it up).", _ENGINE),
    ] = "builtin",
    threads: Annotated[int, _option("Torch threads of each trainer and of each worker.", _ENGINE)] = 1,
    address: Annotated[
        str | None,
        _option(
            "Run on this Ray cluster: host:port of its head node, or auto for the one of this machine. Every node must "
            "reach --store, and with several trainers --out too. Without it, Ray is started here for this run alone.",
            _ENGINE,
        ),
    ] = None,
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
        if name in (*recipes.SHARED, *recipes.SETTINGS) and context.get_parameter_source(name).name != "DEFAULT"  # type: ignore[union-attr]
    }
    changes: list[str] = []
    # What can be said at once is said before seconds of imports.
    with output.checking():
        if resume is not None:
            if recipe is not None:
                raise ValueError("--recipe: expected a new run, found it beside --resume, which keeps the run's recipe")
            changes = recipes.resumed(resume, sets or [], given)
        else:
            settings = recipes.new(recipe, sets or [], given)
    from pulse_rl.errors import require_installed

    for module in ("torch", "ray", "reasoning_gym"):
        require_installed(module, "run")
    from pulse_rl.flow.driver import run
    from pulse_rl.flow.driver.display import Display

    with output.checking():
        settings = run.prepare(settings) if resume is None else run.resume(resume, changes)
    with Display(f"{settings.name} · {', '.join(settings.policies)} · {settings.out}", settings.steps) as display:
        summary = run.train(settings, display, resume=resume is not None)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        print_summary(summary)
    if stopped := summary["stopped"]:
        raise typer.Exit(128 + signal.Signals[stopped["by"]])


def rollout(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run that is going on.", show_default=False)
    ],
    add: Annotated[int, typer.Option(min=0, help="How many rollout workers to add.")] = 1,
    remove: Annotated[
        int,
        typer.Option(
            min=0,
            help="Instead: how many are to leave the first pool. They finish what they play; one stays.",
        ),
    ] = 0,
) -> None:
    """Add rollout workers to a run that is going on, or let some leave.

    Example: pulse-rl rollout runs/main --add 2
    """
    from pulse_rl.flow.directory import request_workers

    with output.checking():
        request_workers(directory, remove or add, leaving=remove > 0)
    count, what, then = (remove, "fewer", "leave") if remove else (add, "more", "join")
    typer.echo(
        f"asked the run in {printable(str(directory))} for {count} {what} rollout worker{'s' if count > 1 else ''}; "
        f"the terminal of its `pulse-rl train` shows when they {then}, within about 10 s",
        err=True,
    )
