"""The collectives of a channel over NCCL, with one rank: two ranks cannot share one GPU under NCCL.

A channel needs two, so what runs is what it is made of: a bucket of bytes in host memory is copied to the device,
broadcast, gathered, or sent from all to all by NCCL, and copied back. That ranks meet is not seen here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from bench.gpu.children import Keep, Options
from bench.gpu.clock import wall
from pulse_rl.group.collectives import Group

BUCKET_NBYTES = 32 << 20


def name_meeting_place() -> None:
    """Set in the environment where the ranks of this process, and of those that it starts, meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def measure_collectives(_: Options, keep: Keep) -> None:
    name_meeting_place()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1)
    keep("bucket", _bucket)
    dist.destroy_process_group()


def _bucket() -> dict[str, object]:
    """What they take on one rank, and that they give back what went in."""
    group = Group.of()
    bucket = np.random.default_rng(0).integers(0, 256, BUCKET_NBYTES, np.uint8)
    data = bucket.tobytes()
    found: dict[str, object] = {"backend": str(dist.get_backend()), "nbytes": len(data)}
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: group.broadcast(0, bucket, len(data)),
        "gather": lambda: group.gather(data, len(data))[0],
        "all_to_all": lambda: group.all_to_all([data], [len(data)])[0],
    }
    for name, call in calls.items():
        assert bytes(call()) == data  # type: ignore[call-overload]
        found[f"{name}_s"] = wall(call)
    return found
