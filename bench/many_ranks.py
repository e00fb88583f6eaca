"""What a step of a collective `publish` or `sync` costs a rank, by the number of ranks. Less than a minute.

    .venv/bin/python -m bench.many_ranks

In a step every rank sends a short message to every other one and waits for theirs. The ranks are threads of one
process, each with its own connections over Gloo, so their processor time is measured together and divided.
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pulse_rl.group.private import PrivateGroup
from pulse_rl.group.ranks import Ranks

RANKS, STEPS, TIMEOUT_S = (2, 4, 8, 16, 32, 64), 20, 300.0


def measure(ranks: int) -> tuple[float, float]:
    """Seconds of processor time that a step takes a rank, and bytes that a rank sends to each other one."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    spans: list[float] = []
    begin = threading.Barrier(ranks, action=lambda: spans.append(time.process_time()))
    end = threading.Barrier(ranks, action=lambda: spans.append(time.process_time()))

    def take_part(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=TIMEOUT_S))
        group = PrivateGroup(gloo, rank, ranks, TIMEOUT_S)
        group.gather_numbers([0])  # returns when all are connected
        connected = group.sent_nbytes
        begin.wait()
        for _ in range(STEPS):
            Ranks(group).share("a step", lambda: [rank, "0123456789abcdef"], list)
        end.wait()
        sent.append((group.sent_nbytes - connected) / STEPS / (ranks - 1))

    sent: list[float] = []
    run([threading.Thread(target=take_part, args=(rank,)) for rank in range(ranks)])
    return (spans[1] - spans[0]) / STEPS / ranks, sent[0]


def run(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    print("| ranks | processor time of a step | for each other rank | bytes to each other rank |\n|--:|--:|--:|--:|")
    for ranks in RANKS:
        seconds, nbytes = measure(ranks)
        print(f"| {ranks} | {1e3 * seconds:.2f} ms | {1e6 * seconds / (ranks - 1):.0f} µs | {nbytes:.0f} |")
