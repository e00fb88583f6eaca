"""The publisher and the subscribers of the benchmark; `measure` says what is measured and how."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pulse_rl as pulse
from bench.link.measure import Order
from bench.link.orders import answer, orders
from bench.roles import live_weights, masters, step, warm
from pulse_rl.sync.subscribe.polling import POLL_S

PART_NBYTES = 8 << 20  # a checkpoint is uploaded in parts of this size
WAIT_S = 3600.0  # longest wait for a version


def publisher(directory: str, layers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = masters(layers, generator)
    warm()
    file = Path(directory) / "saved.safetensors"
    answer({"elements": sum(tensor.numel() for tensor in weights.values())})
    for order in orders(Order):
        if order.version == 0:
            bucket = pulse.open_store(order.history)
            sender = None
            if order.method != "full":
                sender = pulse.Publisher(bucket, cast="bfloat16", codec=order.method, anchor_every=10**9)
                sender.publish(weights, version=0)
            answer({})
            continue
        step(weights, generator)
        start = time.monotonic()
        if sender:
            report = sender.publish(weights, version=order.version)
            seconds = time.monotonic() - start
            found = {"nbytes": report.sent_nbytes, "digest": report.digest, "density": report.density}
        else:
            nbytes = _publish_full(bucket, order.version, weights, file)
            seconds = time.monotonic() - start
            found = {"nbytes": nbytes, "digest": pulse.digest(_cast(weights))}
        answer(found | {"start": start, "seconds": seconds})


def _cast(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def _publish_full(bucket: Any, version: int, weights: dict[str, torch.Tensor], file: Path) -> int:
    from safetensors.torch import save_file

    save_file(_cast(weights), file)
    with file.open("rb") as saved:
        bucket.put(_full_name(version), iter(lambda: saved.read(PART_NBYTES), b""))
    return file.stat().st_size


def _full_name(version: int) -> str:
    return f"full/{version:06d}.safetensors"


def subscriber(directory: str, layers: int) -> None:
    start = masters(layers, torch.Generator().manual_seed(0))
    live = live_weights(layers)
    for name, tensor in live.items():
        tensor.copy_(start.pop(name))  # the publisher's first version
    warm()
    file = Path(directory) / "loaded.safetensors"
    answer({})
    for order in orders(Order):
        if order.version == 0:
            bucket = pulse.open_store(order.history)
            receiver = None
            if order.method != "full":
                # An anchor takes minutes over a narrow link. These weights hold version 0 already, as if loaded from
                # a local file; the subscriber recognises them by their digest.
                receiver = pulse.Subscriber(bucket)
                report = receiver.sync(live)
                if report.route != "none":
                    raise ValueError(f"expected to hold version 0 already, found the route {report.route}")
            answer({})
        elif receiver:
            receiver.wait(order.version, WAIT_S)
            report = receiver.sync(live)
            proved = time.monotonic()
            answer(
                {
                    "proved": proved,
                    "nbytes": report.fetched_nbytes,
                    "digest": receiver.verify(live),
                    "sync_s": report.total_s,
                    "fetch_s": report.fetch_s,
                    "decode_s": report.decode_s,
                    "prove_s": report.prove_s,
                    "locked_s": report.apply_s,  # the write; until then weights are only read
                }
            )
        else:
            answer(_sync_full(bucket, order.version, live, file) | {"digest": pulse.digest(live)})


def _sync_full(bucket: Any, version: int, live: dict[str, torch.Tensor], file: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    while all(found.name != _full_name(version) for found in bucket.list("full")):
        time.sleep(POLL_S)
    start = time.monotonic()
    with file.open("wb") as loaded:
        for part in bucket.stream(_full_name(version)):
            loaded.write(part)
    fetched = time.monotonic()
    tensors = load_file(file)
    mapped = time.monotonic()
    for name, tensor in tensors.items():
        live[name].copy_(tensor)
    done = time.monotonic()
    return {
        "proved": done,
        "nbytes": file.stat().st_size,
        "sync_s": done - start,
        "fetch_s": fetched - start,
        "load_s": done - fetched,
        "locked_s": done - mapped,
    }


ROLES: dict[str, Callable[[str, int], None]] = {"publisher": publisher, "subscriber": subscriber}

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    ROLES[settings["role"]](settings["directory"], settings["layers"])
