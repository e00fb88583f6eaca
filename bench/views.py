"""What quantised views of a run's versions cost: `python -m bench.views STORE [--most N]`.

Every version of a history, as of a run that trained for real, is published again to a directory: without views, and
with some. Bytes are those of patches; seconds are processor seconds of a publish, of all threads.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pulse_rl as pulse
from bench.bound import bounds
from pulse_rl.cli import output
from pulse_rl.units import nbytes
from pulse_rl.weights.bits import Bits, HostBits
from pulse_rl.weights.layout import layout
from pulse_rl.weights.views.quantised import Quantised

VIEWS = {
    "blocks": pulse.Fp8(),
    "blocks, sticky": pulse.Fp8(scales="sticky"),
    "rows": pulse.Fp8(block="channel", rule="vllm"),
    "rows, sticky": pulse.Fp8(block="channel", rule="vllm", scales="sticky"),
    "MXFP8": pulse.Fp8(block=(1, 32), rule="vllm"),
}


class Cost(NamedTuple):
    """One line of versions: lists by version."""

    nbytes: list[int]  # of its patches
    changes: list[int]  # elements that changed, codes and scales
    codes: list[int]  # elements among them that have a code; of BF16, all
    bound: list[float]  # bytes, by the entropy of these


def measure(store: str, most: int | None) -> tuple[dict[str, Cost], float, float]:
    """Publish a history's versions again. Returns what each line cost, and seconds of a publish without and with."""
    versions = [manifest.version for manifest in pulse.History(store).manifests()][:most]
    subscriber = pulse.Subscriber(store)
    weights = subscriber.allocate()
    names = {name.replace(", ", "-"): fp8 for name, fp8 in VIEWS.items()}
    found = {name: Cost([], [], [], []) for name in ("BF16", *names)}
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(prefix="pulse-rl-") as place:
        without = pulse.Publisher(Path(place) / "without", codec="context")
        beside = pulse.Publisher(Path(place) / "with", codec="context", views=names)
        before: dict[str, dict[str, Bits]] = {}
        for version in versions:
            subscriber.sync(weights, version=version)
            reports = {}
            for which, publisher in (("without", without), ("with", beside)):
                start = time.process_time()
                reports[which] = publisher.publish(weights, version=version)
                seconds[which].append(time.process_time() - start)
            now = {"BF16": _copy(layout(weights), "BF16")}
            for name, fp8 in names.items():
                if fp8.scales == "plain":
                    now[name] = _copy(Quantised(fp8, weights).look(), "F8_E4M3")
            for name in before:
                bound, _, changes = bounds(before[name], now[name])
                found[name].codes.append(changes)
                found[name].bound.append(bound.bits / 8)
            lines: dict[str, Any] = {"BF16": reports["with"], **reports["with"].views}
            for name, line in lines.items():
                patch = line.patch_nbytes if name == "BF16" else line.patch.total_nbytes if line.patch else 0
                if patch:
                    found[name].nbytes.append(patch)
                    found[name].changes.append(line.changes if name == "BF16" else line.patch.changes)
            before = now
    return found, statistics.median(seconds["without"][2:]), statistics.median(seconds["with"][2:])


def _copy(tensors: Mapping[str, Bits], dtype: str) -> dict[str, Bits]:
    """The tensors of a dtype."""
    return {
        name: HostBits(bits.dtype, bits.read(0, bits.size).copy())
        for name, bits in tensors.items()
        if bits.dtype == dtype
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--most", type=int, help="versions to take")
    arguments = parser.parse_args()
    found, without, beside = measure(arguments.store, arguments.most)
    whole = statistics.mean(found["BF16"].nbytes)
    columns = ["", "changes", "bytes", "of BF16's", "of these codes", "their bound"]
    rows = []
    for name, cost in found.items():
        mean, bound = statistics.mean(cost.nbytes), statistics.mean(cost.bound) if cost.bound else 0.0
        rows.append(
            [
                name,
                f"{statistics.mean(cost.changes):,.0f}",
                nbytes(mean),
                f"1/{whole / mean:.1f}",
                f"{statistics.mean(cost.codes):,.0f}" if cost.codes else "",
                nbytes(bound) if bound else "",
            ]
        )
    output.table(columns, rows)
    output.write(f"publish: {without:.3f} processor seconds without views, {beside:.3f} with these {len(VIEWS)}\n")


if __name__ == "__main__":
    main()
