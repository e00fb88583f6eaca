"""One run whose pool grows and shrinks on demand, while plays wait for something slow: steps an hour at each size.

    python -m bench.flow.elastic --out /tmp/elastic

The recipe is `math`, and each play takes 20 s longer, as where a sandbox runs an answer's tests: so plays, and not the
processor, are what steps wait for. `pulse-rl rollout` asks for workers and sends them home. A size's seconds begin when
all of its workers have proved a version, and others have left; its steps are those that begin and end in them. Prints a
line of JSON for each size, and one at the end.
"""

import argparse
import json
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from pulse_rl.flow import metrics
from tests.flow.recipe_runs import finish, start
from tests.flow.runs import COMMAND, until

HERE = Path(__file__).parent
MATH = Path("math")  # the package's recipe


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 1], help="of the pool, in turn")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    there = options.sizes[0]
    settings = {"path": HERE, "workflow.name": "slow_plays:Slow", "model": options.model, "pools.worker.workers": there}
    with start(out, "steps=100000", *(f"{key}={value}" for key, value in settings.items()), recipe=MATH) as run:
        for size in options.sizes:
            asked = time.monotonic()
            if size != there:
                change = ["--add", size - there] if size > there else ["--remove", there - size]
                subprocess.run([*COMMAND, "rollout", out, *map(str, change)], check=True, capture_output=True)
            there = size
            until(run, partial(_holding, out, size))
            ready, first = time.monotonic(), len(metrics.read(out))
            time.sleep(options.seconds)
            rows = metrics.read(out)[first + 1 :]  # the first one began before
            total, waited = (sum(row[name] for row in rows) for name in ("total_s", "wait_s"))
            found = {
                "workers": size,
                "ready_s": round(ready - asked, 1),
                "step_s": round(total / len(rows), 1),
                "steps_an_hour": round(3600 * len(rows) / total),
                "waits": round(waited / total, 3),
            }
            print(json.dumps(found), flush=True)
        run.send_signal(signal.SIGINT)
        summary, _ = finish(run)
    policy = summary["policies"]["solver"]
    verified = [worker["verified"] for worker in policy["workers"]]
    print(json.dumps({"dropped": policy["dropped"], "tasks": summary["tasks"], "verified": verified}))


def _holding(out: Path, size: int) -> bool:
    """Whether so many workers have proved a version and were not sent home, and a step is done."""
    try:
        workers = json.loads((out / "now.json").read_bytes())["workers"].values()
    except FileNotFoundError:
        return False
    return bool(metrics.read(out)) and size == sum(
        worker["state"] == "live" and bool(worker["versions"]) for worker in workers
    )


if __name__ == "__main__":
    main()
