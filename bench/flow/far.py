"""A trainer and its only pool, apart by a narrow link: steps an hour with patches and with full weights.

    python -m bench.flow.far --rate 10 --seconds 240 --out /tmp/far      # Linux, as root

The driver, the trainer, the Dataflow and an S3 service are in one network namespace; a node of the same Ray cluster,
with the pool, is in another one behind the link. The recipe is `math` with one worker, a random Llama of 20 M
parameters (41 MB in BF16) whose tokens are characters, and a reward in which the answers of a group differ. Steps are
counted for so many seconds after the first one.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.link.network import Network
from bench.link.processes import Process
from pulse_rl.flow import metrics

HERE = Path(__file__).parent
S3, BUCKET, RAY = 9000, "bench", 6379  # in a new namespace every port is free
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
    parser.add_argument("--seconds", type=float, default=240.0, help="of each run, once it has begun")
    parser.add_argument("--staleness", type=int, default=4, help="that is allowed: of two-regions")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    model = options.out / "model"
    nbytes = 2 * _model(model)
    for sync in ("patch", "full"):
        found = one(options.out / sync, model, sync, options)
        print(json.dumps({"sync": sync, "mbit": options.rate, "model_nbytes": nbytes} | found), flush=True)


def one(out: Path, model: Path, sync: str, options: argparse.Namespace) -> dict[str, Any]:
    """A run of so many seconds: its steps, and what crossed the link."""
    with Network(1) as network, ExitStack() as stack:
        hub = network.hub(1)
        environment = _environment(hub)
        address, far = f"{hub}:{RAY}", f"{hub.rpartition('.')[0]}.2"
        serve = [sys.executable, "-m", "bench.trainers.rank", "store", "{}"]
        store = Process("store", network, HUB, serve, {})
        stack.callback(store.end)
        store.answer()
        head = ["--head", f"--port={RAY}", "--include-dashboard=false", f"--temp-dir=/tmp/far-{os.getpid()}"]
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
        network.shape(options.rate)
        settings = {
            "model": model,
            "sync": sync,
            "max_staleness": options.staleness,
            "lr": "3e-6",
            "policies.solver.tasks_per_step": 4,
            "workflow.group_size": 4,
            "workflow.reward": "far_reward:vowels",
            "pools.worker.workers": 1,
            "pools.worker.region": "far",
            "steps": 100_000,
            "address": f'"{address}"',
            "store": f"s3://{BUCKET}/{sync}",
            "out": out,
            "path": HERE,
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [_beside("pulse-rl"), "train", "--json", *sets]
        run = subprocess.Popen(network.inside(HUB, command), env=environment, stdout=subprocess.PIPE, text=True)
        stack.callback(run.kill)
        _wait(lambda: bool(_steps(out)), run)
        first, begun, before = _steps(out), time.monotonic(), _sent(network)
        time.sleep(options.seconds)
        after, last, seconds = _sent(network), _steps(out), time.monotonic() - begun
        run.send_signal(signal.SIGINT)
        summary = json.loads(run.communicate()[0])
    policy = summary["policies"]["solver"]
    return {
        "steps": len(last) - len(first),
        "seconds": round(seconds, 1),
        "steps_an_hour": round(3600 * (len(last) - len(first)) / seconds, 1),
        "link_nbytes": after - before,
        "version_nbytes": round(sum(policy["patch_nbytes"]) / len(policy["patch_nbytes"])),
        "density": sum(policy["density"]) / len(policy["density"]),
        "syncs": policy["workers"][0]["syncs"],
        "dropped": policy["dropped"],
        "verified": policy["workers"][0]["verified"],
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


def _environment(hub: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return kept | {
        "AWS_ENDPOINT_URL": f"http://{hub}:{S3}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # nobody else is in these networks
    }


def _beside(program: str) -> str:
    return str(Path(sys.executable).parent / program)


def _steps(out: Path) -> list[dict[str, Any]]:
    return metrics.read(Path(out))


def _sent(network: Network) -> int:
    """Bytes that the hub has sent over the link."""
    done = subprocess.run(
        network.inside(HUB, ["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True
    ).stdout
    line = next(line for line in done.splitlines() if line.strip().startswith("w1:"))
    return int(line.partition(":")[2].split()[8])


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
