"""diff, apply, inspect and verify: the verbs on files and stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pulse_rl.cli import output
from pulse_rl.cli.output import AsJson
from pulse_rl.errors import printable
from pulse_rl.units import count, nbytes

if TYPE_CHECKING:
    from pulse_rl import PatchInfo
    from pulse_rl.history.operate.describe import CheckpointInfo, StoreInfo

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE|STORE",
        help="A patch, a safetensors file, a directory of shards, a store (directory or URL), or a run directory.",
        show_default=False,
        callback=output.resolved,
    ),
]


# The result without problems, by kind. Only a store holds what its bits can be proved against.
SOUND = {
    "applied": "intact, and leads from these weights to its target, by the 64-bit digests of both",
    "patch": "intact; its result is proved when it is applied to its base",
    "checkpoint": "readable; compare its digest with the one you expect",
    "store": "all proved",
}


def diff(
    old: Annotated[
        Path,
        typer.Argument(
            metavar="OLD",
            help="The base: a safetensors file, or a directory of shards as Transformers writes it.",
            show_default=False,
        ),
    ],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The target, with the same tensors.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PATCH", help="Where to write the patch.", show_default=False),
    ],
    base: Annotated[int, typer.Option(min=0, help="The version number of OLD.")] = 0,
    target: Annotated[int, typer.Option(min=0, help="The version number of NEW, greater than OLD's.")] = 1,
    codec: Annotated[
        str,
        typer.Option(metavar="auto|CODEC", help="How to code changes; auto: the smallest."),
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write the elements whose bits differ between OLD and NEW as one small patch.

    Checkpoints are mapped, not loaded, so they may be larger than memory.

    Example: pulse-rl diff step-3/ step-4/ -o 3-4.safetensors --base 3 --target 4
    """
    from typing import cast

    from pulse_rl.checkpoint.files import files_of, open_checkpoint
    from pulse_rl.codecs.choose import CodecName, check
    from pulse_rl.patch.files import write_diff
    from pulse_rl.patch.format import check_versions

    with output.checking():
        check(codec)
        check_versions(base, target)
    if out.exists() and any(out.samefile(file) for file in (*files_of(old), *files_of(new))):
        raise ValueError(f"{out}: the patch would replace the checkpoint it is made from; name another file")
    with output.watching("diff") as watch:
        info = write_diff(
            out,
            open_checkpoint(old),
            watch(open_checkpoint(new)),
            base=base,
            target=target,
            codec=cast(CodecName, codec),
        )
    _print_patch(info, as_json)


def apply(
    base: Annotated[
        Path,
        typer.Argument(
            metavar="BASE",
            help="The checkpoint from which the patch was made, a file or a directory. It is not modified.",
            show_default=False,
        ),
    ],
    patch: Annotated[Path, typer.Argument(metavar="PATCH", help="A patch file.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="The new checkpoint: a file or a directory, as BASE is. A file is replaced.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Apply PATCH to BASE and write the result, bit for bit the patch's target.

    OUT appears complete and proved, or not at all.

    Example: pulse-rl apply step-3/ 3-4.safetensors -o step-4/
    """
    from pulse_rl.patch.files import apply_to_copy

    with output.watching("apply") as watch:
        info = apply_to_copy(base, patch, out, watch=watch)
    _print_patch(info, as_json)


def inspect(target: Target, as_json: AsJson = False) -> None:
    """Describe a patch, a checkpoint, or all versions of a store.

    The names of a store's files start with the sequence number of the version
    (0, 1, 2, …), not with the version; --json lists them. Exit code 1 if a
    manifest of the store cannot be read; the others are described.

    Example: pulse-rl inspect runs/math
    """
    from pulse_rl import History
    from pulse_rl.checkpoint.files import open_checkpoint
    from pulse_rl.history.operate.describe import checkpoint_info, store_info
    from pulse_rl.history.operate.targets import kind_of
    from pulse_rl.patch.files import read_patch
    from pulse_rl.patch.verbs import info

    kind, place = kind_of(target)
    if kind == "patch":
        _print_patch(info(read_patch(Path(place))), as_json)
    elif kind == "store":
        stored = store_info(History(place))
        _print_store(stored, as_json)
        if stored.problems:
            raise typer.Exit(1)
    else:
        with output.watching("digest") as watch:
            described = checkpoint_info(place, watch(open_checkpoint(place)))
        _print_checkpoint(described, as_json)


def verify(
    target: Target,
    deep: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="Compare this checkpoint with the store; or prove a patch from it."),
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="The Ed25519 key that every manifest must be signed by.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove a whole store, or check a patch or a checkpoint, and list what is wrong.

    Of a store it checks, from the oldest version to the newest: every manifest,
    the size and hash of every object, every patch by applying it to a copy in
    temporary files, and every anchor against the patches that lead to it. Of a
    patch alone it checks that it is intact, of a checkpoint that it is readable.
    With --deep it compares every bit of that checkpoint with the version of the
    store that has its digest, or else with the newest. For a patch it proves by
    64-bit digests that the checkpoint is its base, and that the patch leads from
    it to its target; nothing is written. Exit code 1 if anything is wrong.

    Example: pulse-rl verify runs/math
    """
    from pulse_rl import verify as prove
    from pulse_rl.checkpoint.files import open_checkpoint

    with output.checking():
        weights = open_checkpoint(deep) if deep is not None else None
        with output.progress("verify") as update:
            report = prove(target, deep=weights, public_key=public_key, progress=update)
    if as_json:
        output.emit(report)
    else:
        lines = {"path": report.target, "kind": report.kind, "read": nbytes(report.nbytes)}
        if report.digest:
            lines["digest"] = report.digest
        if report.kind == "store":
            lines["good"] = _versions(report.good_versions)
            if report.past_fault:
                lines["good"] += f"; of these past a fault, by other patches: {_versions(report.past_fault)}"
            lines["bad"] = _versions(report.bad_versions)
        if report.signed is not None:
            checked = "every manifest by the key given" if public_key else "not checked: give --public-key"
            lines["signed"] = f"yes, {checked}" if report.signed else "no"
        if report.leftovers:
            lines["leftovers"] = f"{count(len(report.leftovers), 'object')} that no manifest names; harmless"
        if report.weights_version is not None:
            proof = "by the 64-bit digest of the patch's base" if report.kind == "patch" else "every bit compared"
            lines["weights"] = f"version {report.weights_version}, {proof}"
        kind = "applied" if report.kind == "patch" and report.weights_version is not None else report.kind
        output.facts(lines | {"result": SOUND[kind] if report.ok else f"{count(len(report.problems), 'problem')}:"})
        for problem in report.problems:
            output.write(f"  {printable(problem)}\n")
    if not report.ok:
        raise typer.Exit(1)


def _versions(versions: tuple[int, ...], at: str = "") -> str:
    """How many and which, as "2, at versions 0, 50"."""
    if not versions:
        return "none"
    which = ", ".join(map(str, versions)) if len(versions) <= 8 else f"{versions[0]} … {versions[-1]}"
    return f"{len(versions)}, {at}version{'s' if len(versions) > 1 else ''} {which}"


def _print_patch(info: PatchInfo, as_json: bool) -> None:
    if as_json:
        output.emit(info)
        return
    output.facts(
        {
            "patch": f"version {info.base} → {info.target}",
            "codec": info.codec,
            "size": f"{nbytes(info.nbytes)} for {nbytes(info.full_nbytes)}, {info.reduction:,.1f} times smaller",
            "changes": f"{info.changes:,} of {info.elements:,} elements ({info.density:.4%})",
            "base": info.digests["base"],
            "target": info.digests["target"],
            "tensors": f"{len(info.tensors)}, {sum(tensor.changes > 0 for tensor in info.tensors)} of them changed",
        }
    )
    busiest = sorted((t for t in info.tensors if t.changes), key=lambda t: -t.changes)[:5]
    if busiest:
        output.write("\n")
        output.table(
            ["most changes in", "dtype", "shape", "changes"],
            [(t.name, t.dtype, "×".join(map(str, t.shape)) or "scalar", f"{t.changes:,}") for t in busiest],
        )


def _print_checkpoint(info: CheckpointInfo, as_json: bool) -> None:
    if as_json:
        output.emit(info)
        return
    output.facts(
        {
            "checkpoint": info.path,
            "tensors": f"{len(info.tensors):,} of {', '.join(sorted({t.dtype for t in info.tensors})) or 'nothing'}",
            "elements": f"{info.elements:,}",
            "size": nbytes(info.full_nbytes),
            "digest": info.digest,
        }
    )


def _print_store(info: StoreInfo, as_json: bool) -> None:
    if as_json:
        output.emit(info)
        return
    anchors = tuple(version.version for version in info.versions if version.anchor)
    patches = sorted(version.patch_nbytes for version in info.versions if version.patch_nbytes)
    lines = {
        "store": info.url,
        "versions": (
            f"{len(info.versions)}, {info.versions[0].version} to {info.newest}"
            if len(info.versions) > 1
            else f"1, version {info.newest}"
        ),
        "anchors": _versions(anchors, "at "),
        "model": f"{info.elements:,} elements, {nbytes(info.full_nbytes)}",
    }
    if patches:
        middle = patches[len(patches) // 2]
        lines["patches"] = (
            f"{nbytes(sum(patches))} in total, median {nbytes(middle)}, "
            f"{info.full_nbytes / middle:,.1f} times smaller than the model"
        )
    if info.views:
        lines["views"] = output.views(info)
    if info.signed:
        lines["signed"] = "yes"
    noted = any(version.metadata for version in info.versions)
    output.facts(lines)
    for problem in info.problems:
        output.write(f"problem: {problem}\n")
    output.write("\n")
    output.table(
        ["version", "digest", "changes", "density", "patch", "reduction", "codec", "anchor"] + ["metadata"] * noted,
        [
            (
                v.version,
                v.digest,
                f"{v.changes:,}",
                f"{v.density:.4%}",
                nbytes(v.patch_nbytes) if v.patch_nbytes else "–",
                f"{v.reduction:,.1f} ×" if v.patch_nbytes else "–",
                v.codec or "–",
                nbytes(v.anchor_nbytes) if v.anchor_nbytes else "–",
                *[output.noted(v.metadata or {})] * noted,
            )
            for v in info.versions
        ],
    )
