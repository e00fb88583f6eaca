"""Whole runs of recipes with tiny models from the command line, each in a new process."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pulse_rl.flow import metrics
from tests.flow.runs import COMMAND, PATIENCE_S, children, sets

HERE = Path(__file__).parent
GAME = HERE / "flow_game.toml"
ROLES = ("digits", "letters")
PATHS = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # the first is where the workflow is
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
add = lambda: cluster.add_node(num_cpus=1, resources={"far": 1})
far = [add() for _ in range(int(sys.argv[1]))]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(far.pop(0), allow_graceful=False)
    if line == "replace\\n":
        far.append(add())
    print("done", flush=True)
cluster.shutdown()
"""


class Nodes:
    """A Ray cluster on this machine: a head, and nodes with the resource `far`."""

    def __init__(self, far: int) -> None:
        command = [sys.executable, "-c", CLUSTER, str(far)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        self.pid = self._process.pid
        self.address = self._read()

    def lose(self, *, replace: bool = False) -> None:
        """Kill the oldest of the far nodes, with all its processes; start another one."""
        assert self._process.stdin is not None
        self._process.stdin.write("replace\n" if replace else "lose\n")
        self._process.stdin.flush()
        assert self._read() == "done"

    def close(self) -> None:
        """End all nodes."""
        self._process.communicate(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def start(out: Path, *changes: str, resume: bool = False, recipe: Path = GAME) -> "subprocess.Popen[str]":
    """Begin a run of a recipe, or continue one. changes: of the recipe."""
    what = ["--resume", str(out)] if resume else [str(recipe), "--out", str(out)]
    return subprocess.Popen(
        [*COMMAND, "train", *what, *sets(*changes), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    """The summary of a run, and what it said."""
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (0, 130), stderr
    summary: dict[str, Any] = json.loads(stdout)
    assert process.returncode == (130 if summary["stopped"] else 0), stderr
    return summary, stderr


def run(out: Path, *changes: str, resume: bool = False, recipe: Path = GAME) -> dict[str, Any]:
    return finish(start(out, *changes, resume=resume, recipe=recipe))[0]


def files(out: Path, name: str) -> Path:
    """Where the files of a trainer of one of several policies are."""
    return out / "policies" / name


def steps(out: Path) -> int:
    """Steps that all policies have done."""
    return min(len(metrics.read(files(out, name))) for name in ROLES)


def kill(title: str, below: int) -> int | None:
    """Kill the first process of a kind, if there is one; returns its id."""
    for pid in children(f"ray::{title}", below):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return pid
    return None


def check(summary: dict[str, Any], out: Path) -> None:
    """Every worker ended with the bits of every trainer, and every step was trained and recorded once."""
    import pulse_rl as pulse

    for name, policy in summary["policies"].items():
        held = [worker for worker in policy["workers"] if not _left(summary, worker["id"])]
        assert held
        for worker in policy["workers"]:
            assert worker["verified"]
        only = len(summary["policies"]) == 1
        head = pulse.History(pulse.open_store(out / "store" if only else out / "store" / name)).head()
        assert head is not None
        assert (head.version, head.digest) == (policy["trainer_version"], policy["trainer_digest"])
        for worker in held:  # a view's digest is not that of the weights
            digest = head.views[worker["view"]].digest if worker["view"] else head.digest
            assert (worker["version"], worker["digest"]) == (head.version, digest)
        records = metrics.read(out if only else files(out, name))
        views = [msgspec.structs.asdict(view) for view in head.view_infos]
        assert not records or records[-1]["views"] == views
        assert [record["step"] for record in records] == ends(policy)


def ends(policy: dict[str, Any]) -> list[int]:
    """The steps after which a policy published a version: several trainers go in rounds, as `flow.rounds` says."""
    if not (sync := policy["trainer_sync"]):
        return list(range(1, policy["steps"] + 1))
    first = sync["sync_every"] + sync["overlap"]
    return [*range(first, policy["steps"], sync["sync_every"]), policy["steps"]]


def _left(summary: dict[str, Any], worker: str) -> bool:
    return next(bool(each["left"]) for each in summary["workers"] if each["id"] == worker)
