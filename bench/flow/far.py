"""A trainer and its only pool, apart by a link: steps an hour with patches and with full weights.

    python -m bench.flow.far --rate 10 --seconds 240 --out /tmp/far      # Linux, as root
    python -m bench.flow.far --rate 4000 --delay 300 --model smollm2 --seconds 240 --out /tmp/far

The driver, the trainer, the Dataflow and an S3 service are in one network namespace; a node of the same Ray cluster,
with the pool, is in another one behind the link. The recipe is `math` with one worker, and by default a random Llama of
20 M parameters (41 MB in BF16) whose tokens are characters, and a reward in which the answers of a group differ. Steps
are counted for so many seconds after the first one.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.link.network import Network
from bench.link.processes import Process
from bench.link.store import BUCKET, access
from pulse_rl.flow import metrics

HERE = Path(__file__).parent
RAY = 6379  # in a new namespace every port is free
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
HUB, FAR = 0, 1
BOTH = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.2)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit/s")
    parser.add_argument("--delay", type=float, default=0.0, help="ms, there and back")
    parser.add_argument("--model", default="random", help="as a recipe names it")
    parser.add_argument("--seconds", type=float, default=240.0, help="of each run, once it has begun")
    parser.add_argument("--staleness", type=int, default=4, help="that is allowed: of two-regions")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    settings: dict[str, object] = {"model": options.model}
    if options.model == "random":
        settings = {"model": options.out / "model", "workflow.reward": "far_reward:vowels", "workflow.group_size": 4}
        _model(options.out / "model")
    elif options.model == "smollm2":
        settings["dither"] = 0
    for sync in ("patch", "full"):
        found = one(options.out / sync, settings | {"sync": sync}, options)
        link = {"mbit": options.rate, "delay_ms": options.delay}
        print(json.dumps({"sync": sync} | link | found), flush=True)


@contextmanager
def cluster(rate: float, *, delay_ms: float = 0.0, store: bool = False) -> Iterator["Cluster"]:
    """A Ray cluster of two nodes with a link of so many Mbit/s between them: the hub, and one that offers `far`.

    delay_ms: there and back. store: with an S3 service at the hub.
    """
    with Network(1, delay_s=delay_ms / 2000) as network, ExitStack() as stack:
        hub = network.hub(1)
        kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        # Nobody else is in these networks.
        environment = kept | access(hub) | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        address, far = f"{hub}:{RAY}", f"{hub.rpartition('.')[0]}.2"
        if store:
            stack.enter_context(Process("store", network, HUB, "bench.link.store", {}, {})).answer()
        head = ["--head", f"--port={RAY}", "--include-dashboard=false", f"--temp-dir=/tmp/far-{os.getpid()}"]
        head += ['--resources={"hub": 1}']
        join = [f"--address={address}", '--resources={"far": 1}']
        for place, here, how in ((HUB, hub, head), (FAR, far, join)):
            ray = [_beside("ray"), "start", *how, f"--node-ip-address={here}", "--num-cpus=1", "--block"]
            node = subprocess.Popen(network.inside(place, ray), env=environment, stdout=subprocess.DEVNULL)
            stack.callback(_end, node)
            if place == HUB:
                _wait(lambda: _answers(network, hub), node)
        both = network.inside(HUB, [sys.executable, "-c", BOTH, address])
        subprocess.run(both, env=environment, check=True, timeout=600)
        # The nodes have found each other at full speed.
        network.shape(rate)
        yield Cluster(network, address, environment)


class Cluster(NamedTuple):
    """network: 0 is the hub. address: of the cluster. environment: of its programs."""

    network: Network
    address: str
    environment: dict[str, str]

    @contextmanager
    def train(self, settings: dict[str, object]) -> Iterator["subprocess.Popen[str]"]:
        """`pulse-rl train --json` at the hub. Killed at the end."""
        settings = settings | {"address": f'"{self.address}"'}
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = self.network.inside(HUB, [_beside("pulse-rl"), "train", "--json", *sets])
        run = subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)
        try:
            yield run
        finally:
            run.kill()

    def sent_nbytes(self) -> int:
        """What the hub has sent over the link."""
        read = self.network.inside(HUB, ["cat", "/proc/net/dev"])
        lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
        line = next(line for line in lines if line.strip().startswith("w1:"))
        return int(line.partition(":")[2].split()[8])


def one(out: Path, given: dict[str, object], options: argparse.Namespace) -> dict[str, Any]:
    """A run of so many seconds: its steps, and what crossed the link."""
    with ExitStack() as stack:
        far = stack.enter_context(cluster(options.rate, delay_ms=options.delay, store=True))
        settings = given | {
            "max_staleness": options.staleness,
            "lr": "3e-6",
            "policies.solver.tasks_per_step": 4,
            "pools.worker.workers": 1,
            "pools.worker.region": "far",
            "steps": 100_000,
            "store": f"s3://{BUCKET}/{out.name}",
            "out": out,
            "path": HERE,
        }
        run = stack.enter_context(far.train(settings))
        _wait(lambda: bool(metrics.read(out)), run)
        first, begun, before = metrics.read(out), time.monotonic(), far.sent_nbytes()
        time.sleep(options.seconds)
        after, last, seconds = far.sent_nbytes(), metrics.read(out), time.monotonic() - begun
        run.send_signal(signal.SIGINT)
        summary = json.loads(run.communicate()[0])
    policy = summary["policies"]["solver"]
    (worker,) = policy["workers"]
    return {
        "steps": len(last) - len(first),
        "seconds": round(seconds, 1),
        "steps_an_hour": round(3600 * (len(last) - len(first)) / seconds, 1),
        "link_nbytes": after - before,
        "version_nbytes": round(sum(policy["patch_nbytes"]) / len(policy["patch_nbytes"])),
        "density": sum(policy["density"]) / len(policy["density"]),
        "model_nbytes": policy["full_nbytes"],
        "staleness": sum(policy["staleness"]) / len(policy["staleness"]),
        "syncs": worker["syncs"],
        "sync_s": worker["sync_s"] / worker["syncs"],
        "dropped": policy["dropped"],
        "verified": worker["verified"],
        "wait_s": round(policy["wait_s"], 1),
        "train_s": round(policy["train_s"], 1),
        "publish_s": round(policy["publish_s"], 1),
    }


def _model(where: Path) -> int:
    """Write the model; return its parameters."""
    import torch
    import transformers

    from pulse_rl.flow import model

    tokenizer = model.load("tiny", seed=0).tokenizer
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES, vocab_size=len(tokenizer), tie_word_embeddings=True, pad_token_id=0, eos_token_id=1
        )
    )
    llama.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return sum(parameter.numel() for parameter in llama.parameters())


def _beside(program: str) -> str:
    return str(Path(sys.executable).parent / program)


def _answers(network: Network, hub: str) -> bool:
    """Whether the cluster takes connections."""
    connect = f"import socket; socket.create_connection(({hub!r}, {RAY}), 1)"
    command = network.inside(HUB, [sys.executable, "-c", connect])
    return subprocess.run(command, capture_output=True).returncode == 0


def _wait(condition: Any, process: "subprocess.Popen[Any]", seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} ended, or was not ready after {seconds:g} s")
        time.sleep(0.2)


def _end(node: "subprocess.Popen[Any]") -> None:
    node.terminate()
    node.wait(60)


if __name__ == "__main__":
    main()
