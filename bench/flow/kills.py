"""Seeded kills over all services of a run: every run must end whole.

    python -m bench.flow.kills --kills 200 --seed 0 --out /tmp/kills

Each run is one of two policies of tiny models, every other one on a Ray cluster of several nodes on this machine. At
random moments a worker, a trainer, the Dataflow, the driver or a node is killed; after the driver, the run goes on by
--resume, and a node is replaced. Then the run is stopped by SIGINT, and checked: every worker holds the bits of every
trainer, and every step was trained and recorded once. One line of JSON a run.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.flow.recipe_runs import Nodes, check, finish, kill, start, steps
from tests.flow.runs import PATIENCE_S, children, lives, until, wait_for

PROCESSES = ("RolloutProcess", "TrainerProcess", "DataflowProcess")
SERVICES = (*PROCESSES, "driver")
FAR = 2  # nodes beside the head's


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--each", type=int, default=5, help="kills a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun, done, runs, totals = time.monotonic(), 0, 0, Counter[str]()
    while done < options.kills and time.monotonic() - begun < options.seconds:
        nodes = FAR * (runs % 2)
        result = one(options.out / "run", options.seed + done, min(options.each, options.kills - done), nodes)
        done += sum(result["killed"].values())
        runs += 1
        totals.update(result["killed"])
        print(json.dumps(result), flush=True)
    seconds = round(time.monotonic() - begun, 1)
    print(json.dumps({"runs": runs, "kills": done, "by_service": totals, "seconds": seconds}))


def one(out: Path, seed: int, kills: int, far: int) -> dict[str, Any]:
    """A run with so many kills; raises AssertionError if it does not end whole. far: nodes of its cluster; 0: none."""
    shutil.rmtree(out, ignore_errors=True)
    chance, killed, begun = random.Random(seed), Counter[str](), time.monotonic()
    services = (*SERVICES, "node") if far else SERVICES
    with ExitStack() as stack:
        nodes = Nodes(far) if far else None
        where = []
        if nodes:
            stack.callback(nodes.close)
            where = [f'address="{nodes.address}"', "pools.near.region=far"]
        process = start(out, "steps=100000", "checkpoint_every=4", "pools.near.workers=2", *where)
        stack.callback(lambda: process.kill())  # the last one
        until(process, lambda: steps(out) >= 1)
        while sum(killed.values()) < kills:
            time.sleep(chance.expovariate(1 / 2))
            lives(process)
            service, before = chance.choice(services), steps(out)
            above = nodes.pid if nodes else process.pid
            if service == "driver":
                below = [pid for title in PROCESSES for pid in children(f"ray::{title}", above)]
                process.kill()
                process.communicate()
                wait_for(lambda below=below: not any(map(_alive, below)), PATIENCE_S)
                process = start(out, resume=True)
                _wait_for_all(process, nodes.pid if nodes else process.pid)
            elif service == "node":
                assert nodes is not None
                nodes.lose(replace=True)
            elif kill(service, above) is None:
                continue  # it is being started again
            killed[service] += 1
            if chance.random() < 0.5:  # else the next one follows while this one is being mended
                _go_on(out, process, before)
        _go_on(out, process, steps(out))
        process.send_signal(signal.SIGINT)
        summary, _ = finish(process)
    check(summary, out)
    policies = summary["policies"].values()
    return {
        "seed": seed,
        "nodes": far and far + 1,
        "killed": dict(killed),
        "steps": [policy["steps"] for policy in policies],
        "repeated_groups": [policy["repeated"] for policy in policies],
        "late": summary["tasks"].get("late", 0),
        "seconds": round(time.monotonic() - begun, 1),
    }


def _go_on(out: Path, process: "subprocess.Popen[str]", before: int) -> None:
    """Wait until the run has done another step, as all of it must."""
    until(process, lambda: steps(out) > before + 1)


def _wait_for_all(process: "subprocess.Popen[str]", above: int) -> None:
    """Wait until all services have processes again."""
    until(process, lambda: all(children(f"ray::{title}", above) for title in PROCESSES))


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
