"""A CUDA device: kernels and whole versions measured, runs of RL on it, and the tests: `make bench-gpu`, or

    PYTHONPATH=src python3 -m bench.gpu --out gpu.json

It needs PyTorch with CUDA, NumPy and Numba-CUDA, and in part what `make gpu-packages` brings. Kernels are compared with
a plain copy of the same weights on the device, with torch's operations, with what others do, and the coder with one
core of the CPU; results are checked as they are measured. Every section is a process with a limit of time, and results
are written as they come: what fails says so in them. With `--emulated --elements 2000` it runs through on
the CPU: then its times say nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.children import Options, Report, Results

TESTS = ("tests/kernels/test_gpu.py", "tests/kernels/test_gpu_coding.py", "tests/kernels/test_gpu_versions.py")
RUN_S = 300.0  # that are kept for the runs of RL and the tests


class Section(NamedTuple):
    """A part of the benchmark, measured in a process for itself: no other one misses what it needs."""

    limit: float  # seconds
    measure: str  # module of bench.gpu, and its function of `Options` and a `Keep`
    given: dict[str, Any]  # what else it takes
    environment: Mapping[str, str] | None = None


def _versions(limit: float, codec: str, kept_on: str = "device", **given: Any) -> Section:
    return Section(limit, "library.measure_versions", {"codec": codec, "kept_on": kept_on, **given})


SECTIONS = {
    "machine": Section(60, "machine.measure_machine", {}),
    "kernels": Section(100, "bandwidth.measure_kernels", {}),
    "peers": Section(100, "bandwidth.measure_peers", {}),
    "context": Section(90, "coder.measure_coder", {}, {"PULSE_THREADS": "1"}),  # the CPU's is measured on one core
    "cast": Section(45, "bandwidth.measure_cast", {}),
    "nccl_one_rank": Section(45, "one_rank.measure_collectives", {}),
    "publish_7b_context": _versions(110, "context", whole=True),
    "publish_7b_gap": _versions(110, "gap", whole=True),
    "publish_context": _versions(70, "context"),
    "publish_gap": _versions(70, "gap"),
    "publish_pinned": _versions(70, "gap", "pinned"),
    "publish_300_tensors": _versions(70, "gap", tensors=300),
    "publish_18867_tensors": _versions(70, "gap", tensors=18_867),
    "publish_experts": _versions(70, "gap", tensors=20, stack=(128,)),
    "publish_host": _versions(70, "gap", "host"),
}
# These run side by side, after all others: no speed is measured any more.
_FEW_THREADS = {"PULSE_THREADS": "3", "OMP_NUM_THREADS": "2"}
RUNS = {
    "grpo_3e-6": Section(450, "grpo_run.measure_run", {"lr": 3e-6}, _FEW_THREADS),
    "grpo_1e-6": Section(450, "grpo_run.measure_run", {"lr": 1e-6}, _FEW_THREADS),
    "loco_pulse": Section(450, "loco_run.measure_rounds", {"method": "pulse"}, _FEW_THREADS),
    "loco_diloco": Section(450, "loco_run.measure_rounds", {"method": "diloco"}, _FEW_THREADS),
}
ALL = SECTIONS | RUNS


def _tests(results: Results) -> None:
    """The tests marked gpu, on the device."""
    chosen = ["--noconftest", "--continue-on-collection-errors", "-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-W", "default", *chosen, *TESTS]
    # pytest's own output is no JSON: it goes where errors go, and is kept if it fails.
    shell = ["sh", "-c", 'exec "$@" >&2', "sh", *command]
    results.run("tests", shell, 450)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=6_700_000_000, help="BF16 weights; default: 6.7 billion")
    parser.add_argument("--version-elements", type=int, default=1 << 30, help="weights of versions by each codec")
    parser.add_argument("--cpu-elements", type=int, default=1 << 26, help="weights that one core of the CPU codes")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the runs of GRPO")
    parser.add_argument("--inner-steps", type=int, default=512, help="steps of each trainer of PULSELoCo and DiLoCo")
    parser.add_argument("--seconds", type=float, default=560, help="of everything together")
    parser.add_argument("--emulated", action="store_true", help="on the CPU, without the tests")
    parser.add_argument("--only", nargs="+", choices=[*ALL, "tests"], help="these sections alone, in this order")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the results go, as JSON")
    parser.add_argument("--section", choices=ALL, help=argparse.SUPPRESS)  # in a process that the parent starts
    return parser


def main() -> None:
    given = _parser().parse_args()
    elements = given.elements
    options = Options(
        elements,
        min(given.version_elements, elements),
        min(given.cpu_elements, elements),
        given.rounds,
        given.steps,
        given.inner_steps,
        given.seconds,
        given.emulated,
    )
    if given.section:
        _measure(ALL[given.section], options)
        return
    results = Results(given.out, given.seconds)
    results.add("options", options._asdict())
    chosen, runs = ([name for name in given.only or names if name in names] for names in (SECTIONS, RUNS))
    if not os.environ.get("CUDA_HOME") and (nvcc := shutil.which("nvcc")):
        os.environ["CUDA_HOME"] = str(Path(nvcc).resolve().parent.parent)  # Numba finds its compiler there

    def run(name: str, reserved: float = 0.0) -> None:
        section = ALL[name]
        limit = min(section.limit, results.left_s - reserved)
        own = ["--section", name, "--seconds", str(0.9 * limit)]  # so that a run ends in time by itself
        results.run(name, [sys.executable, "-m", "bench.gpu", *sys.argv[1:], *own], limit, section.environment)

    for name in chosen:
        run(name, RUN_S if runs else 0.0)
    with ThreadPoolExecutor(len(RUNS) + 1) as pool:
        tasks = [pool.submit(run, name) for name in runs]
        if not given.emulated and (not given.only or "tests" in given.only):
            tasks.append(pool.submit(_tests, results))
        for task in tasks:
            task.result()


def _measure(section: Section, options: Options) -> None:
    """In the section's own process."""
    if options.emulated:
        from bench.gpu import emulator

        emulator.install()
    report = Report()
    module, function = section.measure.split(".")
    getattr(import_module(f"bench.gpu.{module}"), function)(options, report.keep, **section.given)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
