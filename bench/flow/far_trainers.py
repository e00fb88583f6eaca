"""Two trainers of a policy, apart by a narrow link: what `overlap` gains in time.

    python -m bench.flow.far_trainers --rate 10 --rounds 4 --out /tmp/far      # Linux, as root

One trainer, the driver, the Dataflow and both rollout workers are in one network namespace; the other trainer is on a
node of the same Ray cluster, in another namespace behind the link. SmolLM2-135M learns as in `bench.evidence.trainers`.
A line for each run: of the rounds after the first, which compiles, the medians of the seconds of a round, of its
exchange, and of those in which no step could be taken; and what the hub sent over the link, in a round.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from bench.flow.far import cluster
from pulse_rl.flow import metrics

STEPS = 8  # of a round


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["pulse", "diloco"])
    parser.add_argument("--overlap", nargs="+", type=int, default=[0, 4], help="steps")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    for method in options.methods:
        for overlap in options.overlap:
            found = one(options.out / f"{method}-{overlap}", method, overlap, options)
            print(json.dumps({"method": method, "overlap": overlap, "mbit": options.rate} | found), flush=True)


def one(out: Path, method: str, overlap: int, options: argparse.Namespace) -> dict[str, Any]:
    """A run of so many rounds."""
    settings = {
        "deterministic": "true",
        "seed": 1,
        "lr": "3e-6",
        "dither": 0,
        "trainers": 2,
        "trainer_sync": method,
        "sync_every": STEPS,
        "overlap": overlap,
        "tasks_per_step": 4,
        "anchor_every": 1000,
        "workflow.task": "chain_sum:max_terms=3",
        "pools.worker.region": "hub",
        "checkpoint_every": 1000,
        "steps": STEPS * options.rounds,
        "out": out,
    }
    with cluster(options.rate) as far, far.train(settings) as run:
        summary = json.loads(run.communicate()[0])
        sent = far.sent_nbytes()
    rounds = metrics.read(out)
    measured = [record["trainer_sync"] for record in rounds[1:]]
    return {
        "rounds": len(rounds),
        "round_s": round(statistics.median(record["total_s"] for record in rounds[1:]), 1),
        **{key: round(statistics.median(one[key] for one in measured), 2) for key in ("exchange_s", "stalled_s")},
        "link_nbytes": sent // len(rounds),
        "reward": [round(record["reward"], 4) for record in rounds],
        "seconds": round(summary["seconds"], 1),
    }


if __name__ == "__main__":
    main()
