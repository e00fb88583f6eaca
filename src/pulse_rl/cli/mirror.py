"""mirror: keep directories of checkpoint folders at the newest version of stores; or the other way round."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulse_rl.cli import output
from pulse_rl.cli.metrics import Metrics, exporting
from pulse_rl.cli.output import AsJson, PublicKeyFile
from pulse_rl.errors import printable
from pulse_rl.units import nbytes, seconds

if TYPE_CHECKING:
    from pulse_rl import Mirrored, PublishReport

_STDERR = 2  # a hook writes there: stdout is for results
_PATIENCE_S = 60.0  # with --once; without it, looks are repeated anyway


def mirror(
    pairs: Annotated[
        list[str],
        typer.Argument(
            metavar="STORE DIR",
            help="A store (directory or URL, or the directory of a run) and the directory for it; any number of pairs.",
            show_default=False,
        ),
    ],
    backwards: Annotated[
        bool, typer.Option("--from", help="The other way: DIR STORE…; publish each folder that appears in DIR.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="The name of a version's folder: v{version:08d} by default, with --from checkpoint-{version}.",
            show_default=False,
        ),
    ] = None,
    marker: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="An empty file in each finished folder, as STABLE; with --from one that the trainer writes last.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Keep this many folders, and delete older ones made here; 2.", show_default=False),
    ] = None,
    hook: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this in a shell after each switch, with PULSE_FOLDER and PULSE_VERSION set.",
            show_default=False,
        ),
    ] = None,
    hook_must_pass: Annotated[
        bool, typer.Option("--hook-must-pass", help="End with exit code 1 when the hook fails.")
    ] = False,
    cast: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="With --from: publish floats in this dtype, as bfloat16.", show_default=False
        ),
    ] = None,
    sign_with: Annotated[
        str | None,
        typer.Option(metavar="PEM", help="With --from: Ed25519 private key to sign by.", show_default=False),
    ] = None,
    public_key: PublicKeyFile = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Write what is held to the store, for `pulse-rl status`.", show_default=False
        ),
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="How often to look.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="End when nothing is new, or with exit code 1 at a failure.")
    ] = False,
    metrics: Metrics = None,
    as_json: AsJson = False,
) -> None:
    """Keep a directory at the newest version of a store, as Hugging Face folders.

    For engines and trainers that load from disk. Each version gets a new
    folder, with config.json and tokenizer. It appears when it is whole and
    proved; the link DIR/current then leads to it. Only patches are read from
    version to version. Stop it with Ctrl-C, or kill it, and start it again whenever you
    like: it continues from the newest folder that is proved.

    With --from, each checkpoint folder that a trainer finishes in DIR becomes a
    version of STORE; the number in its name is the version.

    With --json, stdout gets one JSON document per version, each on a line; with
    --once one document at the end, a list of them.

    Example: pulse-rl mirror s3://bucket/run-a /models/run-a --hook ./reload.sh
    """
    forward = {"--keep": keep, "--hook": hook, "--public-key": public_key, "--heartbeat": heartbeat}
    given = {"--cast": cast, "--sign-with": sign_with} if not backwards else forward
    if wrong := [option for option, value in given.items() if value is not None]:
        raise typer.BadParameter(f"{', '.join(wrong)}: expected {'with' if not backwards else 'without'} --from")
    if len(pairs) % 2:
        raise typer.BadParameter(f"expected pairs of a store and a directory, found {len(pairs)} arguments")
    from pulse_rl import Publisher
    from pulse_rl.folders.looking import look
    from pulse_rl.folders.mirror import Mirror
    from pulse_rl.folders.publish import Folders

    patience = _PATIENCE_S if once else 0.0
    named: dict[str, Any] = {"marker": marker} | ({"name": name} if name else {})
    reader = named | {"public_key": public_key, "heartbeat": heartbeat, "patience": patience}
    reader |= {"keep": keep} if keep is not None else {}
    shown: list[dict[str, Any]] = []
    failed = False
    with ExitStack() as stack:
        stack.enter_context(exporting(metrics))
        stack.enter_context(output.showing_work("mirror"))
        steps: list[Callable[[], Mirrored | PublishReport | None]] = []
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            with output.checking():
                if backwards:
                    publisher = Publisher(output.resolved(target), sign_with=sign_with, patience=patience)
                    steps.append(Folders(source, publisher, cast=cast, **named).publish)
                else:
                    steps.append(stack.enter_context(Mirror(output.resolved(source), target, **reader)).update)
        try:
            results: Iterator[Mirrored | PublishReport] = look(steps, once=once, poll=poll)
            for row in map(_row, results):
                if hook is not None:
                    row["hook"] = _run(hook, row["folder"], row["version"])
                    failed = row["hook"] != 0
                if once:
                    shown.append(row)
                if not as_json:
                    output.write(_line(row))
                elif not once:
                    output.emit(row)
                if failed and hook_must_pass:
                    break
        except KeyboardInterrupt:
            if once:
                raise
    if once and as_json:
        output.emit(shown)
    if failed and hook_must_pass:
        raise typer.Exit(1)


def _row(found: Mirrored | PublishReport) -> dict[str, Any]:
    from pulse_rl import Mirrored

    if isinstance(found, Mirrored):
        return {"folder": str(found.folder), **asdict(found.report)}
    return asdict(found)


def _run(command: str, folder: str, version: int) -> int:
    """Run the hook. Returns its exit code."""
    environment = {**os.environ, "PULSE_FOLDER": folder, "PULSE_VERSION": str(version)}
    # The operator's own command line, to which nothing from a store is added but by variables.
    code = subprocess.run(command, shell=True, env=environment, stdout=_STDERR, check=False).returncode  # noqa: S602
    if code:
        print(f"error: the hook failed for version {version}: exit code {code}", file=sys.stderr)
    return code


def _line(found: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S")
    if "folder" not in found:
        return f"{clock}  published version {found['version']}  sent {nbytes(found['sent_nbytes'])}\n"
    text = f"{clock}  {found['folder']}  version {found['version']}"
    if found["route"] != "none":
        text += f"  read {nbytes(found['fetched_nbytes'])} ({found['route']}) in {seconds(found['total_s'])}"
    return printable(text) + "\n"
