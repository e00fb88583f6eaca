"""What quantised views of a run's versions cost: `python -m bench.views STORE [--first N] [--most N] [--codec NAME]`.

Every version of a history, as of a run that trained for real, is published again to directories: without views, and
with one at a time, in turns. `--view` names one, and may be given several times; `--without embed --without lm_head`
leaves out tensors with these in their names. Bytes are those of patches. What is quantised is coded by itself too, as
BF16 and as codes with scales: a view's other tensors, as embeddings, cost the same in both. Its bound is
`bench.bound`'s, with tables for each tensor. Seconds are processor seconds of a publish, of all threads.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pulse_rl as pulse
from bench.bound import bounds
from bench.report import processor_time
from pulse_rl.cli import output
from pulse_rl.codecs.base import Codec
from pulse_rl.codecs.choose import CODECS, CodecName
from pulse_rl.patch.encode import encode
from pulse_rl.units import nbytes
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.layout import Layout, layout
from pulse_rl.weights.views.formats import ViewFormat
from pulse_rl.weights.views.quantised import Quantised

VIEWS = {
    "blocks": pulse.Fp8(),
    "blocks, sticky": pulse.Fp8(scales="sticky"),
    "rows": pulse.Fp8(block="channel", rule="vllm"),
    "rows, sticky": pulse.Fp8(block="channel", rule="vllm", scales="sticky"),
    "MXFP8": pulse.Fp8(block=(1, 32), rule="vllm"),
    "INT8": pulse.Int8(),
    "MXFP4": pulse.Fp4(format="mxfp4"),
    "NVFP4": pulse.Fp4(format="nvfp4"),
    "NVFP4, sticky": pulse.Fp4(format="nvfp4", scales="sticky"),
}


class Apart(NamedTuple):
    """One step of the tensors that are quantised, by themselves."""

    nbytes: int
    changes: int
    bound: float  # bytes


class Step(NamedTuple):
    """One version of a line."""

    nbytes: int  # of the patch
    seconds: float  # processor seconds of the whole publish
    apart: Apart


def measure(
    store: str, versions: Sequence[int], codec: CodecName, views: Sequence[str], without: Sequence[str]
) -> dict[str, list[Step]]:
    """Publish a history's versions again. Returns the steps of each line, that of the weights first."""
    subscriber = pulse.Subscriber(store)
    held = subscriber.allocate()
    weights = {name: tensor for name, tensor in held.items() if not any(part in name for part in without)}
    made = {name: Quantised(VIEWS[name], weights) for name in views}
    form = ViewFormat(pulse.Fp8())  # which all quantise the same tensors as
    quantised = [name for name, bits in layout(weights).items() if form.quantises(name, bits.shape)]
    found: dict[str, list[Step]] = {name: [] for name in ("BF16", *views)}
    before: dict[str, Layout] = {}
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as place:
        lines = {
            name: pulse.Publisher(Path(place) / str(at), codec=codec, views={"a": VIEWS[name]} if at else None)
            for at, name in enumerate(found)
        }
        for turn, version in enumerate(versions):
            subscriber.sync(held, version=version)
            order = list(lines)[turn % len(lines) :] + list(lines)[: turn % len(lines)]  # the first finds cold caches
            for name in order:
                publisher = lines[name]
                seconds, report = processor_time(partial(publisher.publish, weights, version=version))
                line = report.views["a"].patch if report.views else None
                size = report.patch_nbytes if line is None else line.total_nbytes
                tensors: Mapping[str, Bits] = made[name].look() if name in made else layout(weights)
                now = _copy({key: tensors[key] for key in tensors if key in quantised or key not in weights})
                if name in before:
                    found[name].append(Step(size, seconds, _apart(before[name], now, CODECS[codec])))
                before[name] = now
    return found


def _apart(before: Layout, now: Layout, codec: Codec) -> Apart:
    (patch,) = encode(before, now, base=0, target=1, codecs=[codec])
    return Apart(len(patch.data), patch.changes, bounds(before, now)[0].bits / 8)


def _copy(tensors: Mapping[str, Bits]) -> Layout:
    copies = {
        name: HostBits(bits.dtype, bits.read(0, bits.size).copy().reshape(bits.shape)) for name, bits in tensors.items()
    }
    return Layout(sorted(copies.items()), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--first", type=int, default=0, help="the version to begin with")
    parser.add_argument("--most", type=int, help="versions to take")
    parser.add_argument("--codec", choices=CODECS, default="context")
    parser.add_argument("--view", choices=VIEWS, action="append", help="which to make; all of them without it")
    parser.add_argument(
        "--without", metavar="PART", action="append", default=[], help="leave out tensors with this in their names"
    )
    arguments = parser.parse_args()
    versions = [manifest.version for manifest in pulse.History(arguments.store).manifests()]
    versions = [version for version in versions if version >= arguments.first][: arguments.most]
    views = arguments.view or list(VIEWS)
    found = measure(arguments.store, versions, arguments.codec, views, arguments.without)
    columns = [
        "",
        "bytes",
        "of BF16's",
        "publish, processor s",
        "adds",
        "quantised: changes",
        "bytes",
        "of BF16's",
        "bound",
    ]
    rows = []
    for name, steps in found.items():
        whole, part, seconds = _means(steps)
        all_whole, all_part, alone = _means(found["BF16"])
        changes, bound = (statistics.mean(getattr(step.apart, key) for step in steps) for key in ("changes", "bound"))
        ratios = f"1/{all_whole / whole:.1f}", f"1/{all_part / part:.1f}"
        timed = f"{seconds:.3f}", f"{seconds / alone - 1:.2f} ×" if name in VIEWS else ""
        rows.append([name, nbytes(whole), ratios[0], *timed, f"{changes:,.0f}", nbytes(part), ratios[1], nbytes(bound)])
    output.table(columns, rows)


def _means(steps: Sequence[Step]) -> tuple[float, float, float]:
    """Bytes of patches, and of what is quantised, in the mean; seconds in the median, without the first steps'."""
    seconds = [step.seconds for step in steps[1:]] or [steps[0].seconds]
    whole, part = (statistics.mean(sizes) for sizes in zip(*((s.nbytes, s.apart.nbytes) for s in steps), strict=True))
    return whole, part, statistics.median(seconds)


if __name__ == "__main__":
    main()
