"""`python -m bench NAME`, from the root of the repository: the benchmarks that README.md lists."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from bench.report import show, show_run
from pulse_rl.cli import output
from pulse_rl.cli.app import run_app
from pulse_rl.cli.output import AsJson

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Benchmarks: each measures on this machine, next to its lower bound or to what it replaces.",
    no_args_is_help=True,
)


@app.command()
def kernels(
    elements: Annotated[int, typer.Option(min=1, help="BF16 elements; the default is SmolLM2-135M's.")] = 134_515_008,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Time find_changes, digest and apply, against a copy of the same bytes and against NumPy."""
    from bench.kernels import run

    show_run("kernels", partial(run, elements=elements, rounds=rounds), as_json)


@app.command()
def codec(
    old: Annotated[
        Path | None, typer.Argument(metavar="OLD", help="A safetensors file or a directory of shards.")
    ] = None,
    new: Annotated[Path | None, typer.Argument(metavar="NEW", help="The next version, with the same tensors.")] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead of OLD and NEW: every two consecutive checkpoints in DIR, by name."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Code the changes from OLD to NEW by every codec, by zstd and as XOR, and compare with the entropy bound.

    Runs in one thread and in memory: three times the model, and eight times more
    for zstd, which codes models of up to 1 GiB.
    """
    from bench.codec import CheckpointsResult, consecutive, measure

    if (old is None) != (new is None) or (old is None) == (checkpoints is None):
        raise typer.BadParameter("expected either OLD and NEW or --checkpoints DIR")
    pairs = consecutive(checkpoints) if checkpoints else [(Path(str(old)), Path(str(new)))]
    results = []
    for before, after in pairs:
        with output.progress(f"{before.name} → {after.name}") as update:
            results.append(measure(before, after, rounds=rounds, progress=update))
        if not as_json:
            show(results[-1], as_json)
            output.write("\n")
    if as_json:
        output.emit(CheckpointsResult(tuple(results)) if checkpoints else results[0])


@app.command()
def sync(
    versions: Annotated[int, typer.Option(min=2, help="Versions to publish after the first.")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    codec: Annotated[str, typer.Option(metavar="auto|context|gap", help="The publisher's codec.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Time publish and sync of a 135M-parameter model through a file store, and measure the memory of each side.

    A plain save and load is measured too. Each side is a process. Needs the extra torch.
    """
    from bench.sync import run
    from pulse_rl.codecs.choose import check

    with output.checking():
        check(codec)

    show_run("sync", partial(run, versions=versions, layers=layers, codec=codec), as_json)


@app.command()
def shards(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    width: Annotated[int, typer.Option(min=1, help="How many times as wide as SmolLM2-135M the layers are.")] = 1,
    vocab: Annotated[int, typer.Option(min=16, help="Rows of the embedding.")] = 49152,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Ranks that publish; may be repeated.", show_default="2, 4")
    ] = None,
    versions: Annotated[int, typer.Option(min=2, help="Versions to publish after the first.")] = 5,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="context|gap", help="May be repeated.", show_default="gap, context")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish and receive a model in shares, by 1, 2 and 4 ranks: memory, bytes and processor seconds of a rank.

    The ranks are processes over Gloo on this machine. SmolLM2-135M takes 3 GB of
    memory and 1 GB of disk; --layers 24 --width 2 has 400M elements and takes
    three times as much. Needs the extra torch.
    """
    from bench.shards.run import run
    from pulse_rl.codecs.choose import check

    codecs = codec or ["gap", "context"]
    with output.checking():
        for name in codecs:
            check(name)

    show_run(
        "shards",
        partial(run, layers=layers, width=width, vocab=vocab, ranks=ranks or [2, 4], versions=versions, codecs=codecs),
        as_json,
    )


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="smollm2, or a directory or hub id.")] = "smollm2",
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Take the versions of a run's history, from its first on; otherwise train."),
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="AdamW's learning rate, where it trains.")] = 3e-6,
    versions: Annotated[int, typer.Option(min=1, help="Versions that the engine follows one after the other.")] = 20,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between versions, while requests are counted.")] = 5.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a stretch in which requests are counted.")] = 30.0,
    stretches: Annotated[int, typer.Option(min=1, help="Such stretches with versions, and without.")] = 2,
    view: Annotated[
        bool, typer.Option("--view", help="Only compare pauses: of a server that follows BF16, and of one on a view.")
    ] = False,
    serve: Annotated[
        list[str] | None, typer.Option(metavar="ARGUMENT", help="One more argument of the server; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Have a real vLLM server follow versions in place, next to its own reload and its sparse patches.

    On a CUDA device, or else a CPU. Compares outputs and checksums with a fresh engine. Needs vLLM (make setup-vllm),
    6 GB of memory, 2 GB of disk, and a quarter of an hour on two cores.
    """
    from bench.engine.run import run, run_view

    if view:
        show_run("engine", partial(run_view, model=model, store=store, lr=lr, versions=versions), as_json)
        return
    show_run(
        "engine",
        partial(
            run,
            model=model,
            store=store,
            lr=lr,
            versions=versions,
            every=every,
            seconds=seconds,
            stretches=stretches,
            serve=serve or [],
        ),
        as_json,
    )


@app.command()
def fanout(
    subscribers: Annotated[int, typer.Option(min=1, help="Subscribers of one history; each is a process.")] = 64,
    versions: Annotated[int, typer.Option(min=1, help="Versions to publish after the first.")] = 10,
    elements: Annotated[int, typer.Option(min=1, help="Elements of the model.")] = 4_000_000,
    as_json: AsJson = False,
) -> None:
    """Count and time a publisher's requests to its store, with one subscriber and with many.

    A subscriber is a process of 150 MB and the model. The history is in a directory.
    """
    from bench.fanout import run

    show_run("fanout", partial(run, subscribers=subscribers, versions=versions, elements=elements), as_json)


@app.command()
def flow(
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Workers; may be repeated.", show_default="10, 100, 1000")
    ] = None,
    policies: Annotated[
        list[int] | None, typer.Option(min=1, help="Policies; may be repeated.", show_default="1, 2, 4")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="Simulated hours of each run.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every time and failure.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Simulate a dataflow at size: its real code with simulated engines, against the same work in lockstep.

    Up to a thousand workers and four policies, bounds of staleness, failures, a
    slow region, autoscaling, and what a thousand workers cost a processor.
    Takes a quarter of an hour on one core, a minute with --workers 10 --workers 30.
    """
    from bench.flow.size import run

    show_run(
        "flow",
        partial(run, workers=workers or [10, 100, 1000], policies=policies or [1, 2, 4], hours=hours, seed=seed),
        as_json,
    )


@app.command()
def loco(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of the small policy, each with another seed.")] = 3,
    steps: Annotated[int, typer.Option(min=16, help="Inner steps of each run; a multiple of 16.")] = 512,
    lr: Annotated[float, typer.Option(min=0, help="AdamW's learning rate in these runs.")] = 1e-6,
    sync_every: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Inner steps per round, divisors of 16; may be repeated.", show_default="8"),
    ] = None,
    overlap: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Inner steps that a round takes; may be repeated.", show_default="0"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="One of the methods in the table; may be repeated.", show_default="all, and DDP"),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="sums, differences, noisy sums or noisy differences; may be repeated.",
            show_default="sums, noisy differences",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small policy by DDP, DiLoCo and PULSELoCo with four trainers: reward against bytes.

    The trainers take turns in one process, and each core has another seed. Needs
    half a GB of memory a core, and the extra run. Takes an hour on two cores,
    and minutes with --steps 128.
    """
    from bench.loco.run import check, methods, run

    every, overlaps, names, tasks = (
        sync_every or [8],
        overlap or [0],
        method or [],
        task or ["sums", "noisy differences"],
    )
    with output.checking():
        check(steps, every, overlaps, names, tasks)

    show_run(
        "loco",
        partial(
            run,
            seeds=seeds,
            steps=steps,
            lr=lr,
            chosen=methods(names, every, overlaps),
            tasks=tasks,
        ),
        as_json,
    )


@app.command()
def link(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each worker's link; may be repeated.", show_default="100, 10"),
    ] = None,
    versions: Annotated[
        int,
        typer.Option(
            min=1, help="Versions by each method at each rate; of full checkpoints those that take 2 minutes, or 1."
        ),
    ] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Time a version from publish to proved over narrow links: patches against full checkpoints.

    A publisher, an S3 service and two workers run in network namespaces, which
    nobody else sees and which end with this command. Needs Linux, root, and the
    extras run and dev. Takes about 7 minutes.
    """
    from bench.link.measure import run

    show_run("link", partial(run, rates=rates or [100.0, 10.0], versions=versions, layers=layers), as_json)


@app.command()
def channel(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.0, help="Mbit/s; 0: unthrottled. May be repeated.", show_default="0, 1000, 100"),
    ] = None,
    versions: Annotated[int, typer.Option(min=1, help="Versions by each method at each rate; medians are shown.")] = 5,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model; SmolLM2-135M has 30.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Time a version from send to proved over Gloo: a channel against a broadcast of BF16.

    A sender and a receiver run in network namespaces, which nobody else sees
    and which end with this command. Needs Linux, root, and the extra run.
    Takes about 6 minutes.
    """
    from bench.channel.compare import run

    show_run("channel", partial(run, rates=rates or [0.0, 1000.0, 100.0], versions=versions, layers=layers), as_json)


@app.command()
def trainers(
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.1, help="Mbit/s of each trainer's link; may be repeated.", show_default="100, 10"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of PULSELoCo; of dense methods one.")] = 4,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the model, as wide as those of SmolLM2-135M.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Time a round of four trainers over narrow links: PULSELoCo, DiLoCo and DDP.

    The trainers and an S3 service run in network namespaces, which nobody else
    sees and which end with this command. Needs Linux, root, and the extras run
    and dev. Takes about 10 minutes.
    """
    from bench.trainers.rounds import run

    show_run("trainers", partial(run, rates=rates or [100.0, 10.0], rounds=rounds, layers=layers), as_json)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line with the arguments of sys.argv, or with args. Always raises SystemExit."""
    run_app(app, prog_name="python -m bench", args=args)


if __name__ == "__main__":
    main()
