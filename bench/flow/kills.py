"""Seeded kills over all services of a run: every run must end whole.

    PYTHONPATH=tests python bench/flow/kills.py --kills 200 --seed 0 --out /tmp/kills

Each run is one of two policies of tiny models. At random moments a worker, a trainer, the Dataflow or the driver is
killed; after the driver, the run goes on by --resume. Then the run is stopped by SIGINT, and checked: every worker
holds the bits of every trainer, and every step was trained and recorded once. One line of JSON a run.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

from flow_runs import check, finish, kill, start, steps
from runs import children, wait_for

SERVICES = ("RolloutProcess", "TrainerProcess", "DataflowProcess", "driver")
PATIENCE_S = 600  # for a run to go on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--each", type=int, default=5, help="kills a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    begun, done, totals = time.monotonic(), 0, Counter[str]()
    while done < options.kills and time.monotonic() - begun < options.seconds:
        result = one(options.out / "run", options.seed + done, min(options.each, options.kills - done))
        done += sum(result["killed"].values())
        totals.update(result["killed"])
        print(json.dumps(result), flush=True)
    print(json.dumps({"kills": done, "by_service": totals, "seconds": time.monotonic() - begun}))


def one(out: Path, seed: int, kills: int) -> dict[str, Any]:
    """A run with so many kills; raises AssertionError if it does not end whole."""
    shutil.rmtree(out, ignore_errors=True)
    chance, killed, begun = random.Random(seed), Counter[str](), time.monotonic()
    process = start(out, "steps=100000", "checkpoint_every=4", "pools.near.workers=2")
    try:
        wait_for(lambda: steps(out) >= 1 or process.poll() is not None, PATIENCE_S)
        while sum(killed.values()) < kills:
            time.sleep(chance.expovariate(1 / 2))
            service, before = chance.choice(SERVICES), steps(out)
            if service == "driver":
                below = children("ray::", process.pid)
                process.kill()
                process.communicate()
                wait_for(lambda below=below: not any(map(_alive, below)), PATIENCE_S)
                process = start(out, resume=True)
                before = 0
            elif kill(service, process.pid) is None:
                continue  # it is being started again
            killed[service] += 1
            if chance.random() < 0.5:  # else the next one follows while this one is being mended
                _go_on(out, process, before)
        _go_on(out, process, steps(out))
        process.send_signal(signal.SIGINT)
        summary, _ = finish(process)
    finally:
        process.kill()
    check(summary, out)
    policies = summary["policies"].values()
    return {
        "seed": seed,
        "killed": dict(killed),
        "steps": [policy["steps"] for policy in policies],
        "repeated_groups": [policy["repeated"] for policy in policies],
        "late": summary["tasks"].get("late", 0),
        "seconds": round(time.monotonic() - begun, 1),
    }


def _go_on(out: Path, process: "subprocess.Popen[str]", before: int) -> None:
    """Wait until the run has done another step, as all of it must."""
    wait_for(lambda: steps(out) > before + 1 or process.poll() is not None, PATIENCE_S)
    assert process.poll() is None, process.communicate()[1][-3000:]


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


if __name__ == "__main__":
    main()
