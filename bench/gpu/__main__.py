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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from bench.gpu.children import Keep, Report, Results

TESTS = ("tests/kernels/test_gpu.py", "tests/kernels/test_gpu_coding.py", "tests/kernels/test_gpu_versions.py")
RUN_S = 300.0  # that are kept for the runs of RL and the tests


class Options(NamedTuple):
    """What is measured."""

    elements: int
    version_elements: int
    cpu_elements: int
    rounds: int
    steps: int
    inner_steps: int
    seconds: float
    emulated: bool


class Section(NamedTuple):
    """A part of the benchmark."""

    limit: float  # seconds
    measure: Callable[[Options, Keep], None]  # in a process for itself
    environment: tuple[tuple[str, str], ...] = ()


# Each imports what it needs: the others run where that is missing or broken.


def _machine(options: Options, keep: Keep) -> None:
    from bench.gpu.machine import measure_machine

    measure_machine(keep)


def _kernels(options: Options, keep: Keep) -> None:
    from bench.gpu.bandwidth import measure_kernels

    measure_kernels(options.elements, options.rounds, keep)


def _peers(options: Options, keep: Keep) -> None:
    from bench.gpu.bandwidth import measure_peers

    measure_peers(options.elements, options.rounds, keep)


def _cast(options: Options, keep: Keep) -> None:
    from bench.gpu.bandwidth import measure_cast

    measure_cast(options.elements, options.rounds, keep)


def _coder(options: Options, keep: Keep) -> None:
    from bench.gpu.coder import measure_coder

    measure_coder(options.elements, options.cpu_elements, keep)


def _versions(
    options: Options,
    keep: Keep,
    *,
    kept_on: Literal["host", "pinned", "device"],
    codec: Literal["context", "gap"],
    whole: bool = False,
    tensors: int | None = None,
    stack: tuple[int, ...] = (),
) -> None:
    from bench.gpu.bandwidth import fitting
    from bench.gpu.library import SHARES, measure_versions
    from bench.gpu.synthetic import alike, shapes_of

    elements, shares = (options.elements, SHARES[:1]) if whole else (options.version_elements, SHARES)
    elements = fitting(elements)
    shapes = shapes_of(elements) if tensors is None else alike(tensors, elements, *stack)
    measure_versions(shapes, shares, kept_on, codec, keep, held=whole)


def _one_rank(options: Options, keep: Keep) -> None:
    from bench.gpu.one_rank import measure_collectives

    measure_collectives(keep)


def _where(options: Options) -> str:
    return "cpu" if options.emulated else "cuda"


def _grpo(options: Options, keep: Keep, *, lr: float) -> None:
    from bench.gpu.grpo_run import measure_run

    measure_run(_where(options), options.steps, options.seconds, lr, keep)


def _rounds(options: Options, keep: Keep, *, method: Literal["pulse", "diloco"]) -> None:
    from bench.gpu.loco_run import measure_rounds

    measure_rounds(_where(options), options.inner_steps, options.seconds, method, keep)


SECTIONS = {
    "machine": Section(60, _machine),
    "kernels": Section(100, _kernels),
    "peers": Section(100, _peers),
    "context": Section(90, _coder, (("PULSE_THREADS", "1"),)),  # the CPU's coder is measured on one core
    "cast": Section(45, _cast),
    "nccl_one_rank": Section(45, _one_rank),
    "publish_7b_context": Section(110, partial(_versions, kept_on="device", codec="context", whole=True)),
    "publish_7b_gap": Section(110, partial(_versions, kept_on="device", codec="gap", whole=True)),
    "publish_context": Section(70, partial(_versions, kept_on="device", codec="context")),
    "publish_gap": Section(70, partial(_versions, kept_on="device", codec="gap")),
    "publish_pinned": Section(70, partial(_versions, kept_on="pinned", codec="gap")),
    "publish_300_tensors": Section(70, partial(_versions, kept_on="device", codec="gap", tensors=300)),
    "publish_18867_tensors": Section(70, partial(_versions, kept_on="device", codec="gap", tensors=18_867)),
    "publish_experts": Section(70, partial(_versions, kept_on="device", codec="gap", tensors=20, stack=(128,))),
    "publish_host": Section(70, partial(_versions, kept_on="host", codec="gap")),
}
# These run side by side, after all others: no speed is measured any more.
_FEW_THREADS = (("PULSE_THREADS", "3"), ("OMP_NUM_THREADS", "2"))
RUNS = {
    "grpo_3e-6": Section(450, partial(_grpo, lr=3e-6), _FEW_THREADS),
    "grpo_1e-6": Section(450, partial(_grpo, lr=1e-6), _FEW_THREADS),
    "loco_pulse": Section(450, partial(_rounds, method="pulse"), _FEW_THREADS),
    "loco_diloco": Section(450, partial(_rounds, method="diloco"), _FEW_THREADS),
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
        results.run(name, [sys.executable, "-m", "bench.gpu", *sys.argv[1:], *own], limit, dict(section.environment))

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
    section.measure(options, report.keep)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
